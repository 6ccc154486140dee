"""What happens around steps and epochs: events, callbacks, early stopping, schedules.

A callback is any object with one or more of the methods `on_fit_begin`, `on_step_end`,
`on_epoch_end` and `on_fit_end`. It gets one frozen event and runs on every rank. To end training it
returns `Stop(reason)` from `on_step_end` or `on_epoch_end`; one rank asking is enough, since the
ranks agree on it before they go on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from parti.errors import CheckpointError, ConfigError
from parti.history import CLOCK_NAMES, History, Mode, guess_mode
from parti.weights import Snapshot

if TYPE_CHECKING:
    from parti.engine.report import StepReport
    from parti.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a callback: training ends here, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBegin:
    """Before the first step."""

    trainer: Trainer
    epochs: int
    names: tuple[str, ...]
    """What every epoch's row will hold and is equal on all ranks: losses and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """After a step has been committed."""

    trainer: Trainer
    epoch: int
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """After an epoch and its validation. `row` is the epoch's row of the history."""

    trainer: Trainer
    epoch: int
    row: Mapping[str, float]
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEnd:
    """After the last step; the model holds the final weights."""

    trainer: Trainer
    history: History


class Callback(Protocol):
    """All four; a callback may leave any of them out."""

    def on_fit_begin(self, event: FitBegin) -> None: ...

    def on_step_end(self, event: StepEnd) -> Stop | None: ...

    def on_epoch_end(self, event: EpochEnd) -> Stop | None: ...

    def on_fit_end(self, event: FitEnd) -> None: ...


MOMENTS = ("on_fit_begin", "on_step_end", "on_epoch_end", "on_fit_end")


@final
class LambdaCallback:
    """A callback from functions."""

    def __init__(
        self,
        *,
        on_fit_begin: Callable[[FitBegin], None] | None = None,
        on_step_end: Callable[[StepEnd], Stop | None] | None = None,
        on_epoch_end: Callable[[EpochEnd], Stop | None] | None = None,
        on_fit_end: Callable[[FitEnd], None] | None = None,
    ) -> None:
        self.on_fit_begin = on_fit_begin
        self.on_step_end = on_step_end
        self.on_epoch_end = on_epoch_end
        self.on_fit_end = on_fit_end


@final
class EarlyStopping:
    """Stops when the monitored value has not become better for `patience` epochs.

    Better means by more than `min_delta`, downwards or upwards as `mode` says (guessed from the
    name where None: losses and errors fall, everything else rises). `restore_best` puts the weights
    of the best epoch back at the end of training, whether it was stopped or not.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 5,
        mode: Mode | None = None,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0 or mode not in (None, "min", "max"):
            raise ConfigError(
                f"EarlyStopping(patience={patience}, mode={mode!r}, min_delta={min_delta}): "
                f"expected patience >= 0, mode 'min', 'max' or None, and min_delta >= 0."
            )
        self.monitor = monitor
        self.patience = patience
        self.mode: Mode = mode or guess_mode(monitor)
        self.min_delta = min_delta
        self.restore_best = restore_best
        self.best = math.nan
        self.best_epoch = 0
        self.waited = 0
        self._weights: Snapshot | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        check_monitor(self.monitor, event.names, "EarlyStopping")
        if self.waited >= max(self.patience, 1):  # stopped before, and asked to go on
            self.waited = 0

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        value = monitored(self.monitor, event.row, "EarlyStopping")
        if self._is_better(value):
            self.best, self.best_epoch, self.waited = value, event.epoch, 0
            if self.restore_best:
                self._weights = event.trainer.take_snapshot()
            return None
        self.waited += 1
        if self.waited < max(self.patience, 1):
            return None
        return Stop(
            f"{self.monitor} has not become better than {self.best:.4g} (epoch {self.best_epoch}) "
            f"for {self.waited} epochs"
        )

    def on_fit_end(self, event: FitEnd) -> None:
        if self._weights is not None:
            event.trainer.restore_snapshot(self._weights)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if math.isnan(self.best):
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, object]:
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
            "weights": None if self._weights is None else self._weights.as_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = float(state["best"])
        self.best_epoch = int(state["best_epoch"])
        self.waited = int(state["waited"])
        weights = state["weights"]
        self._weights = None if weights is None else Snapshot(**weights)


@final
class Schedule:
    """When a scheduler of `torch.optim.lr_scheduler` moves: after every step or every epoch.

    Given to the Trainer bare, a scheduler moves once an epoch, except for OneCycleLR and CyclicLR,
    which are made for steps. ReduceLROnPlateau looks at `monitor`: by default `val_loss`, or `loss`
    where there is no validation set.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        *,
        every: Literal["step", "epoch"] | None = None,
        monitor: str | None = None,
    ) -> None:
        by_step = isinstance(scheduler, OneCycleLR | CyclicLR)
        self.every: Literal["step", "epoch"] = every or ("step" if by_step else "epoch")
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if self.every not in ("step", "epoch") or (is_plateau and self.every == "step"):
            allowed = "'epoch'" if is_plateau else "'step' or 'epoch'"
            raise ConfigError(
                f"Schedule({type(scheduler).__name__}, every={every!r}): expected {allowed}."
            )
        if monitor is not None and not is_plateau:
            raise ConfigError(
                f"Schedule({type(scheduler).__name__}, monitor={monitor!r}): only "
                f"ReduceLROnPlateau looks at a monitored value; leave `monitor` out."
            )
        self.scheduler = scheduler
        self.monitor = monitor

    def begin(self, names: Sequence[str]) -> None:
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self.monitor is None:
            self.monitor = "val_loss" if "val_loss" in names else "loss"
        check_monitor(self.monitor, names, "Schedule")

    def after_step(self) -> None:
        if self.every == "step":
            self.scheduler.step()

    def after_epoch(self, row: Mapping[str, float]) -> None:
        if self.every == "step":
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(monitored(self.monitor or "loss", row, "Schedule"))
        else:
            self.scheduler.step()

    def rates(self) -> dict[str, float]:
        """The learning rates in force, by the names they have in the history."""
        rates = [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]
        if len(set(rates)) == 1:
            return {"lr": rates[0]}
        return {f"lr_{i}": rate for i, rate in enumerate(rates)}

    def state_dict(self) -> dict[str, Any] | None:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            raise CheckpointError(
                f"the saved state holds no schedule and this Trainer has a "
                f"{type(self.scheduler).__name__}; load the model's weights alone, or construct "
                f"the Trainer without `scheduler=`."
            )
        self.scheduler.load_state_dict(state)


