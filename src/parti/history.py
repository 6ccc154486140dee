"""What a run has measured, as data: one row an epoch, one loss a step. Draws nothing by itself."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from parti.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Mode = Literal["min", "max"]
"""Whether the lowest or the highest value of a column is the best."""

CLOCK_NAMES = frozenset(
    {"time_s", "samples_per_s", "compute_s", "comm_s", "wait_data_s", "validation_s"}
)
"""Columns read off this rank's clock. All others are equal on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training on one set of data: a `fit` with a name or with a checkpoint."""

    name: str
    number: int
    """From 1."""
    began: str
    """Date and time."""
    first_step: int
    epochs_before: int
    """Of all phases before it."""
    epochs: int
    """Asked for."""
    num_samples: int | None
    """Of its data; None for a stream."""
    fingerprint: str | None
    """Of its data, where they are in memory."""
    is_complete: bool = False


@final
class History:
    """One row an epoch and one loss a step, in the order they came.

    `history["val_loss"]` is a column, with NaN for epochs that have no such value. `rows` are the
    epochs as dictionaries: `epoch` and `step` (numbers of what is done), `loss`, metrics, the same
    names with `val_` in front for the validation set, `lr` for each group of a schedule, and the
    columns of `CLOCK_NAMES`. Where training has phases, `phase` is the number of a row's, and
    `epoch` counts within it.
    """

    def __init__(self, *, first_step: int = 0) -> None:
        self.first_step = first_step
        self.rows: list[dict[str, float]] = []
        self.step_losses = array("d")
        self.stop_reason: str | None = None
        """Why training ended before all its epochs; None if it did not."""
        self.phases: tuple[Phase, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def without_steps(self) -> History:
        """The same without the losses of single steps."""
        made = History(first_step=self.first_step)
        made.rows, made.stop_reason, made.phases = self.rows, self.stop_reason, self.phases
        return made

    def copy(self) -> History:
        """One that can grow without this one."""
        made = self.without_steps()
        made.rows, made.step_losses = [dict(row) for row in self.rows], self.step_losses[:]
        return made

    def until(self, name: str) -> History:
        """A copy that ends with the phase of this name."""
        last = next(i for i, phase in enumerate(self.phases) if phase.name == name)
        made = History(first_step=self.first_step)
        made.phases = self.phases[: last + 1]
        made.rows = [dict(row) for row in self.rows if row["phase"] <= last + 1]
        made.step_losses = self.step_losses[:]
        if last + 1 < len(self.phases):
            del made.step_losses[self.phases[last + 1].first_step - self.first_step :]
        else:
            made.stop_reason = self.stop_reason
        return made

    def only(self, name: str) -> History:
        """A copy of the phase of this name."""
        until = self.until(name)
        phase = until.phases[-1]
        made = History(first_step=phase.first_step)
        made.phases, made.stop_reason = until.phases[-1:], until.stop_reason
        made.rows = [row for row in until.rows if row["phase"] == phase.number]
        made.step_losses = until.step_losses[phase.first_step - self.first_step :]
        return made

    def names(self) -> list[str]:
        """The columns, in the order they first came."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __getitem__(self, name: str) -> list[float]:
        if not any(name in row for row in self.rows):
            raise KeyError(f"{name!r} is not in the history; it has {', '.join(self.names())}.")
        return [row.get(name, math.nan) for row in self.rows]

    def best(self, name: str, mode: Mode | None = None) -> tuple[int, float]:
        """(epoch, value) of the best value of a column; of equal ones, the earliest."""
        mode = mode or guess_mode(name)
        values = [
            (value if mode == "min" else -value, i, value)
            for i, value in enumerate(self[name])
            if not math.isnan(value)
        ]
        if not values:
            raise ConfigError(f"column {name!r} holds nothing but NaN: there is no best value.")
        _, i, value = min(values)
        return int(self.rows[i]["epoch"]), value

    def to_dict(self) -> dict[str, list[float]]:
        """Every column as a list, one value an epoch."""
        return {name: self[name] for name in self.names()}

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything, steps included, as JSON; written to `path` if one is given."""
        text = json.dumps(
            {
                "first_step": self.first_step,
                "stop_reason": self.stop_reason,
                "phases": [dataclasses.asdict(phase) for phase in self.phases],
                "rows": [_without_nan(row) for row in self.rows],
                "step_losses": [_or_none(loss) for loss in self.step_losses],
            },
            allow_nan=False,
        )
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> History:
        """Read back what `to_json` gave: a path, or the text itself."""
        if isinstance(source, Path) or not source.lstrip().startswith("{"):
            source = Path(source).read_text(encoding="utf-8")
        held = json.loads(source)
        history = cls(first_step=held["first_step"])
        history.stop_reason = held["stop_reason"]
        history.phases = tuple(Phase(**phase) for phase in held.get("phases", ()))
        history.rows = [
            {name: _from_json(value) for name, value in row.items()} for row in held["rows"]
        ]
        history.step_losses = array("d", map(_from_json, held["step_losses"]))
        return history

    def to_csv(self, path: str | Path | None = None) -> str:
        """The epochs as a table; written to `path` if one is given."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names(), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def plot(self, path: str | Path | None = None) -> Figure:
        """Losses and metrics as curves; saved to `path` if one is given. Needs matplotlib."""
        from parti.curves import draw

        drawn = self.without_steps()
        drawn.step_losses = self.step_losses
        if len(self.phases) > 1:  # side by side
            drawn.rows = [{**row, "epoch": i + 1} for i, row in enumerate(self.rows)]
        return draw(drawn, path)

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {value:.4g}" for name, value in self.measured(-1).items())
        return f"History({len(self)} epochs; last: {last})" if self.rows else "History(0 epochs)"

    def measured(self, epoch: int) -> Mapping[str, float]:
        """A row without its numbers and times: what says how good the model is."""
        row = self.rows[epoch] if self.rows else {}
        return {
            name: value
            for name, value in row.items()
            if name not in CLOCK_NAMES and name not in ("phase", "epoch", "step", "samples")
        }


def guess_mode(name: str) -> Mode:
    """Losses and errors are better low, everything else high."""
    plain = name.lower()
    falls = ("loss", "error", "perplexity", "mse", "mae", "rmse", "nll", "wer", "cer")
    return "min" if any(word in plain.split("_") for word in falls) else "max"


def _or_none(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _without_nan(row: Mapping[str, float]) -> dict[str, float | str | None]:
    return {name: _or_none(value) for name, value in row.items()}


def _from_json(value: float | str | None) -> float:
    return math.nan if value is None else float(value) if isinstance(value, str) else value
