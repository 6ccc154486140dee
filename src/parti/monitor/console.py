"""The run as a person sees it: a live line on a terminal, plain lines elsewhere, or nothing.

The training loop calls `step` after every step. That only adds up numbers; text is made when
something is due to be shown, at most ten times a second on a terminal, and less often where the
terminal itself is slow. Everything happens on the training thread, so nothing is ever half drawn.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from parti.monitor.header import RunEnd, RunFacts, epoch_words, header, summary
from parti.monitor.live_line import LiveLine
from parti.monitor.text import (
    Column,
    Field,
    clock,
    duration,
    fit_columns,
    fit_encoding,
    line,
    number,
    rate,
    share,
    styled,
)

REFRESH_S = 0.1
_WINDOW_S = 5.0
_MEMORY_STEPS = 50
_ROOM_FOR_INTERRUPT = 3  # a terminal prints ^C where the line ends; it should not wrap


class Display(Protocol):
    """What the Trainer tells whoever watches."""

    def begin(self, facts: RunFacts, live: Callable[[], Mapping[str, float]]) -> None:
        """A run begins. `live` gives the metrics so far; it is called only when they are shown."""
        ...

    def step(self, loss: float, num_samples: int, comm_s: float, waited_s: float) -> None:
        """A step is done."""
        ...

    def validation(self, done: int, total: int | None) -> None:
        """So many batches of the validation set are done."""
        ...

    def epoch(self, row: Mapping[str, float]) -> None:
        """An epoch is over."""
        ...

    def end(self, end: RunEnd) -> None:
        """The run is over."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, after an error too."""
        ...


class Silence:
    """For ranks other than 0, and for who wants no output."""

    def begin(self, facts: RunFacts, live: Callable[[], Mapping[str, float]]) -> None:
        return None

    def step(self, loss: float, num_samples: int, comm_s: float, waited_s: float) -> None:
        return None

    def validation(self, done: int, total: int | None) -> None:
        return None

    def epoch(self, row: Mapping[str, float]) -> None:
        return None

    def end(self, end: RunEnd) -> None:
        return None

    def close(self) -> None:
        return None