class NoSchedule:
    """The learning rate as the optimizer has it."""

    def begin(self, names: Sequence[str]) -> None:
        return None

    def after_step(self) -> None:
        return None

    def after_epoch(self, row: Mapping[str, float]) -> None:
        return None

    def rates(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            raise CheckpointError(
                "the saved state holds a schedule and this Trainer has none; construct it with the "
                "same `scheduler=` as when the state was saved."
            )


def as_schedule(
    scheduler: LRScheduler | Schedule | None, optimizer: Optimizer | None
) -> Schedule | NoSchedule:
    """The schedule to follow; it must move the learning rate of this optimizer."""
    if scheduler is None:
        return NoSchedule()
    if not isinstance(scheduler, (LRScheduler, Schedule)):
        raise ConfigError(
            f"scheduler={scheduler!r}; expected one of torch.optim.lr_scheduler, made from the "
            "optimizer, or parti.Schedule(scheduler, every=...)."
        )
    schedule = scheduler if isinstance(scheduler, Schedule) else Schedule(scheduler)
    if schedule.scheduler.optimizer is not optimizer:
        raise ConfigError(
            f"the {type(schedule.scheduler).__name__} moves another optimizer than the one given "
            f"to the Trainer; make it from this optimizer."
        )
    return schedule


def check_monitor(monitor: str, names: Sequence[str], who: str) -> None:
    """Refuse, before training, a name that no epoch will have."""
    # A metric that computes a dictionary gives names of its own below its name.
    if monitor in names or any(monitor.startswith(f"{name}/") for name in names):
        return
    if monitor in CLOCK_NAMES:
        raise ConfigError(
            f"{who}(monitor={monitor!r}): read off each rank's clock, so ranks would disagree. "
            f"Monitor one of: {', '.join(names)}."
        )
    hint = ""
    if monitor.startswith("val_") and monitor.removeprefix("val_") in names:
        hint = " Give fit a `validation=` set to have it."
    elif close := difflib.get_close_matches(monitor, names, 1):
        hint = f" Did you mean {close[0]!r}?"
    raise ConfigError(
        f"{who}(monitor={monitor!r}): not measured in this run, which measures "
        f"{', '.join(names)}.{hint}"
    )


def monitored(monitor: str, row: Mapping[str, float], who: str) -> float:
    """The monitored value of an epoch."""
    if monitor not in row:
        raise ConfigError(
            f"{who}(monitor={monitor!r}): the epoch measured "
            f"{', '.join(name for name in row if name not in CLOCK_NAMES)}."
        )
    return row[monitor]


def handlers(callbacks: Iterable[object], moment: str) -> list[Callable[[Any], object]]:
    """The methods of the callbacks for one moment, in the order the callbacks were given."""
    found = (getattr(callback, moment, None) for callback in callbacks)
    return [handler for handler in found if callable(handler)]


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse objects that would never be called, and misspelt moments."""
    for callback in callbacks:
        named = [name for name in dir(callback) if name.startswith("on_")]
        strange = [name for name in named if name not in MOMENTS]
        if strange or not named:
            fact = f"has {strange[0]}" if strange else "has none of the methods of a callback"
            raise ConfigError(
                f"callback {type(callback).__name__} {fact}; the moments are {', '.join(MOMENTS)}."
            )


def first_stop(answers: Iterable[object]) -> Stop | None:
    """The first request to stop among what callbacks returned."""
    return next((answer for answer in answers if isinstance(answer, Stop)), None)
