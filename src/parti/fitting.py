"""The course of one `fit`: what is counted, timed, kept and shown around the training steps.

`Fit` holds the state of one call. It never touches weights; the Trainer does.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from parti.callbacks import StepEnd, Stop, first_stop, handlers
from parti.errors import NonFiniteLoss
from parti.evaluation import Tally
from parti.history import History
from parti.metrics import Metric
from parti.monitor.console import Display
from parti.monitor.header import RunEnd, RunFacts
from parti.monitor.records import Records

if TYPE_CHECKING:
    from parti.engine.replica import Replica
    from parti.engine.report import StepReport
    from parti.trainer import Trainer

OnNan = Literal["raise", "warn", "ignore"]
"""What to do about a loss that is not a finite number."""


class Fit:
    """Everything that one call of `fit` adds up. `show` gives where it is shown and kept, by
    whether this is the first rank."""

    def __init__(
        self,
        *,
        replica: Replica,
        facts: RunFacts,
        show: Callable[[bool], tuple[Display, Records]],
        callbacks: Sequence[object],
        on_nan: OnNan,
        metrics: Mapping[str, Metric],
        history: History,
    ) -> None:
        self.history = history
        self._rows_before = len(history.rows)
        """Of epochs that an earlier start has been through."""
        self.facts = facts
        self.epoch = facts.first_epoch
        self._replica = replica
        self._show = show
        self._is_chief = replica.is_chief
        self.display, self._records = show(self._is_chief)
        self._on_step_end = handlers(callbacks, "on_step_end")
        self._on_epoch_end = handlers(callbacks, "on_epoch_end")
        self._on_nan = on_nan
        self._metrics = metrics
        self._num_samples = 0
        self._validation_s = 0.0
        self._optimizer_s = 0.0
        self._waited_s = 0.0
        self._has_ended = False
        self._begin_epoch()
        self._started = self._ready

    def _begin_epoch(self) -> None:
        self.tally = Tally(self._metrics, self._replica.device)
        self._samples = 0
        self._compute_s = self._comm_s = self._wait_data_s = 0.0
        self._epoch_started = self._ready = time.perf_counter()

    def begin(self) -> None:
        self._records.begin(self.facts)
        self.display.begin(self.facts, lambda: self.tally.so_far())

    def ranks_changed(self) -> None:
        """Ranks have been lost or have come. Whoever is first now shows how the run goes on."""
        if self._replica.is_chief and not self._is_chief:
            self._is_chief = True
            self.facts = dataclasses.replace(
                self.facts, first_epoch=self.epoch, **self._replica.facts()
            )
            self.display, self._records = self._show(True)
            self.begin()

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far, the clock's values left out."""
        return {
            "history": self.history.without_steps().to_json(),
            "step_losses": torch.frombuffer(self.history.step_losses[:], dtype=torch.float64)
            if self.history.step_losses
            else torch.empty(0, dtype=torch.float64),
            "epoch": self.epoch,
            "samples": self._samples,
            "tally": self.tally.state_dict(),
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        phases = self.history.phases  # the last of which may be asked for more epochs now
        self.history = kept_history(state)
        self._rows_before = len(self.history.rows)
        self.history.phases = phases
        self.epoch = state["epoch"]
        self._samples = state["samples"]
        self._num_samples = state["num_samples"]
        self.tally.load_state_dict(state["tally"])

    def batch_arrived(self) -> None:
        """The next batch is here; the time since the last step went into waiting for it."""
        self._waited_s = time.perf_counter() - self._ready
        self._wait_data_s += self._waited_s

    def add(self, report: StepReport) -> None:
        """Count a committed step, keep it, show it."""
        loss, times = report.loss, report.times
        self.history.step_losses.append(loss)
        if not math.isfinite(loss) and report.count:
            self._not_finite(report)
        self.tally.loss.add(loss * report.count, report.count)
        self.tally.take(report.carried)
        self._samples += report.num_samples
        self._compute_s += times.compute_s
        self._comm_s += times.comm_s
        self._optimizer_s += times.optimizer_s
        self._records.step(
            (
                report.step,
                self.epoch,
                loss,
                report.num_samples,
                report.grad_norm,
                times.compute_s,
                times.comm_s,
                times.optimizer_s,
                self._waited_s,
            )
        )
        self.display.step(loss, report.num_samples, times.comm_s, self._waited_s)
        self._ready = time.perf_counter()

    def _not_finite(self, report: StepReport) -> None:
        losses = self.history.step_losses
        finite = [(i, loss) for i, loss in enumerate(losses) if math.isfinite(loss)]
        before = "no step before it had a finite loss"
        if finite:
            i, loss = finite[-1]
            before = f"the last finite loss was {loss:.4g} in step {self.history.first_step + i}"
        fact = (
            f"step {report.step} (epoch {self.epoch}): the loss is {report.loss}, and the step has "
            f"been taken; {before}."
        )
        if self._on_nan == "raise":
            raise NonFiniteLoss(
                f"{fact} Lower the learning rate, clip gradients with clip_norm=1.0, or look for "
                f"values in the data that are not finite; on_nan='warn' trains on."
            )
        if self._on_nan == "warn":
            warnings.warn(f"{fact} Training goes on.", RuntimeWarning, stacklevel=4)
            self._on_nan = "ignore"  # told once

    def after_step(self, trainer: Trainer, report: StepReport) -> Stop | None:
        """Run the callbacks for a step."""
        if not self._on_step_end:
            return None
        event = StepEnd(trainer=trainer, epoch=self.epoch, report=report)
        stop = self._agree(first_stop([handler(event) for handler in self._on_step_end]))
        self._ready = time.perf_counter()
        return stop

    def _agree(self, stop: Stop | None) -> Stop | None:
        """What the first rank that wants to stop says, on every rank."""
        told = self._replica.exchange(b"" if stop is None else stop.reason.encode() or b"-")
        reason = next((answer for answer in told if answer), None)
        return None if reason is None else Stop(reason.decode())

    def finish_epoch(
        self, validate: Callable[[], Mapping[str, float]] | None, rates: Mapping[str, float]
    ) -> dict[str, float]:
        """Bring the epoch's values together, here and in the validation set: its row."""
        phase = self.facts.phase
        row: dict[str, float] = {
            **({} if phase is None else {"phase": phase.number}),
            "epoch": self.epoch,
            "step": self._replica.step_number,
            "loss": self.tally.loss.mean(),
            **self.tally.values(),
        }
        trained_s = time.perf_counter() - self._epoch_started
        validation_s = 0.0
        if validate is not None:
            row |= {f"val_{name}": value for name, value in validate().items()}
            validation_s = time.perf_counter() - self._epoch_started - trained_s
        row |= rates
        row |= {
            "samples": self._samples,
            "samples_per_s": self._samples / trained_s if trained_s > 0 else 0.0,
            "time_s": trained_s,
            "compute_s": self._compute_s,
            "comm_s": self._comm_s,
            "wait_data_s": self._wait_data_s,
            "validation_s": validation_s,
        }
        self._num_samples += self._samples
        self._validation_s += validation_s
        self.history.rows.append(row)
        self._records.epoch(row)
        self.display.epoch(row)
        return row

    def complete(self) -> None:
        """The phase has come to its end."""
        *before, last = self.history.phases
        self.history.phases = (*before, dataclasses.replace(last, is_complete=True))

    def after_epoch(self, event: object) -> Stop | None:
        """Run the callbacks for an epoch and go on to the next."""
        answers = [handler(event) for handler in self._on_epoch_end]
        stop = self._agree(first_stop(answers)) if answers else None
        self.epoch += 1
        self._begin_epoch()
        return stop

    def end(self, stop: Stop | None) -> History:
        """The run is over: say so."""
        self._has_ended = True
        self.history.stop_reason = None if stop is None else stop.reason
        phase = self.facts.phase
        history = self.history if phase is None else self.history.only(phase.name)
        rows = self.history.rows[self._rows_before :]

        def spent(name: str) -> float:
            return sum(row[name] for row in rows)

        self.display.end(
            RunEnd(
                history=history,
                num_epochs=len(rows),
                epochs=self.facts.epochs - self.facts.first_epoch + 1,
                num_steps=len(history.step_losses),
                num_samples=self._num_samples,
                elapsed_s=time.perf_counter() - self._started,
                spent_s={
                    "compute": spent("compute_s"),
                    "optimizer": self._optimizer_s,
                    "communication": spent("comm_s"),
                    "waiting for data": spent("wait_data_s"),
                    "validation": self._validation_s,
                },
            )
        )
        self._records.end("all epochs done" if stop is None else stop.reason)
        return self.history

    def close(self) -> None:
        """Leave the terminal as it was, and the records whole; after an error too."""
        self.display.close()
        if not self._has_ended:
            self._records.end("interrupted")


def kept_history(state: Mapping[str, Any]) -> History:
    """The history in what `state_dict` gave."""
    history = History.from_json(state["history"])
    history.step_losses.frombytes(state["step_losses"].numpy().tobytes())
    return history
