"""What is said before a run and after it, as lines of text. Pure; knows nothing of terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parti.history import CLOCK_NAMES, History, Phase
from parti.monitor.text import count, duration, number, rate, share, styled

_WIDEST = 100
_TWO_COLUMNS_FROM = 76


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What stands in the header."""

    name: str | None
    strategy: str
    processes: int
    hosts: int
    devices: str
    comm: str
    precision: str
    threads: int
    exact: bool
    num_parameters: int
    batch_size: int
    micro_batches: int
    epochs: int
    first_epoch: int = 1
    num_samples: int | None
    steps_per_epoch: int | None
    notes: tuple[str, ...] = ()
    phase: Phase | None = None

    def pairs(self) -> list[tuple[str, str]]:
        samples = "a stream" if self.num_samples is None else count(self.num_samples, "sample")
        if self.steps_per_epoch is not None:
            samples += f", {count(self.steps_per_epoch, 'step')}"
        is_told = self.phase is not None and self.phase.name != "1"
        return [
            *([("phase", self.phase.name)] if self.phase is not None and is_told else []),
            ("strategy", self.strategy),
            ("processes", f"{self.processes} on {count(self.hosts, 'host')}"),
            ("devices", self.devices),
            ("communication", self.comm),
            ("threads", f"{self.threads} a process"),
            ("model", count(self.num_parameters, "parameter")),
            (
                "batch",
                f"{self.batch_size} in {count(self.micro_batches, 'micro-batch', 'micro-batches')}",
            ),
            ("epoch", samples),
            ("precision", self.precision),
            ("gradients", "exact sums" if self.exact else "fastest sums"),
        ]

    def warnings(self) -> tuple[str, ...]:
        """What is worth changing before a long run."""
        spares = self.processes - self.micro_batches
        if spares <= 0:
            return ()
        have = "has" if spares == 1 else "have"
        return (
            f"{spares} of {self.processes} processes {have} no micro-batch and follow along as "
            f"spares. Run {count(self.micro_batches, 'process', 'processes')}, or give fit "
            f"micro_batches={self.processes}; that number is part of the training program, so the "
            f"weights come out a little different.",
        )


def header(facts: RunFacts, width: int, *, colors: bool, ascii_only: bool) -> list[str]:
    """The panel that opens a run."""
    inside = min(width, _WIDEST) - 4
    title = "Parti" if facts.name is None else f"Parti · {facts.name}"
    pairs = facts.pairs()
    if inside + 4 >= _TWO_COLUMNS_FROM:
        half = -(-len(pairs) // 2)
        rows = _two_columns(pairs[:half], pairs[half:], inside, colors)
    else:
        rows = [_pair(key, value, 15, inside, colors) for key, value in pairs]
    notes = [("·", note, "dim") for note in facts.notes]
    notes += [("!", warning, "yellow") for warning in facts.warnings()]
    if notes:
        rows.append(" " * inside)
    for mark, note, style in notes:
        wrapped = textwrap.wrap(note, inside - 2)
        rows += [
            styled(f"{mark if i == 0 else ' '} {text}".ljust(inside), style, colors)
            for i, text in enumerate(wrapped)
        ]
    return box(title, rows, inside, colors=colors, ascii_only=ascii_only)


def _pair(key: str, value: str, key_width: int, width: int, colors: bool) -> str:
    room = max(width - key_width, 1)
    shown = value if len(value) <= room else value[: room - 1] + "…"
    return styled(key.ljust(key_width), "dim", colors) + shown.ljust(room)


def _two_columns(
    left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]], width: int, colors: bool
) -> list[str]:
    first = width // 2 + 2
    rows = []
    for i, (key, value) in enumerate(left):
        text = _pair(key, value, 15, first - 1, colors) + " "
        other = _pair(*right[i], 11, width - first, colors) if i < len(right) else ""
        rows.append(text + (other or " " * (width - first)))
    return rows


