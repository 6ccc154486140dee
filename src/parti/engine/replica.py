"""The live side of a strategy in one process: the training step and what belongs to it.

A step is `step`, below: compute my micro-batches, meet the others, add up, update. Everything it
needs to know about who computes what comes from pure functions of the number of micro-batches and
ranks (`placement.py`, `tree.py`).
"""

from __future__ import annotations

import functools
import math
import operator
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from parti.comm.protocol import Phase
from parti.comm.world import World
from parti.data.batches import Batch, Feed, Gate
from parti.data.order import Position
from parti.engine import letter as letters
from parti.engine.buffers import Buffers
from parti.engine.collect import Reduction, gather, reduce
from parti.engine.commit_log import CommitLog, NoCommitLog
from parti.engine.feeds import (
    Feeds,
    Kept,
    NothingSaved,
    SavedLoop,
    SavesLoops,
    check_checkpoint,
    place_of_caller,
)
from parti.engine.forward import Weighed, call, weigh
from parti.engine.gradients import square_norms
from parti.engine.layout import LINE_BYTES
from parti.engine.letter import Wish
from parti.engine.placement import Deal, deal
from parti.engine.randomness import Randomness
from parti.engine.recovery import Settlers, StepUpdate, Timed, join, settle
from parti.engine.report import Part, Parts, StepReport, StepTimes
from parti.engine.trained import Trained
from parti.engine.transforms.direct_gradients import Destinations, write_directly
from parti.engine.tree import Leaf, Share, tree_sum
from parti.engine.tuning import Applied
from parti.engine.update import Order
from parti.errors import CommError, ConfigError, PeerLost

Forward = Callable[..., Any]
Carry = Callable[[Sequence[Part]], bytes]
"""From what the micro-batches of this rank gave beside their losses to what others need of it."""

T = TypeVar("T")
_DOUBLE = struct.Struct("<d")