class _Pace:
    """How far the run is, and how fast it has been over the last seconds."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.epoch = facts.first_epoch
        self.steps = 0
        self.loss = math.nan
        self._samples = 0
        self._comm_s = 0.0
        self._waited_s = 0.0
        self._marks: deque[tuple[float, int, int, float, float]] = deque()
        self._all_steps = 0
        self.mark(time.perf_counter())

    def add(self, loss: float, num_samples: int, comm_s: float, waited_s: float) -> None:
        self.steps += 1
        self._all_steps += 1
        self._samples += num_samples
        self._comm_s += comm_s
        self._waited_s += waited_s
        if loss == loss:  # a step whose loss has no value says nothing
            before = self.loss
            forget = 1.0 / min(self._all_steps, _MEMORY_STEPS)
            self.loss = loss if before != before else before + forget * (loss - before)

    def next_epoch(self) -> None:
        self.epoch += 1
        self.steps = 0

    def mark(self, now: float) -> None:
        self._marks.append((now, self._all_steps, self._samples, self._comm_s, self._waited_s))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW_S:
            self._marks.popleft()

    def restart_clock(self) -> None:
        """After a pause such as validation, which is no part of the pace."""
        self._marks.clear()
        self.mark(time.perf_counter())

    def part(self) -> float | None:
        total = self.facts.steps_per_epoch
        return self.steps / total if total else None

    def fields(self) -> list[Field]:
        """Speed, shares of time and what is left, over the last seconds."""
        first, last = self._marks[0], self._marks[-1]
        elapsed = last[0] - first[0]
        if elapsed <= 0:
            return []
        fields = [Field(f"{rate((last[2] - first[2]) / elapsed)}/s", 2)]
        total = self.facts.steps_per_epoch
        steps_per_s = (last[1] - first[1]) / elapsed
        if total and steps_per_s > 0:
            fields.append(Field(clock((total - self.steps) / steps_per_s), 3))
        if self.facts.processes > 1:
            fields.append(Field(f"comm {share((last[3] - first[3]) / elapsed)}", 5, "dim"))
        fields.append(Field(f"data {share((last[4] - first[4]) / elapsed)}", 6, "dim"))
        return fields


class Terminal:
    """A panel, a line that lives, a row for every epoch, and a panel."""

    def __init__(self, stream: TextIO, *, colors: bool, ascii_only: bool) -> None:
        self._live_line = LiveLine(stream)
        self._colors = colors
        self._ascii_only = ascii_only
        self._due = 0.0
        self._columns: list[Column] | None = None
        self._wide = True

    def begin(self, facts: RunFacts, live: Callable[[], Mapping[str, float]]) -> None:
        self._facts = facts
        self._live = live
        self._say(header(facts, self._width(), colors=self._colors, ascii_only=self._ascii_only))
        self._pace = _Pace(facts)
        self._live_line.open()

    def step(self, loss: float, num_samples: int, comm_s: float, waited_s: float) -> None:
        self._pace.add(loss, num_samples, comm_s, waited_s)
        now = time.perf_counter()
        if now >= self._due:
            self._draw(now)

    def _draw(self, now: float) -> None:
        pace = self._pace
        pace.mark(now)
        fields = [Field(self._epoch_word(), style="bold")]
        part = pace.part()
        done = f"{share(part):>4}" if part is not None else f"step {pace.steps:,}"
        fields += [Field(done, 1), Field(f"loss {number(pace.loss)}", 0)]
        fields += [Field(f"{name} {number(value)}", 4) for name, value in self._live().items()]
        self._show(fields + pace.fields(), part, now)

    def _show(self, fields: list[Field], part: float | None, now: float) -> None:
        self._live_line.show(
            line(
                fields,
                self._width() - _ROOM_FOR_INTERRUPT,
                part=part,
                colors=self._colors,
                ascii_only=self._ascii_only,
            )
        )
        # Drawing takes at most a fiftieth of the time, however slow the terminal.
        ended = time.perf_counter()
        self._due = ended + max(REFRESH_S, 50 * (ended - now))

    def _epoch_word(self) -> str:
        total = str(self._facts.epochs)
        return f"epoch {self._pace.epoch:>{len(total)}}/{total}"

    def validation(self, done: int, total: int | None) -> None:
        now = time.perf_counter()
        if now < self._due and done:
            return
        part = done / total if total else None
        fields = [Field(self._epoch_word(), style="bold")]
        fields.append(Field(f"{share(part):>4}" if part is not None else f"batch {done:,}"))
        fields.append(Field("validation", style="dim"))
        self._show(fields, part, now)

    def epoch(self, row: Mapping[str, float]) -> None:
        values = [("epoch", self._epoch_word().removeprefix("epoch").strip())]
        values += epoch_words(row) + _clock_words(row, self._facts.processes)
        if self._columns is None:
            ranks = {"samples/s": 3, "comm": 4, "data": 5, "time": 2}
            sizes = {"epoch": 5, "comm": 4, "data": 4, "time": 6, "samples/s": 7}
            self._columns = fit_columns(
                [(name, sizes.get(name, 7), ranks.get(name, 1)) for name, _ in values],
                self._width() - 1,
            )
            names = "  ".join(column.name.rjust(column.width) for column in self._columns)
            self._say([styled(names, "dim", self._colors)])
        by_name = dict(values)
        cells = [by_name.get(column.name, "").rjust(column.width) for column in self._columns]
        self._say(["  ".join(cells)])
        self._pace.next_epoch()
        self._pace.restart_clock()

    def end(self, end: RunEnd) -> None:
        width = self._width()
        self._live_line.clear()
        self._say(summary(end, width, colors=self._colors, ascii_only=self._ascii_only))

    def close(self) -> None:
        self._live_line.close()

    def _say(self, lines: list[str]) -> None:
        self._live_line.say("\n".join(lines) + "\n")

    def _width(self) -> int:
        return self._live_line.width()


class Lines:
    """One line an epoch, and one in between every so many seconds."""

    def __init__(self, stream: TextIO, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s

    def begin(self, facts: RunFacts, live: Callable[[], Mapping[str, float]]) -> None:
        self._facts = facts
        self._live = live
        name = "Parti" if facts.name is None else f"Parti, {facts.name}"
        self._say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.pairs()))
        for note in facts.notes:
            self._say(f"  {note}")
        for warning in facts.warnings():
            self._say(f"  warning: {warning}")
        self._pace = _Pace(facts)
        self._due = time.perf_counter() + self._every_s

    def step(self, loss: float, num_samples: int, comm_s: float, waited_s: float) -> None:
        self._pace.add(loss, num_samples, comm_s, waited_s)
        now = time.perf_counter()
        if now >= self._due:
            self._tell(now)

    def _tell(self, now: float) -> None:
        pace = self._pace
        pace.mark(now)
        total = self._facts.steps_per_epoch
        steps = f"step {pace.steps:,}" + (f"/{total:,}" if total else "")
        words = [f"epoch {pace.epoch}/{self._facts.epochs}", steps, f"loss {number(pace.loss)}"]
        words += [f"{name} {number(value)}" for name, value in self._live().items()]
        words += [field.text for field in pace.fields()]
        self._say("  ".join(words))
        self._due = now + self._every_s

    def validation(self, done: int, total: int | None) -> None:
        return None

    def epoch(self, row: Mapping[str, float]) -> None:
        words = [f"epoch {self._pace.epoch}/{self._facts.epochs} done"]
        words += [f"{name} {value}" for name, value in epoch_words(row)]
        words += [f"{name} {value}" for name, value in _clock_words(row, self._facts.processes)]
        self._say("  ".join(words))
        self._pace.next_epoch()
        self._pace.restart_clock()
        self._due = time.perf_counter() + self._every_s

    def end(self, end: RunEnd) -> None:
        words = [f"done: {end.num_epochs} of {end.epochs} epochs in {duration(end.elapsed_s)}"]
        if end.history.stop_reason:
            words.append(f"stopped: {end.history.stop_reason}")
        if end.elapsed_s > 0:
            words += [
                f"{name} {share(seconds / end.elapsed_s)}" for name, seconds in end.spent_s.items()
            ]
        self._say("  ".join(words))

    def close(self) -> None:
        return None

    def _say(self, text: str) -> None:
        text = fit_encoding(text, self._stream.encoding or "utf-8")
        print(text, file=self._stream, flush=True)


def _clock_words(row: Mapping[str, float], processes: int) -> list[tuple[str, str]]:
    time_s = row.get("time_s", 0.0)
    words = [("samples/s", rate(row.get("samples_per_s", 0.0)))]
    if time_s > 0:
        if processes > 1:
            words.append(("comm", share(row.get("comm_s", 0.0) / time_s)))
        words.append(("data", share(row.get("wait_data_s", 0.0) / time_s)))
    return [*words, ("time", duration(time_s))]


def choose_display(*, is_chief: bool, progress: bool, log_every_s: float) -> Display:
    """What suits this rank and the place its output goes to."""
    if not (is_chief and progress):
        return Silence()
    stream = sys.stdout
    if not _is_terminal(stream):
        return Lines(stream, log_every_s)
    from parti.cluster.terminal import wants_colors

    encoding = (getattr(stream, "encoding", None) or "ascii").lower()
    return Terminal(stream, colors=wants_colors(), ascii_only="utf" not in encoding)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError, AttributeError):
        return False
