"""fit, evaluate and predict around one short training step.

The Trainer is the same program on every rank: all ranks call the same methods in the same order,
and everything it decides on (early stopping, schedules, the best epoch) is decided from values that
are equal on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from parti.callbacks import (
    EpochEnd,
    FitBegin,
    FitEnd,
    Schedule,
    Stop,
    as_schedule,
    check_callbacks,
    handlers,
)
from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.engine.feeds import check_checkpoint
from parti.engine.replica import Admission
from parti.engine.report import StepReport
from parti.errors import CheckpointError, ConfigError
from parti.evaluation import Tally, check_metrics
from parti.fitting import Fit, OnNan, kept_history
from parti.history import History, Phase
from parti.losses import Loss
from parti.metrics import Metric
from parti.monitor.console import choose_display
from parti.monitor.header import RunFacts
from parti.monitor.records import keep_records
from parti.objective import ForwardFunction, Objective, Prediction
from parti.phases import Way, check_data, check_name, way_of
from parti.saving import (
    is_weights,
    load_into,
    read_everywhere,
    read_state,
    read_weights,
    write_once,
    write_state,
    write_weights,
)
from parti.standing import Standing
from parti.strategy.data_parallel import DataParallel
from parti.structure import (
    check_device,
    check_optimizer,
    check_same_structure,
    check_strategy,
    joined,
    on_cpu,
    trained_modules,
)
from parti.weights import (
    Average,
    AveragedWeights,
    NoAverage,
    Snapshot,
    restore_snapshot,
    take_snapshot,
)

if TYPE_CHECKING:
    from parti.checkpoint.value import Checkpoint
    from parti.keeping import KeptStates

Collate = Callable[[Sequence[Any]], Any]

EVALUATION_BATCH_SIZE = 256
"""For evaluate and predict where none is asked for."""
_BATCHES_BETWEEN_MEETINGS = 8
"""In an evaluation: what a lost rank costs the others at most."""


@final
class Trainer:
    """Trains a model under a strategy.

    Batches are tuples: all parts but the last go to the model, and the last, with the output, to
    `loss(output, target)`. Where batches look different, `forward(model, batch)` computes the loss
    instead; a model that returns its loss (`.loss`, as Hugging Face models do) needs neither.

    - `metrics`: by name; Accuracy, TopK, Mean, or anything with `update` and `compute`.
    - `scheduler`: of torch.optim.lr_scheduler; moves once an epoch (see Schedule for others).
    - `clip_norm`: the largest norm of the gradient over all parameters.
    - `average`: EMA or SWA; evaluate, predict and saved weights then use the average.
    - `callbacks`: objects with some of on_fit_begin, on_step_end, on_epoch_end, on_fit_end.
    - `on_nan`: "raise", "warn" or "ignore" when the loss is not a finite number.
    - `run_dir`: where rank 0 keeps a record of every step (records.jsonl).
    """

    def __init__(
        self,
        strategy: DataParallel,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss: Loss | None = None,
        *,
        forward: ForwardFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        scheduler: LRScheduler | Schedule | None = None,
        clip_norm: float | None = None,
        average: Average | None = None,
        callbacks: Sequence[object] = (),
        on_nan: OnNan = "raise",
        name: str | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        check_strategy(strategy)
        check_metrics(metrics)
        self._metrics = dict(metrics or {})
        check_callbacks(callbacks)
        if clip_norm is not None and (not isinstance(clip_norm, (int, float)) or not clip_norm > 0):
            raise ConfigError(f"clip_norm={clip_norm!r}: expected a positive number, or None.")
        if on_nan not in ("raise", "warn", "ignore"):
            raise ConfigError(f"on_nan={on_nan!r}: expected 'raise', 'warn' or 'ignore'.")
        modules = trained_modules(model, loss)
        check_optimizer(optimizer, modules)
        self._schedule = as_schedule(scheduler, optimizer)
        self._objective = Objective(model, loss, forward, wants_outputs=bool(self._metrics))
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.name = name
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._clip_norm = clip_norm
        self._callbacks = tuple(callbacks)
        self._on_nan: OnNan = on_nan
        self.replica = strategy.bind(*modules, *([] if optimizer is None else [optimizer]))
        check_device(model, self.replica.device)
        if isinstance(loss, nn.Module):
            loss.to(self.replica.device)
        self._average = average
        self._averaging = NoAverage() if average is None else AveragedWeights(model, average)
        self._position = Position()
        self.phases: tuple[Phase, ...] = ()
        """What the training has been through; the last is under way."""
        self._history = History()
        self._num_named_fits = 0
        self._resumed: Mapping[str, Any] | None = None
        """The facts of a checkpoint that was read, until the fit that it comes from."""
        self._standing = Standing(self)
        self._keeper: KeptStates | None = None
        self.replica.keep(self._standing)
        self.replica.on_new_world(self._ranks_changed)

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self.replica.step_number

    @property
    def step_in_epoch(self) -> int:
        """How many steps of the epoch under way have been taken."""
        return self._position.step_in_epoch

    @property
    def epoch(self) -> int:
        """How many epochs have been finished; of the phase under way, where there are phases."""
        return self._position.epoch

    def fit(
        self,
        train: object,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        micro_batches: int | None = None,
        validation: object = None,
        validation_batch_size: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
        progress: bool = True,
        log_every_s: float = 30.0,
        checkpoint: Checkpoint | None = None,
        phase: str | None = None,
    ) -> History:
        """Train until `epochs` epochs are done, counted from the beginning of the training.

        `batch_size` is the number of samples in one step over all processes. A Trainer that has
        trained already, or has loaded a state, goes on where it is: after 3 epochs, `epochs=5`
        trains 2 more. Without a terminal, a line is printed every `log_every_s` seconds and after
        every epoch.

        With a `checkpoint`, states are written to its directory, and a new start of the script goes
        on from the newest good one, at the very step. When the process is asked to stop (SIGTERM,
        SIGUSR1), the state is written and Preempted ends the script.

        With a `phase` or a `checkpoint`, every call is a phase of the training, named, or numbered
        in the order of such calls. A name that is new begins a phase: weights, optimizer, schedule
        and the number of the step go on, epochs and the order of the data are counted anew. The
        phase under way goes on where it is, and those that are over are left out.
        """
        check_name(phase)
        check_checkpoint(checkpoint)
        if checkpoint is not None or phase is not None:
            self._num_named_fits += 1
            phase = phase or str(self._num_named_fits)
        history = self._standing.once(
            "fit",
            lambda: self._fit_on(
                train,
                batch_size=batch_size,
                epochs=epochs,
                micro_batches=micro_batches,
                validation=validation,
                validation_batch_size=validation_batch_size,
                shuffle=shuffle,
                drop_last=drop_last,
                workers=workers,
                collate=collate,
                progress=progress,
                log_every_s=log_every_s,
                checkpoint=checkpoint,
                name=phase,
            ),
        )
        if history.phases and history.phases[-1].number == len(self.phases):
            self._history = history
        return history

    def _fit_on(
        self,
        train: object,
        *,
        batch_size: int | None,
        epochs: int,
        micro_batches: int | None,
        validation: object,
        validation_batch_size: int | None,
        shuffle: bool | None,
        drop_last: bool | None,
        workers: int | None,
        collate: Collate | None,
        progress: bool,
        log_every_s: float,
        checkpoint: Checkpoint | None,
        name: str | None,
    ) -> History:
        if self.optimizer is None:
            raise ConfigError(
                "fit needs an optimizer; construct Trainer(strategy, model, optimizer)."
            )
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs={epochs!r}; expected a whole number from 1 on.")
        if checkpoint is not None:
            self._resume_from(checkpoint)
        way = self._way(name, epochs)
        if way is Way.IS_BEHIND or way is Way.IS_DONE:
            return self._left_out(name, epochs, way)
        if way is Way.GOES_ON and self._resumed is not None:
            micro_batches = self._check_resumed(self._resumed, batch_size, micro_batches)
        start = self._position if way is Way.GOES_ON or not self.phases else Position()
        if validation is not None:
            check_same_structure(train, validation)
        feed = self.replica.feed(
            train,
            batch_size=batch_size,
            micro_batches=micro_batches,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
            start=start,
            gate=Admission(self.replica),
        )

        size = feed.batch_size if validation_batch_size is None else validation_batch_size

        def held_out() -> Feed:
            # Cut as finely as the training batches, so that all who train evaluate too.
            slices = min(feed.num_micro_batches, max(size, 1))
            return self._in_order(validation, size, workers, collate, slices)

        def validate() -> Mapping[str, float]:
            return self._evaluate(held_out(), fit.display.validation)

        if validation is not None:
            held_out()  # what is wrong with it is told now, and not after an epoch
        if way is Way.BEGINS and name is not None:
            self._begin_phase(name, feed, epochs)
        elif name is not None:
            self._continue_phase(feed, epochs)
        self._resumed = None
        fit = self._new_fit(feed, epochs, progress, log_every_s)
        if checkpoint is not None:
            from parti.keeping import KeptStates  # with all that writes and reads checkpoints

            self._keeper = KeptStates(self, checkpoint, feed)
        try:
            return self._fit(fit, feed, None if validation is None else validate)
        finally:
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None

    def _fit(
        self, fit: Fit, feed: Feed, validate: Callable[[], Mapping[str, float]] | None
    ) -> History:
        begin = FitBegin(
            trainer=self, epochs=fit.facts.epochs, names=self._names(validate is not None)
        )
        self._schedule.begin(begin.names)
        for handler in handlers(self._callbacks, "on_fit_begin"):
            handler(begin)
        stop: Stop | None = None
        self.model.train()
        try:
            self._standing.enter(fit)
            fit.begin()
            for batch in feed:
                fit.batch_arrived()
                report = self.train_step(batch)
                fit.add(report)
                stop = fit.after_step(self, report)
                if batch.is_last_of_epoch or stop is not None:
                    stop = self._end_epoch(fit, validate) or stop
                if stop is not None:
                    break
                if self._keeper is not None and self.epoch < fit.facts.epochs:
                    self._keeper.after_step(report, batch.is_last_of_epoch)
            end = FitEnd(trainer=self, history=fit.history)
            for handler in handlers(self._callbacks, "on_fit_end"):
                handler(end)
            history = fit.end(stop)
            if self.phases:
                fit.complete()
                self.phases = history.phases
            if self._keeper is not None:
                # With all that the end of the phase has changed: the next one begins there.
                self._keeper.finish()
            return history
        finally:
            self._standing.leave()
            fit.close()

    def _ranks_changed(self) -> None:
        if self._keeper is not None:
            self._keeper.ranks_changed()
        if self._standing.fit is not None:
            self._standing.fit.ranks_changed()

    def _resume_from(self, checkpoint: Checkpoint) -> None:
        """Go on from the newest good checkpoint, unless this Trainer is further."""
        if self._standing.came_later:
            return
        from parti.checkpoint.keeper import find, read

        found = find(self.replica, checkpoint, after_step=self.step)
        if found is None:
            return
        path, self._resumed = found
        state = read(path)
        load_into(self.model, state["model"])
        self._resume(state)
        self._standing.resume(state["fit"])
        self._history = kept_history(state["fit"])

    def _check_resumed(
        self, facts: Mapping[str, Any], batch_size: int | None, micro_batches: int | None
    ) -> int:
        """How many micro-batches to take."""
        from parti.checkpoint.keeper import check_resumed

        check_resumed(facts, batch_size, micro_batches, self.strategy.seed)
        held: int = facts["micro_batches"]
        return held

    def _way(self, name: str | None, epochs: int) -> Way:
        if self._standing.came_later and self._resumed is None:
            return Way.GOES_ON  # this call is where the others are, and be it at its end
        if name is not None:
            return way_of(self.phases, name, epochs=epochs, epochs_done=self.epoch)
        if self._resumed is not None:
            return Way.IS_BEHIND  # the state is that of a later call, which has a name
        return Way.IS_DONE if epochs <= self.epoch else Way.GOES_ON

    def _left_out(self, name: str | None, epochs: int, way: Way) -> History:
        """The answer of a call that has nothing to do any more."""
        if name is None and way is Way.IS_DONE:
            warnings.warn(
                f"epochs={epochs} are done already: epochs are counted from the beginning of the "
                f"training, and {self.epoch} are finished. For more, ask for "
                f"epochs={self.epoch + epochs}.",
                stacklevel=6,
            )
        if name is None:
            return History(first_step=self.step)
        if way is Way.IS_DONE:
            self._resumed = None
            self._standing.resume(None)
        if self.replica.is_chief:
            after = "" if way is Way.IS_DONE else f" {self.phases[-1].name!r} is under way."
            sys.stderr.write(f"parti: phase {name!r} is complete and left out.{after}\n")
        return self._history.until(name)

    def _begin_phase(self, name: str, feed: Feed, epochs: int) -> None:
        if self.phases and not self.phases[-1].is_complete:
            left = self.phases[-1]
            warnings.warn(
                f"phase {name!r} begins, and phase {left.name!r} had done {self.epoch} of its "
                f"{left.epochs} epochs: it is left.",
                stacklevel=6,
            )
        before = self.phases[-1].epochs_before + self.epoch if self.phases else 0
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        begun = Phase(
            name=name,
            number=len(self.phases) + 1,
            began=self.replica.exchange(now.encode())[0].decode(),
            first_step=self.step,
            epochs_before=before,
            epochs=epochs,
            num_samples=feed.num_samples,
            fingerprint=feed.fingerprint(),
        )
        self._standing.resume(None)
        if not self.phases:
            self._history = History(first_step=self.step)
        self.phases = (*self.phases, begun)
        self._position = feed.start

    def _continue_phase(self, feed: Feed, epochs: int) -> None:
        phase = self.phases[-1]
        check_data(phase, feed.num_samples)
        fingerprint = feed.fingerprint()
        if fingerprint != phase.fingerprint:
            warnings.warn(
                f"phase {phase.name!r} goes on with other data than it began with: their "
                f"fingerprint is {fingerprint}, and was {phase.fingerprint}.",
                stacklevel=6,
            )
        again = dataclasses.replace(phase, epochs=epochs, is_complete=False)
        self.phases = (*self.phases[:-1], again)

    def kept_state(self) -> dict[str, Any]:
        """Everything needed to train on from here, in memory that the next step may write to."""
        assert self.optimizer is not None
        fit = self._standing.fit
        return {
            "model": self.model.state_dict(),
            "optimizer": self.replica.held(self.optimizer),
            **self.course(),
            "fit": None if fit is None else fit.state_dict(),
        }

    def train_step(self, batch: Batch) -> StepReport:
        """One optimizer update from one global batch, and what follows from it."""
        assert self.optimizer is not None
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"train_step got a {type(batch).__name__}; expected a batch that "
                "trainer.replica.batches(data, batch_size=...) gives."
            )
        self._objective.begin(batch.num_micro_batches)
        fit = self._standing.fit
        report = self.replica.step(
            self._objective,
            batch,
            optimizer=self.optimizer,
            clip_norm=self._clip_norm,
            carry=fit.tally.measure if fit is not None and self._metrics else None,
        )
        # From here on the step is committed: it will not be done again, so it may be counted.
        self._averaging.after_step()
        self._schedule.after_step()
        self._position = batch.after
        return report

    def _end_epoch(
        self, fit: Fit, validate: Callable[[], Mapping[str, float]] | None
    ) -> Stop | None:
        before = self.phases[-1].epochs_before if self.phases else 0
        self._averaging.after_epoch(before + fit.epoch)
        row = fit.finish_epoch(validate, self._schedule.rates())
        self._schedule.after_epoch(row)
        event = EpochEnd(trainer=self, epoch=fit.epoch, row=row, history=fit.history)
        return fit.after_epoch(event)

    def evaluate(
        self,
        data: object,
        *,
        batch_size: int | None = None,
        micro_batches: int | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """The loss and the metrics over a data set, every sample counted once; the same on every
        rank, and for any number of ranks."""

        def evaluate() -> dict[str, float]:
            feed = self._in_order(data, batch_size, workers, collate, micro_batches)
            return self._evaluate(feed, None)

        return self._standing.once("evaluate", evaluate)

    def _evaluate(
        self, feed: Feed, tell: Callable[[int, int | None], None] | None
    ) -> dict[str, float]:
        tally = Tally(self._metrics, self.replica.device)
        with self._in_evaluation():
            for done, batches in enumerate(_in_groups(feed, _BATCHES_BETWEEN_MEETINGS)):
                if tell is not None:
                    tell(done * _BATCHES_BETWEEN_MEETINGS, feed.steps_per_epoch)
                # If a rank is lost, the batches since the last meeting are computed again.
                measure = functools.partial(self._measure, batches, tally)
                tally.take_all(self.replica.attempt(measure))
            return {"loss": tally.loss.mean(), **tally.values()}

    def _measure(self, batches: Sequence[Batch], tally: Tally) -> Sequence[bytes]:
        """What all ranks have found in some batches."""
        mine = []
        for batch in batches:
            self._objective.begin(batch.num_micro_batches)
            mine.append(tally.measure_parts(self.replica.run(self._objective, batch)))
        return self.replica.exchange(pickle.dumps(mine))

    def predict(
        self,
        data: object,
        *,
        batch_size: int | None = None,
        forward: ForwardFunction | None = None,
        micro_batches: int | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
    ) -> Any:
        """The model's outputs for all samples, in their order, on the CPU of every rank.

        Samples may have a target, as in `fit`: it is left out. `forward(model, batch)` computes
        outputs in another way. Outputs that are dictionaries or tuples of tensors are joined part
        by part.
        """

        def predict() -> Any:
            one = Prediction(self.model, forward)
            feed = self._in_order(data, batch_size, workers, collate, micro_batches)
            with self._in_evaluation():
                return joined(
                    [on_cpu(self.replica.gather(self.replica.run(one, batch))) for batch in feed]
                )

        return self._standing.once("predict", predict)

    def _in_order(
        self,
        data: object,
        batch_size: int | None,
        workers: int | None,
        collate: Collate | None,
        micro_batches: int | None = None,
    ) -> Feed:
        if batch_size is None and not isinstance(data, DataLoader):
            batch_size = EVALUATION_BATCH_SIZE
        return self.replica.feed(
            data,
            batch_size=batch_size,
            micro_batches=micro_batches,
            shuffle=False,
            workers=workers,
            collate=collate,
        )

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """The model in evaluation mode with the weights to be judged; afterwards as it was."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self.averaged():
                yield
        finally:
            for module, was_training in modes:
                module.training = was_training

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights, if an average is kept."""
        if not self._averaging.is_ready():
            yield
            return
        self.replica.barrier()  # a rank that is behind may still be reading these weights
        with self._averaging.in_place():
            yield

    def take_snapshot(self) -> Snapshot:
        """A copy of the weights, the buffers and the average, to go back to."""
        return take_snapshot(self.model, self._averaging)

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Put a copy back. All ranks do so at the same point of the program."""
        self.replica.barrier()  # a rank that is behind may still be reading these weights
        restore_snapshot(snapshot, self.model, self._averaging)

    def save(self, path: str | Path) -> None:
        """Write a file, from rank 0; every rank returns when it is there.

        A name that ends in `.safetensors` gets the model's weights (the average, if one is kept). A
        name that ends in `.pt` gets everything needed to train on: weights, optimizer, schedule,
        average, callbacks, and the place in the training.
        """
        path = Path(path)

        def save() -> None:
            with self.replica.saving():
                if is_weights(path):
                    with self.averaged():
                        write_once(self.replica, path, lambda file: write_weights(file, self.model))
                else:
                    write_once(self.replica, path, lambda file: write_state(file, self._state()))

        self._standing.once("save", save)

    def load(self, path: str | Path) -> None:
        """Read a file that `save` wrote, on every rank; `fit` then goes on from there."""
        path = Path(path)

        def load() -> None:
            if is_weights(path):
                state: dict[str, Any] = {"model": read_everywhere(self.replica, path, read_weights)}
            else:
                state = read_everywhere(self.replica, path, read_state)
            load_into(self.model, state["model"])
            if "optimizer" in state:
                self._resume(state)

        self._standing.once("load", load)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            **self.course(),
        }

    def course(self) -> dict[str, Any]:
        """Everything besides model and optimizer that steps and epochs change."""
        return {
            "schedule": self._schedule.state_dict(),
            "average": self._averaging.state_dict(),
            "callbacks": [
                callback.state_dict() if hasattr(callback, "state_dict") else None
                for callback in self._callbacks
            ],
            "step": self.step,
            "epoch": self._position.epoch,
            "step_in_epoch": self._position.step_in_epoch,
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
        }

    def _resume(self, state: Mapping[str, Any]) -> None:
        if (self.optimizer is None) != (state["optimizer"] is None) or len(
            state["callbacks"]
        ) != len(self._callbacks):
            raise CheckpointError(
                f"the state was saved by a Trainer with {len(state['callbacks'])} callbacks and "
                f"{'no' if state['optimizer'] is None else 'an'} optimizer; construct this one "
                f"alike, or load the model's weights alone."
            )
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.follow(state)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Take in what `course` gave."""
        self._schedule.load_state_dict(state["schedule"])
        self._averaging.load_state_dict(state["average"])
        for callback, held in zip(self._callbacks, state["callbacks"], strict=True):
            if held is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(held)
        self._position = Position(epoch=state["epoch"], step_in_epoch=state["step_in_epoch"])
        self.phases = tuple(Phase(**phase) for phase in state["phases"])
        self.replica.step_number = state["step"]

    def _names(self, has_validation: bool) -> tuple[str, ...]:
        names = ("loss", *self._metrics)
        return (*names, *(f"val_{name}" for name in names)) if has_validation else names

    def _new_fit(self, feed: Feed, epochs: int, progress: bool, log_every_s: float) -> Fit:
        facts = RunFacts(
            name=self.name,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            batch_size=feed.batch_size,
            micro_batches=feed.num_micro_batches,
            first_epoch=self.epoch + 1,
            epochs=epochs,
            num_samples=feed.num_samples,
            steps_per_epoch=feed.steps_per_epoch,
            phase=self.phases[-1] if self.phases else None,
            **self.replica.facts(),
        )
        return Fit(
            replica=self.replica,
            facts=facts,
            show=lambda is_chief: (
                choose_display(is_chief=is_chief, progress=progress, log_every_s=log_every_s),
                keep_records(self._run_dir, is_chief=is_chief),
            ),
            callbacks=self._callbacks,
            on_nan=self._on_nan,
            metrics=self._metrics,
            history=self._begun_history(),
        )

    def _begun_history(self) -> History:
        """What a fit adds its steps and epochs to."""
        if not self.phases:
            return History(first_step=self.step)
        begun = self._history.copy()
        begun.phases = self.phases
        return begun


def _in_groups(feed: Feed, size: int) -> Iterator[list[Batch]]:
    """The batches of a feed, some at a time."""
    batches = iter(feed)
    while group := list(itertools.islice(batches, size)):
        yield group
