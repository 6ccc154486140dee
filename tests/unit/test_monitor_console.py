"""What a person sees: on a terminal (a small one is emulated), as plain lines, and not at all."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from parti.cluster.terminal import wants_colors
from parti.history import History
from parti.monitor import console
from parti.monitor.console import Lines, Silence, Terminal, choose_display
from parti.monitor.header import RunEnd, RunFacts, header, summary
from parti.monitor.live_line import LiveLine

FACTS = RunFacts(
    name="digits",
    strategy="MirroredStrategy(seed=1)",
    processes=2,
    hosts=1,
    devices="2 × cpu",
    comm="shared memory",
    precision="fp32",
    threads=1,
    exact=True,
    num_parameters=1_199_882,
    batch_size=128,
    micro_batches=4,
    epochs=3,
    num_samples=1437,
    steps_per_epoch=12,
    notes=("convolutions in channels_last, ReLU behind max-pooling in 2 places, equal to the bit",),
)
ROW = {
    "epoch": 1,
    "step": 12,
    "loss": 0.5,
    "accuracy": 0.9,
    "val_loss": 0.4,
    "samples": 1437,
    "samples_per_s": 14370.0,
    "time_s": 0.1,
    "compute_s": 0.08,
    "comm_s": 0.01,
    "wait_data_s": 0.001,
    "validation_s": 0.02,
}

TITLES = "epoch loss accuracy val_loss samples/s comm data time"
VALUES = "1/3 0.5000 0.9000 0.4000 14,370 10% 1% 0.10 s"


class Screen(io.StringIO):
    """A terminal of so many columns that knows \\r, \\n and 'erase to the end of the line'."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.column = 0
        self.widest = 0

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError

    def write(self, text: str) -> int:
        plain = re.sub(r"\x1b\[\d*m", "", text)
        for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", plain):
            if part == "\n":
                self.lines.append("")
                self.column = 0
            elif part == "\r":
                self.column = 0
            elif part == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self.column]
            else:
                before, after = self.lines[-1][: self.column], self.lines[-1][self.column :]
                self.lines[-1] = before.ljust(self.column) + part + after[len(part) :]
                self.column += len(part)
                self.widest = max(self.widest, self.column)
        return len(text)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(LiveLine, "width", lambda self: 80)
    monkeypatch.setattr(console, "REFRESH_S", 0.0)
    return made


def _end(**changes: Any) -> RunEnd:
    history = History()
    history.rows = [{**ROW}, {**ROW, "epoch": 2, "val_loss": 0.3}]
    settings: dict[str, Any] = {
        "history": history,
        "num_epochs": 2,
        "epochs": 2,
        "num_steps": 24,
        "num_samples": 2874,
        "elapsed_s": 0.25,
        "spent_s": {"compute": 0.16, "communication": 0.02, "validation": 0.04},
    }
    return RunEnd(**{**settings, **changes})


def test_a_run_on_a_terminal(screen: Screen) -> None:
    display = Terminal(screen, colors=True, ascii_only=False)
    display.begin(FACTS, lambda: {"accuracy": 0.25})
    for step in range(6):
        display._due = 0.0
        display.step(2.0 - step / 10, 128, 0.001, 0.0)
    assert re.fullmatch(
        r"epoch 1/3  ━+╸?━+   50%  loss \d\.\d+  accuracy 0\.2500  .*/s.*", screen.lines[-1]
    )
    display._due = 0.0
    display.validation(1, 4)
    assert re.fullmatch(r"epoch 1/3  ━+   25%  validation", screen.lines[-1])
    display.epoch(ROW)
    assert screen.lines[-1] == ""
    titles, values = screen.lines[-3:-1]
    assert titles.split() == TITLES.split()
    assert values.split() == VALUES.split()
    assert len(titles) == len(values)
    display.epoch({**ROW, "epoch": 2})
    display.end(_end())
    display.close()
    assert screen.widest <= 80
    assert any("best 0.3000 in epoch 2" in text for text in screen.lines)
    assert any("compute 64%" in text and "rest 12%" in text for text in screen.lines)