class Replica:
    """What `strategy.bind(...)` returns."""

    def __init__(
        self,
        *,
        strategy: object,
        world: World,
        device: torch.device,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        seed: int,
        exact: bool,
        applied: Applied | None = None,
        precision: Callable[[], AbstractContextManager[Any]],
        commits: CommitLog | None = None,
    ) -> None:
        self.strategy = strategy
        self.device = device
        self._exact = exact
        self._applied = Applied(()) if applied is None else applied
        self._world = world
        self._commits = NoCommitLog() if commits is None else commits
        self._is_attempting = False
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._trained = self._train_in(world)
        self._buffers = Buffers(models)
        world.copy_from_first(_everything(models, optimizers))
        self._randomness = Randomness(seed, device)
        self._precision = precision
        self.seed = seed
        self._token = ""
        self._shares_token = False
        self.came_later = False
        """This process was given the state of others, in the middle of their training."""
        self.step_number = 0
        self._feeds = Feeds()
        self._is_called = False
        self._wishes: Callable[[], Wish] | None = None
        self.last_wishes = Wish(0)
        self._kept: list[Kept] = []
        self._listeners: list[Callable[[], None]] = []
        self._randomness.after_step(-1)
        if world.generation:
            world.succession.settled(world)

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def num_replicas(self) -> int:
        return self._world.size

    @property
    def replica_id(self) -> int:
        return self._world.rank

    @property
    def generation(self) -> int:
        """Grows by one each time the world changes."""
        return self._world.generation

    @property
    def is_chief(self) -> bool:
        return self._world.rank == 0

    def facts(self) -> dict[str, Any]:
        """What the run's header shows."""
        world = self._world
        return {
            "strategy": str(self.strategy),
            "processes": world.size,
            "hosts": world.num_hosts,
            "devices": f"{world.size} x {_device_name(self.device)}",
            "comm": world.kind,
            "precision": getattr(self.strategy, "precision", "fp32"),
            "threads": torch.get_num_threads(),
            "exact": self._exact,
            "notes": self._applied.notes,
        }

    def batches(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        micro_batches: int | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        workers: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        start: Position | None = None,
        checkpoint: SavesLoops | None = None,
    ) -> Feed:
        """The global batches of `data`, in one order for any number of processes.

        `batch_size` counts the samples of one step over all processes. `micro_batches` is how many
        slices each batch is cut into, the unit of work that is dealt to processes; like the seed it
        is part of the training program. By default it follows from the batch size. A DataLoader
        brings its own settings, and `start` skips to a position without reading what lies before.

        A process that takes the place of a lost one goes through the script, too: loops that the
        others have behind them are empty for it, and the one they are in begins where they are.

        With a `checkpoint`, the states of all models and optimizers are written while the loop
        runs, and a new start of the script goes on from the newest good one, at the very step.
        """
        check_checkpoint(checkpoint)
        saved = NothingSaved() if checkpoint is None else checkpoint.loop(self)
        feed = self.feed(
            data,
            batch_size=batch_size,
            micro_batches=micro_batches,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
            start=start,
            gate=_Gate(self, place_of_caller(), saved),
        )
        saved.feed = feed
        return feed

    def feed(
        self,
        data: Any,
        *,
        batch_size: int | None,
        micro_batches: int | None,
        epochs: int = 1,
        shuffle: bool | None,
        drop_last: bool | None = None,
        workers: int | None,
        collate: Callable[[Sequence[Any]], Any] | None,
        start: Position | None = None,
        gate: Gate | None = None,
    ) -> Feed:
        """The same for who knows where the others are."""
        return Feed(
            data,
            batch_size=batch_size,
            micro_batches=micro_batches,
            epochs=epochs,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
            start=start,
            gate=gate,
            owned=lambda active: self._deal(active).shares[self.rank].micro_batches,
        )

    def keep(self, what: Kept) -> None:
        """Have something besides models and optimizers given to processes that come later."""
        self._kept.append(what)

    def on_new_world(self, listener: Callable[[], None]) -> None:
        """Have a function called whenever ranks have been lost or have come."""
        self._listeners.append(listener)

    def new_token(self) -> str:
        """A name that nothing else has, the same on all ranks, until it is given up. One that comes
        later has that of the others."""
        if not self.shares_token:
            self._token = self.exchange(os.urandom(8).hex().encode())[0].decode()
        self._shares_token = False
        return self._token

    def give_up_token(self) -> None:
        """What it was the name of is over."""
        self._token = ""

    @property
    def shares_token(self) -> bool:
        """This process has come into the middle of something that the others have named."""
        return self._shares_token and self._token != ""

    @property
    def loops(self) -> Feeds:
        """The loops over batches that this rank has entered."""
        return self._feeds

    def join(self) -> None:
        """In a process that takes a lost one's place: wait for it, and be where the others are.
        Elsewhere it does nothing."""
        if self._world.generation:
            return
        self.came_later = self._shares_token = True
        self._world, self._trained = join(self._settlers())
        self._feeds.arrive()
        self._randomness.after_step(self.step_number - 1)
        self._tell_if_new()

    def saved_state(self) -> dict[str, Any]:
        """Models, optimizers and what is kept, in memory that the next step may write to."""
        models = [model.state_dict() for model in self._models]
        return {
            **({"model": models[0]} if len(models) == 1 else {"models": models}),
            "optimizers": [self.held(optimizer) for optimizer in self._optimizers],
            "kept": [kept.state_dict() for kept in self._kept],
            "step": self.step_number,
        }

    def load_saved_state(self, state: Mapping[str, Any]) -> None:
        """Take in what `saved_state` gave; all ranks do so at the same point."""
        self.barrier()  # a rank that is behind may still be reading these weights
        held = state["models"] if "models" in state else [state["model"]]
        for model, values in zip(self._models, held, strict=True):
            model.load_state_dict(values)
        for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        for kept, values in zip(self._kept, state["kept"], strict=True):
            kept.load_state_dict(values)
        self.step_number = state["step"]
        self._randomness.after_step(self.step_number - 1)

    def held(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state_dict, in memory that the next step may write to: for who copies it
        at once."""
        trained = self._trained.get(id(optimizer))
        return optimizer.state_dict() if trained is None else trained.update.held()

    def ask(self, wishes: Callable[[], Wish] | None) -> None:
        """Ask in every step from now on, as late as it can be told to the others, what is to follow
        from it on all ranks (`StepReport.wishes`)."""
        self._wishes = wishes

    def _asked(self) -> Wish:
        wishes = Wish(0) if self._wishes is None else self._wishes()
        return wishes | Wish.JOIN if self._is_newer_world_called() else wishes

    def _is_newer_world_called(self) -> bool:
        return self.is_chief and self._world.succession.is_called(self._world)

    def admit(self) -> None:
        """Between two steps: let those in who have come, if the last step said so. Where too few
        hosts are left, wait for them."""
        while self._is_called or self._world.is_paused:
            self._go_on(None, None)

    def step(
        self,
        forward: Forward,
        batch: Batch,
        *,
        optimizer: Optimizer | None = None,
        clip_norm: float | None = None,
        carry: Carry | None = None,
    ) -> StepReport:
        """One optimizer update from one global batch.

        `forward` is called once for each micro-batch computed here and returns its loss: a mean
        over the samples, a tensor of losses, a pair (sum, count), or `parti.Forward`. The update
        uses the gradient of the mean over everything counted in the global batch.

        `carry` may turn what the micro-batches of this rank gave beside their losses into bytes;
        everyone's are in the report, and they count if and only if the step does.
        """
        wanted = _Wanted(forward, batch, optimizer, clip_norm, carry)
        return self.attempt(lambda: self._step(wanted))

    def _step(self, wanted: _Wanted) -> StepReport:
        """A transaction. Until `_prepare` returns nothing has changed, and the loss of a rank makes
        the others begin again; from there on the step is finished, by those who are left."""
        started = time.perf_counter()
        trained = self._chosen(wanted.optimizer)
        dealt = self._deal(wanted.batch.num_micro_batches)
        work = dealt.shares[self.rank]
        try:
            results, used, num_samples = self._applied.checked(
                lambda: self._compute(trained, dealt, wanted),
                decides=0 in work.micro_batches,
                exchange=self._world.exchange,
                rewind=self._buffers.rewind,
            )
            computed = time.perf_counter()
            self._report(Phase.REDUCE)
            mail = self._meet(results, used, work, wanted)
            loss, count = _tally(mail)
            met = time.perf_counter()
            update, adding = self._prepare(trained, mail, count, wanted.clip_norm)
        except CommError:
            self._buffers.rewind()
            raise

        self._report(Phase.OPTIMIZER)
        self._buffers.settle([each.buffers for each in mail], dealt)
        generation = self._world.generation  # of the gradients, whoever is there at the end
        # Who is called hears of it in its own time; rank 0 speaks for all. A loss before the end of
        # the step overtakes it.
        self._is_called = bool(mail[0].wishes & Wish.JOIN)
        update.carry_out()
        self._close(update)
        self._randomness.after_step(self.step_number)
        self._commits.committed(
            generation,
            self.step_number,
            wanted.batch,
            first=results[0][0] if results else 0,
            end=results[-1][0] + 1 if results else 0,
            num_samples=num_samples,
            has_finished=update.has_finished,
        )
        self.step_number += 1
        wishes = self.last_wishes = Wish(
            functools.reduce(operator.or_, [each.wishes for each in mail])
        )
        self._report(Phase.USER)
        ended = time.perf_counter()
        added_s = sum(each.spent_s for each in adding)
        return StepReport(
            step=self.step_number - 1,
            loss=loss,
            count=count,
            num_samples=wanted.batch.num_samples,
            grad_norm=update.norm,
            aux=tuple((number, result.aux) for number, result in results),
            carried=tuple([each.carried for each in mail]),
            wishes=wishes,
            times=StepTimes(
                compute_s=computed - started,
                comm_s=met - computed + added_s,
                optimizer_s=ended - met - added_s,
            ),
        )

    def attempt(self, unit: Callable[[], T]) -> T:
        """Do something that all ranks do together; if one of them is lost meanwhile, do it again
        with those who are left. So `unit` changes nothing that lasts before its last exchange."""
        if self._is_attempting:
            return unit()  # whoever called us begins again as a whole
        self._is_attempting = True
        try:
            while True:
                try:
                    return unit()
                except PeerLost as lost:
                    self._go_on(lost, None)
        finally:
            self._is_attempting = False

    def _close(self, update: StepUpdate) -> None:
        """End a step whose weights have changed. All are through, or what the lost have left
        undone is done for them."""
        try:
            if len(self._world.neighbours.ranks) > 1:
                # From here on the user's code may write to its weights, and the next step to slots.
                self._world.neighbours.exchange(b"")
            update.commit()
        except PeerLost as lost:
            self._go_on(lost, update)

    def _go_on(self, lost: CommError | None, unfinished: StepUpdate | None) -> None:
        """Settle in the world that comes after this one."""
        self._is_called = False
        self._world, self._trained = settle(self._settlers(), lost, unfinished)
        self._tell_if_new()
        for listener in self._listeners:
            listener()

    def _tell_if_new(self) -> None:
        """Keep a record of whom the state is from. That of a process that was in a world before may
        come from another, too: when that world was not settled for all."""
        world = self._world
        if world.member in world.newcomers:
            giver = next(each for each in world.members if each not in world.newcomers)
            self._commits.joined(world.generation, self.step_number, giver)

    def _began(self, start: Position) -> Position:
        """A loop over batches begins with the one at this position."""
        self._commits.began(self._world.generation, self.step_number, start)
        return start

    def _settlers(self) -> Settlers:
        return Settlers(
            world=self._world,
            trained=tuple(self._trained.values()),
            step=lambda: self.step_number,
            give=self._give,
            take=self._take,
            rebuild=self._train_in,
        )

    def _give(self) -> Mapping[str, Any]:
        """All that a process needs to be where this one is, with the script run up to here."""
        return {
            "step": self.step_number,
            "tensors": _everything(self._models, self._optimizers),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "applied": self._applied.standing(),
            "feeds": self._feeds.state_dict(),
            "token": self._token,
            "kept": [kept.state_dict() for kept in self._kept],
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        mine = _everything(self._models, self._optimizers)
        with torch.no_grad():
            for tensor, value in zip(mine, state["tensors"], strict=True):
                tensor.copy_(value)
        for optimizer, held in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self._applied.adopt(state["applied"])
        self._feeds.load_state_dict(state["feeds"])
        self._token = state["token"]
        for kept, held in zip(self._kept, state["kept"], strict=True):
            kept.load_state_dict(held)
        self.step_number = state["step"]

    def _train_in(self, world: World) -> dict[int, Trained]:
        """What each optimizer trains, laid out for the ranks of a world."""
        direct = write_directly(self._models) if len(world.neighbours.ranks) > 1 else None
        if direct is not None:
            direct.on()
        return {id(o): Trained(o, self._models, world) for o in self._optimizers}

    def run(self, fn: Forward, batch: Batch) -> Parts:
        """Call `fn` without gradients on each micro-batch computed here."""
        parts = []
        self._buffers.begin(0)
        dealt = self._deal(batch.num_micro_batches)
        for piece in batch.pieces(dealt.shares[self.rank].micro_batches):
            self._report(Phase.EVALUATE)
            self._buffers.rewind()
            self._randomness.before_micro_batch(self.step_number, piece.number)
            with torch.no_grad(), self._precision():
                value = call(fn, self._move(piece.data))
            parts.append(Part(piece.number, piece.num_samples, value))
        self._buffers.rewind()
        self._randomness.after_step(self.step_number - 1)
        self._report(Phase.USER)
        again = functools.partial(self._run_again, fn, batch, self.step_number)
        return Parts(tuple(parts), again, self._world.generation)

    def _run_again(self, fn: Forward, batch: Batch, step: int) -> Parts:
        if self.step_number != step:
            raise CommError(
                f"what `run` gave at step {step} was lost with a rank, and the weights have moved "
                f"on to step {self.step_number}. Reduce or gather it before the next step."
            )
        return self.run(fn, batch)

    def reduce(
        self,
        value: Any,
        op: str = "mean",
        *,
        axis: int | None = None,
        count: float | None = None,
    ) -> torch.Tensor:
        """Combine values of all ranks, or the `Parts` of `run`; the result is on every rank.

        `axis=None` combines element by element. A mean weighs the parts of a run with their number
        of samples, other values with `count`. With an axis, that axis is reduced as well, and a
        mean divides by the true number of elements along it.
        """
        how = Reduction.of(op)
        return self.attempt(lambda: reduce(self._world, self._complete(value), how, axis, count))

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Values of all ranks joined along an axis, or the `Parts` of `run` in sample order."""
        return self.attempt(lambda: gather(self._world, self._complete(value), axis))

    def _complete(self, value: Any) -> Any:
        """Parts that were made in an older world lack those of a lost rank: run them again."""
        if isinstance(value, Parts) and value.generation != self._world.generation:
            return value.again()
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.exchange(b"")

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        """Give some bytes, get everyone's, in rank order."""
        return self.attempt(lambda: self._world.exchange(payload))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While files are written, which may take long without anything being wrong."""
        self._report(Phase.SAVE)
        try:
            yield
        finally:
            self._report(Phase.USER)

    def _report(self, phase: Phase) -> None:
        self._world.neighbours.report(phase, self.step_number)

    def _compute(
        self, trained: Sequence[Trained], dealt: Deal, wanted: _Wanted
    ) -> tuple[list[tuple[int, Weighed]], bytes, int]:
        """Backward over my micro-batches; gradients end up in slots, in the order of the tree. What
        each gave, which parameters were reached, and how many samples there were."""
        work = dealt.shares[self.rank]
        by_number = {piece.number: piece for piece in wanted.batch.pieces(work.micro_batches)}
        results: list[tuple[int, Weighed]] = []
        reached: list[bool] | None = None
        is_only = self._world.size == dealt.num_leaves == 1
        self._buffers.begin(work.num_slots, is_only=is_only)
        for part in trained:
            part.drop()
            # While the first batch is being checked it may have to be computed once more.
            part.gradients.begin(dealt, early=self._applied.check is None)
        for op in work.ops:
            if not isinstance(op, Leaf):
                for part in trained:
                    part.gradients.merge(op.into, op.source)
                self._buffers.merge(op.into, op.source)
                continue
            piece = by_number[op.micro_batch]
            self._report(Phase.FORWARD)
            self._buffers.rewind()
            self._randomness.before_micro_batch(self.step_number, piece.number)
            with self._precision():
                result = weigh(call(wanted.forward, self._move(piece.data)), piece.num_samples)
            self._report(Phase.BACKWARD)
            with Destinations([part.gradients.homes(op.slot, op.onto) for part in trained]):
                result.backward()
            made = [part.collect() for part in trained]
            here = [gradient is not None for part in made for gradient in part]
            reached = (
                here if reached is None else [a or b for a, b in zip(reached, here, strict=True)]
            )
            for part, gradients in zip(trained, made, strict=True):
                part.gradients.put(op.slot, gradients, op.onto)
            self._buffers.leave(op.slot, op.onto)
            results.append((piece.number, result))
        used = b"" if reached is None or all(reached) else bytes(reached)
        return results, used, sum([piece.num_samples for piece in by_number.values()])

    def _meet(
        self, results: list[tuple[int, Weighed]], used: bytes, work: Share, wanted: _Wanted
    ) -> list[letters.Letter]:
        """Tell the others what I have, and learn what they have. After it all gradients are in."""
        mine = letters.Letter(
            self.step_number,
            wanted.batch.num_samples,
            tuple([result.tally() for _, result in results]),
            used,
            self._buffers.letter(work),
            b"" if wanted.carry is None else wanted.carry(_aux(results, wanted.batch)),
            self._asked(),
        )
        if self._world.size == 1:
            return [mine]
        mail = [letters.read(data) for data in self._world.exchange(letters.write(mine))]
        letters.check_agreement(mail)
        return mail

    def _prepare(
        self,
        trained: Sequence[Trained],
        mail: Sequence[letters.Letter],
        count: float,
        clip_norm: float | None,
    ) -> tuple[StepUpdate, Sequence[Timed]]:
        """Everything that can be known before weights change. Clipping goes by the norm over all
        parameters, the same on every rank to the bit."""
        scale = 1.0 / count if count else 0.0
        meets = clip_norm is not None or any(
            part.update.wants_whole or part.gradients.needs_meeting for part in trained
        )
        adding = [
            Timed(part.gradients.sums(scale, keep=meets or part.update.wants_all_sums))
            for part in trained
        ]
        sums: Sequence[Iterable[list[torch.Tensor]]] = adding
        norm = factor = None
        if meets:
            sums = [list(pieces) for pieces in adding]
            chunks = [chunk for pieces in sums for piece in pieces for chunk in piece]
            squares = [] if clip_norm is None else square_norms(chunks)
            everyones = self._world.neighbours.exchange(struct.pack(f"<{len(squares)}d", *squares))
            self._world.commit()
        if clip_norm is not None:
            # fsum rounds once, so the order in which ranks own chunks does not matter.
            norm = math.sqrt(
                math.fsum(x for data in everyones for (x,) in _DOUBLE.iter_unpack(data))
            )
            factor = clip_norm / (norm + 1e-6) if norm > clip_norm else None
        orders = [
            Order(token=self.step_number + 1, used=mask, factor=factor)
            for mask in _split_mask(mail, trained)
        ]
        return StepUpdate(trained, orders, sums, scale, norm), adding

    def _chosen(self, optimizer: Optimizer | None) -> list[Trained]:
        chosen = self._optimizers if optimizer is None else (optimizer,)
        for each in chosen:
            if id(each) not in self._trained:
                raise ConfigError(
                    f"this {type(each).__name__} was not bound; pass it to "
                    "`strategy.bind(model, optimizer)`."
                )
            if not self._trained[id(each)].is_current():
                self._trained[id(each)].release()
                self._trained[id(each)] = Trained(each, self._models, self._world)
        return [self._trained[id(each)] for each in chosen]

    def _deal(self, num_micro_batches: int) -> Deal:
        return deal(num_micro_batches, self._world.order, self._exact)

    def _move(self, data: Any) -> Any:
        """To the device; on a CPU, to the start of a cache line.

        A micro-batch may lie in the middle of what this rank has read for the step, and first on
        another rank. Matrix products round differently where an operand does not start on a line.
        """
        if self.device.type == "cpu":
            if type(data) is tuple and all(map(_is_aligned, data)):
                return data  # the usual case, without a walk through a tree
            return tree_map_only(torch.Tensor, _aligned, data)
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), data
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """Between the steps of a loop that knows by itself where it is: who has come is let in."""

    replica: Replica

    def begin(self, start: Position) -> Position | None:
        return self.replica._began(start)

    def reads(self, is_reading: bool) -> None:
        self.replica._report(Phase.DATA if is_reading else Phase.USER)

    def between(self, last: Batch) -> None:
        self.replica.admit()

    def end(self, is_through: bool) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Gate:
    """Before every batch of a loop of the user's: who has come is let in, and finds its place."""

    replica: Replica
    place: str
    saved: SavedLoop

    def begin(self, start: Position) -> Position | None:
        self.replica.join()
        position = self.replica._feeds.begin(self.place, start)
        if position is not None:
            position = self.saved.begin(position)
        return None if position is None else self.replica._began(position)

    def reads(self, is_reading: bool) -> None:
        self.replica._report(Phase.DATA if is_reading else Phase.USER)

    def between(self, last: Batch) -> None:
        if self.replica._feeds.between(self.place, last.after, self.replica.step_number):
            self.saved.between(last)
            self.replica.admit()

    def end(self, is_through: bool) -> None:
        self.saved.end(is_through)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller of a step has asked for."""

    forward: Forward
    batch: Batch
    optimizer: Optimizer | None
    clip_norm: float | None
    carry: Carry | None


def _aux(results: Sequence[tuple[int, Weighed]], batch: Batch) -> list[Part]:
    sizes = {
        piece.number: piece.num_samples for piece in batch.pieces(tuple(n for n, _ in results))
    }
    return [Part(number, sizes[number], result.aux) for number, result in results]


def _everything(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """All values that training starts from, frozen ones and buffers too."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    tensors += [p for each in optimizers for group in each.param_groups for p in group["params"]]
    return [tensor.detach() for tensor in {id(tensor): tensor for tensor in tensors}.values()]


def _is_aligned(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() % LINE_BYTES == 0


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_aligned(tensor) else tensor.clone()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def _tally(mail: Sequence[letters.Letter]) -> tuple[float, float]:
    """The mean loss over everything that was counted, and the count."""
    tallies = [tally for each in mail for tally in each.tallies]
    count = tree_sum([number for _, number in tallies])
    total = tree_sum([total for total, _ in tallies])
    return (total / count if count else math.nan), count


def _split_mask(
    mail: Sequence[letters.Letter], trained: Sequence[Trained]
) -> list[list[bool] | None]:
    """For each optimizer, which of its parameters were reached; None for all."""
    mask = letters.join_used(mail, sum(len(part.parameters) for part in trained))
    if mask is None:
        return [None] * len(trained)
    masks: list[list[bool] | None] = []
    for part in trained:
        masks.append(mask[: len(part.parameters)])
        mask = mask[len(part.parameters) :]
    return masks