def box(
    title: str, rows: Sequence[str], inside: int, *, colors: bool, ascii_only: bool
) -> list[str]:
    """Rows, each `inside` characters wide on the screen, in a frame."""
    # Top left, flat, top right, side, bottom left, bottom right.
    a, flat, b, side, c, d = tuple("+-+|++") if ascii_only else tuple("╭─╮│╰╯")
    title = title[: inside - 2]
    top = styled(f"{a}{flat} ", "dim", colors) + styled(title, "bold", colors)
    top += styled(f" {flat * (inside - len(title) - 1)}{b}", "dim", colors)
    edge = styled(side, "dim", colors)
    bottom = styled(f"{c}{flat * (inside + 2)}{d}", "dim", colors)
    return [top, *(f"{edge} {row} {edge}" for row in rows), bottom]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What a run came to. The times are this rank's."""

    history: History
    num_epochs: int
    """That this start has been through."""
    epochs: int
    num_steps: int
    num_samples: int
    elapsed_s: float
    spent_s: Mapping[str, float]
    """Seconds by what they were spent on; the rest went elsewhere."""


_PAINT = {
    "compute": "green",
    "optimizer": "blue",
    "communication": "yellow",
    "waiting for data": "red",
    "validation": "cyan",
}


def summary(end: RunEnd, width: int, *, colors: bool, ascii_only: bool) -> list[str]:
    """The panel that closes a run."""
    inside = min(width, _WIDEST) - 4
    done = end.num_epochs
    title = f"{count(done, 'epoch')} of {end.epochs}" if done < end.epochs else count(done, "epoch")
    title += f" · {count(end.num_steps, 'step')} · {duration(end.elapsed_s)}"
    if end.elapsed_s > 0:
        title += f" · {rate(end.num_samples / end.elapsed_s)} samples/s"
    rows = []
    if end.history.stop_reason:
        reason = f"stopped: {end.history.stop_reason}"
        rows += [
            styled(text.ljust(inside), "yellow", colors) for text in textwrap.wrap(reason, inside)
        ]
    rows += _results(end.history, inside, colors)
    rows += _where_time_went(end, inside, colors, ascii_only)
    return box(title, rows, inside, colors=colors, ascii_only=ascii_only)


def _results(history: History, width: int, colors: bool) -> list[str]:
    rows = []
    measured = history.measured(-1)
    names = [name for name in measured if name != "lr" and not name.startswith("lr_")]
    key_width = max((len(name) for name in names), default=0) + 2
    for name in names:
        text = number(measured[name]).rjust(9)
        if len(history) > 1 and any(value == value for value in history[name]):
            epoch, value = history.best(name)
            text += f"   best {number(value)} in epoch {epoch}"
        rows.append(_pair(name, text, key_width, width, colors))
    return rows


def _where_time_went(end: RunEnd, width: int, colors: bool, ascii_only: bool) -> list[str]:
    if end.elapsed_s <= 0:
        return []
    parts = {name: seconds / end.elapsed_s for name, seconds in end.spent_s.items()}
    parts = {name: part for name, part in parts.items() if part >= 0.005}
    rest = 1.0 - sum(parts.values())
    words = [(f"{name} {share(part)}", _PAINT.get(name, "")) for name, part in parts.items()]
    if rest >= 0.005:
        words.append((f"rest {share(rest)}", "dim"))
    rows = [" " * width]
    if colors and not ascii_only:
        done = 0
        painted = ""
        reached = 0.0
        for name, part in parts.items():
            reached += part
            length = round(reached * width) - done
            painted += styled("━" * length, _PAINT.get(name, ""), True)
            done += length
        rows.append(painted + styled("━" * (width - done), "dim", True))
    line, length = "", 0
    for text, style in words:
        gap = 3 if length else 0
        if length + gap + len(text) > width:
            rows.append(line + " " * (width - length))
            line, length, gap = "", 0, 0
        line += " " * gap + styled(text, style, colors)
        length += gap + len(text)
    rows.append(line + " " * (width - length))
    return rows


def epoch_words(row: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, value) of what an epoch measured, without the readings of clocks."""
    aside = CLOCK_NAMES | {"phase", "epoch", "step", "samples"}
    return [(name, number(value)) for name, value in row.items() if name not in aside]
