"""fit, evaluate and predict around one short training step.

The Trainer is the same program on every rank: all ranks call the same methods in the same order,
and everything it decides on (early stopping, schedules, the best epoch) is decided from values that
are equal on all of them.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

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
from parti.checkpoint.keeper import check_resumed, find, read
from parti.checkpoint.value import Checkpoint
from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.engine.replica import Admission
from parti.engine.report import StepReport
from parti.errors import CheckpointError, ConfigError
from parti.evaluation import Tally, check_metrics
from parti.fitting import Fit, OnNan
from parti.history import History
from parti.keeping import KeptStates, NothingKept
from parti.losses import Loss
from parti.metrics import Metric
from parti.monitor.console import choose_display
from parti.monitor.header import RunFacts
from parti.monitor.records import keep_records
from parti.objective import ForwardFunction, Objective, Prediction
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
        self._standing = Standing(self)
        self._keeper: KeptStates | NothingKept = NothingKept()
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
        """How many epochs have been finished."""
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
    ) -> History:
        """Train until `epochs` epochs are done, counted from the beginning of the training.

        `batch_size` is the number of samples in one step over all processes. A Trainer that has
        trained already, or has loaded a state, goes on where it is: after 3 epochs, `epochs=5`
        trains 2 more. Without a terminal, a line is printed every `log_every_s` seconds and after
        every epoch.

        With a `checkpoint`, states are written to its directory, and a new start of the script goes
        on from the newest good one, at the very step.
        """
        return self._standing.once(
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
            ),
        )

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
    ) -> History:
        if self.optimizer is None:
            raise ConfigError(
                "fit needs an optimizer; construct Trainer(strategy, model, optimizer)."
            )
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs={epochs!r}; expected a whole number from 1 on.")
        if checkpoint is not None:
            micro_batches = self._resume_from(checkpoint, batch_size, micro_batches)
        if epochs <= self.epoch:
            warnings.warn(
                f"epochs={epochs} are done already: epochs are counted from the beginning of the "
                f"training, and {self.epoch} are finished. For more, ask for "
                f"epochs={self.epoch + epochs}.",
                stacklevel=5,
            )
            return History(first_step=self.step)
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
            start=self._position,
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
        fit = self._new_fit(feed, epochs, progress, log_every_s)
        if checkpoint is not None:
            self._keeper = KeptStates(self, checkpoint, feed)
        try:
            return self._fit(fit, feed, None if validation is None else validate)
        finally:
            self._keeper.close()
            self._keeper = NothingKept()

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
                self._keeper.after_step(report, batch.is_last_of_epoch)
                if stop is not None:
                    break
            self._keeper.finish()
            end = FitEnd(trainer=self, history=fit.history)
            for handler in handlers(self._callbacks, "on_fit_end"):
                handler(end)
            return fit.end(stop)
        finally:
            self._standing.leave()
            fit.close()

    def _ranks_changed(self) -> None:
        self._keeper.ranks_changed()
        if self._standing.fit is not None:
            self._standing.fit.ranks_changed()

    def _resume_from(
        self,
        checkpoint: Checkpoint,
        batch_size: int | None,
        micro_batches: int | None,
    ) -> int | None:
        """Go on from the newest good checkpoint, unless this Trainer is further. How many
        micro-batches to take."""
        if self._standing.came_later:
            return micro_batches
        found = find(self.replica, checkpoint, after_step=self.step)
        if found is None:
            return micro_batches
        path, facts = found
        check_resumed(facts, batch_size, micro_batches, self.strategy.seed)
        state = read(path)
        load_into(self.model, state["model"])
        self._resume(state)
        self._standing.resume(state["fit"])
        held: int = facts["micro_batches"]
        return held

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
        self.replica.wish(self._keeper.wishes())
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
        self._averaging.after_epoch(fit.epoch)
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
        )


def _in_groups(feed: Feed, size: int) -> Iterator[list[Batch]]:
    """The batches of a feed, some at a time."""
    batches = iter(feed)
    while group := list(itertools.islice(batches, size)):
        yield group