def test_what_others_print_stands_above_the_line(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    display = Terminal(screen, colors=False, ascii_only=False)
    display.begin(FACTS, dict)
    display._due = 0.0
    display.step(1.0, 128, 0.0, 0.0)
    print("first words", file=sys.stdout)
    assert screen.lines[-2:] == ["first words", ""]
    print("half a", end="", file=sys.stderr)
    display._due = 0.0
    display.step(1.0, 128, 0.0, 0.0)
    print(" line")
    assert screen.lines[-2:] == ["half a line", ""]
    display._due = 0.0
    display.step(1.0, 128, 0.0, 0.0)
    assert screen.lines[-1].startswith("epoch 1/3")
    display.close()
    assert sys.stdout is screen
    assert sys.stderr is screen
    assert screen.lines[-2].startswith("epoch 1/3")
    assert screen.lines[-1] == ""


def test_the_line_is_drawn_only_when_it_is_due(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "REFRESH_S", 1e9)
    asked = []
    display = Terminal(screen, colors=False, ascii_only=False)
    display.begin(FACTS, lambda: asked.append(1) or {})  # type: ignore[func-returns-value]
    for _ in range(50):
        display.step(1.0, 128, 0.0, 0.0)
    display.close()
    assert len(asked) == 1


def test_a_stream_has_steps_but_no_end_in_sight(screen: Screen) -> None:
    screen.encoding = "ascii"  # type: ignore[misc]
    facts = replace(FACTS, steps_per_epoch=None, num_samples=None)
    display = Terminal(screen, colors=False, ascii_only=True)
    display.begin(facts, dict)
    display._due = 0.0
    display.step(1.0, 128, 0.0, 0.0)
    assert re.match(r"epoch 1/3  step 1  loss 1\.0000  [\d,.]+/s  comm 0%", screen.lines[-1])
    assert any("a stream" in text for text in screen.lines)
    assert all(text.isascii() for text in screen.lines)
    display.close()


def test_plain_lines() -> None:
    stream = io.StringIO()
    display = Lines(stream, every_s=0.0)
    display.begin(FACTS, lambda: {"accuracy": 0.25})
    display.step(1.0, 128, 0.0, 0.0)
    display.epoch(ROW)
    display.end(_end(epochs=5))
    display.close()
    text = stream.getvalue().splitlines()
    assert text[0].startswith("Parti, digits: strategy MirroredStrategy(seed=1), processes 2 on 1")
    assert re.match(r"epoch 1/3  step 1/12  loss 1\.0000  accuracy 0\.2500  .*/s", text[2])
    assert text[3].startswith("epoch 1/3 done  loss 0.5000  accuracy 0.9000  val_loss 0.4000")
    assert text[4].startswith("done: 2 of 5 epochs in 0.25 s  compute 64%")
    assert not re.search(r"[\x1b\r]", stream.getvalue())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("processes", [2, 7])
def test_panels_fit_the_terminal(width: int, processes: int) -> None:
    facts = replace(FACTS, processes=processes)
    history = _end().history
    history.stop_reason = "val_loss has not become better " * 4
    for ascii_only in (False, True):
        lines = header(facts, width, colors=False, ascii_only=ascii_only)
        lines += summary(_end(epochs=9), width, colors=False, ascii_only=ascii_only)
        assert {len(text) for text in lines} == {min(width, 100)}
    told = " ".join(" ".join(text.strip("│ ") for text in lines).split())
    assert "stopped: val_loss" not in told  # another run's
    spares = [text for text in facts.warnings() if "spares" in text]
    assert len(spares) == (1 if processes == 7 else 0)
    if spares:
        assert "3 of 7 processes have no micro-batch" in spares[0]
        assert "micro_batches=7" in spares[0]


def test_a_stopped_run_says_why() -> None:
    end = _end(epochs=9)
    end.history.stop_reason = "enough"
    lines = summary(end, 80, colors=False, ascii_only=False)
    assert "2 epochs of 9" in lines[0]
    assert "stopped: enough" in lines[1]


def test_who_gets_which_display(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(**changes: Any) -> object:
        return choose_display(**{"is_chief": True, "progress": True, "log_every_s": 1, **changes})

    assert isinstance(choose(), Lines)  # a screen whose size nobody knows
    monkeypatch.setattr(console, "_is_terminal", lambda stream: True)
    assert isinstance(choose(), Terminal)
    assert isinstance(choose(is_chief=False), Silence)
    assert isinstance(choose(progress=False), Silence)


def test_colors_can_be_declined() -> None:
    assert wants_colors({"TERM": "xterm-256color"})
    assert not wants_colors({"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert not wants_colors({"TERM": "dumb"})
    assert not wants_colors({})
