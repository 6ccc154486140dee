"""Steps and epochs of a run as JSON lines, one object a line, for tools and for later.

    {"kind": "run", ...}     a fit begins: what stands in the header
    {"kind": "step", ...}    step, epoch, loss, samples, seconds by what they were spent on
    {"kind": "epoch", ...}   the epoch's row of the history
    {"kind": "end", ...}     why and when it ended

NaN and infinities are written as null. The training loop only appends a tuple; lines are made about
once a second. A file is added to, never overwritten: a resumed run goes on where it was. A place
that cannot be written to is told before training; a disk that fills up later does not stop it.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from parti.errors import ConfigError
from parti.monitor.header import RunFacts

FILE_NAME = "records.jsonl"
_FLUSH_S = 1.0
_STEP_NAMES = (
    "step",
    "epoch",
    "loss",
    "samples",
    "grad_norm",
    "compute_s",
    "comm_s",
    "optimizer_s",
    "wait_data_s",
)

StepValues = tuple[int, int, float, int, float | None, float, float, float, float]
"""The values of one step, in the order of the names above."""


class Records(Protocol):
    """Where what happens is kept."""

    def begin(self, facts: RunFacts) -> None: ...

    def step(self, values: StepValues) -> None: ...

    def epoch(self, row: Mapping[str, float]) -> None: ...

    def end(self, reason: str) -> None: ...


class NoRecords:
    """Keeps nothing: for ranks other than 0, and without a run directory."""

    def begin(self, facts: RunFacts) -> None:
        return None

    def step(self, values: StepValues) -> None:
        return None

    def epoch(self, row: Mapping[str, float]) -> None:
        return None

    def end(self, reason: str) -> None:
        return None


class RecordFile:
    """One file of records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[StepValues] = []
        self._due = 0.0
        self._is_given_up = False
        import msgspec  # only where records are kept

        self._encoder = msgspec.json.Encoder()

    def begin(self, facts: RunFacts) -> None:
        record = {"kind": "run", "time": time.time(), **dataclasses.asdict(facts)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._append([record])
        except OSError as error:
            raise ConfigError(
                f"run_dir={str(self._path.parent)!r}: {FILE_NAME} cannot be written there: "
                f"{error.strerror}. Choose another directory, or leave run_dir out."
            ) from error

    def step(self, values: StepValues) -> None:
        if self._is_given_up:
            return
        self._steps.append(values)
        if time.perf_counter() >= self._due:
            self._write([])

    def epoch(self, row: Mapping[str, float]) -> None:
        self._write([{"kind": "epoch", **row}])

    def end(self, reason: str) -> None:
        self._write([{"kind": "end", "time": time.time(), "reason": reason}])

    def _write(self, others: list[dict[str, object]]) -> None:
        steps: list[dict[str, object]] = [
            {"kind": "step", **dict(zip(_STEP_NAMES, values, strict=True))}
            for values in self._steps
        ]
        self._steps.clear()
        if self._is_given_up:
            return
        try:
            self._append([*steps, *others])
        except OSError as error:
            self._is_given_up = True
            warnings.warn(
                f"{self._path} cannot be written ({error.strerror}): training goes on, steps and "
                "epochs from here on are not recorded.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _append(self, records: list[dict[str, object]]) -> None:
        self._due = time.perf_counter() + _FLUSH_S
        with self._path.open("ab") as file:
            file.write(self._encoder.encode_lines(records))


def keep_records(run_dir: Path | None, *, is_chief: bool) -> Records:
    """Records in this directory, written by rank 0."""
    return RecordFile(run_dir / FILE_NAME) if run_dir is not None and is_chief else NoRecords()
