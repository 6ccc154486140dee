"""The live side of a strategy in one process: the training step and what belongs to it.

A step is `step`, below: compute my micro-batches, meet the others, add up, update. Everything it
needs to know about who computes what comes from pure functions of the number of micro-batches and
ranks (`placement.py`, `tree.py`).
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from parti.comm.protocol import Phase
from parti.comm.world import World
from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.engine import letter as letters
from parti.engine.buffers import Buffers
from parti.engine.collect import Reduction, gather, reduce
from parti.engine.forward import Weighed, call, weigh
from parti.engine.gradients import Sums, scale_all, square_norms
from parti.engine.layout import LINE_BYTES
from parti.engine.placement import Deal, deal
from parti.engine.randomness import Randomness
from parti.engine.report import Part, Parts, StepReport, StepTimes
from parti.engine.trained import Trained
from parti.engine.transforms.direct_gradients import Destinations, write_directly
from parti.engine.tree import Leaf, Share, tree_sum
from parti.engine.tuning import Applied
from parti.errors import ConfigError

Forward = Callable[..., Any]
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
    ) -> None:
        self.strategy = strategy
        self.device = device
        self._exact = exact
        self._applied = Applied(()) if applied is None else applied
        self._world = world
        self._models = tuple(models)
        direct = write_directly(models) if len(world.neighbours.ranks) > 1 else None
        if direct is not None:
            direct.on()
        self._optimizers = tuple(optimizers)
        self._trained = {id(o): Trained(o, models, world) for o in optimizers}
        self._buffers = Buffers(models)
        world.copy_from_first(_everything(models, optimizers))
        self._randomness = Randomness(seed, device)
        self._precision = precision
        self._seed = seed
        self.step_number = 0
        self._randomness.after_step(-1)

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
    ) -> Feed:
        """The global batches of `data`, in one order for any number of processes.

        `batch_size` counts the samples of one step over all processes. `micro_batches` is how many
        slices each batch is cut into, the unit of work that is dealt to processes; like the seed it
        is part of the training program. By default it follows from the batch size. A DataLoader
        brings its own settings, and `start` skips to a position without reading what lies before.
        """
        return Feed(
            data,
            batch_size=batch_size,
            micro_batches=micro_batches,
            epochs=epochs,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
            start=start,
            owned=lambda active: self._deal(active).shares[self.rank].micro_batches,
        )

    def step(
        self,
        forward: Forward,
        batch: Batch,
        *,
        optimizer: Optimizer | None = None,
        clip_norm: float | None = None,
    ) -> StepReport:
        """One optimizer update from one global batch.

        `forward` is called once for each micro-batch computed here and returns its loss: a mean
        over the samples, a tensor of losses, a pair (sum, count), or `parti.Forward`. The update
        uses the gradient of the mean over everything counted in the global batch.
        """
        started = time.perf_counter()
        trained = self._chosen(optimizer)
        dealt = self._deal(batch.num_micro_batches)
        work = dealt.shares[self.rank]
        results, used = self._applied.checked(
            lambda: self._compute(trained, dealt, forward, batch),
            decides=0 in work.micro_batches,
            exchange=self._world.exchange,
            rewind=self._buffers.rewind,
        )
        computed = time.perf_counter()

        self._world.neighbours.report(Phase.REDUCE, self.step_number)
        mail = self._meet(results, used, work, batch)
        loss, count = _tally(mail)
        self._buffers.settle([each.buffers for each in mail], dealt)
        met = time.perf_counter()
        scale = 1.0 / count if count else 0.0
        clips = clip_norm is not None
        adding = [
            _Timed(part.gradients.sums(scale, keep=clips or part.update.wants_all_sums))
            for part in trained
        ]
        norm, sums = self._clip(adding, clip_norm)

        self._world.neighbours.report(Phase.OPTIMIZER, self.step_number)
        for part, mask, pieces in zip(trained, _split_mask(mail, trained), sums, strict=True):
            part.update.step(mask, pieces)
        self._randomness.after_step(self.step_number)
        self.step_number += 1
        self._world.neighbours.report(Phase.USER, self.step_number)
        ended = time.perf_counter()
        added_s = sum(each.spent_s for each in adding)
        return StepReport(
            step=self.step_number - 1,
            loss=loss,
            count=count,
            num_samples=batch.num_samples,
            grad_norm=norm,
            aux=tuple((number, result.aux) for number, result in results),
            times=StepTimes(
                compute_s=computed - started,
                comm_s=met - computed + added_s,
                optimizer_s=ended - met - added_s,
            ),
        )

    def run(self, fn: Forward, batch: Batch) -> Parts:
        """Call `fn` without gradients on each micro-batch computed here."""
        parts = []
        self._buffers.begin(0)
        for piece in batch.micro_batches:
            self._randomness.before_micro_batch(self.step_number, piece.number)
            with torch.no_grad(), self._precision():
                value = call(fn, self._move(piece.data))
            parts.append(Part(piece.number, piece.num_samples, value))
        self._randomness.after_step(self.step_number - 1)
        return Parts(tuple(parts))

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
        return reduce(self._world, value, Reduction.of(op), axis, count)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Values of all ranks joined along an axis, or the `Parts` of `run` in sample order."""
        return gather(self._world, value, axis)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._world.exchange(b"")

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        """Give some bytes, get everyone's, in rank order."""
        return self._world.exchange(payload)

    def _compute(
        self, trained: Sequence[Trained], dealt: Deal, forward: Forward, batch: Batch
    ) -> tuple[list[tuple[int, Weighed]], bytes]:
        """Backward over my micro-batches; gradients end up in slots, in the order of the tree."""
        report = self._world.neighbours.report
        by_number = {piece.number: piece for piece in batch.micro_batches}
        results: list[tuple[int, Weighed]] = []
        reached: list[bool] | None = None
        work = dealt.shares[self.rank]
        self._buffers.begin(work.num_slots)
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
            report(Phase.FORWARD, self.step_number)
            self._buffers.rewind()
            self._randomness.before_micro_batch(self.step_number, piece.number)
            with self._precision():
                result = weigh(call(forward, self._move(piece.data)), piece.num_samples)
            report(Phase.BACKWARD, self.step_number)
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
        return results, used

    def _meet(
        self, results: list[tuple[int, Weighed]], used: bytes, work: Share, batch: Batch
    ) -> list[letters.Letter]:
        """Tell the others what I have, and learn what they have. After it all gradients are in."""
        mine = letters.Letter(
            self.step_number,
            batch.num_samples,
            tuple([result.tally() for _, result in results]),
            used,
            self._buffers.letter(work),
        )
        if self._world.size == 1:
            return [mine]
        mail = [letters.read(data) for data in self._world.exchange(letters.write(mine))]
        letters.check_agreement(mail)
        return mail

    def _clip(
        self, adding: Sequence[_Timed], clip_norm: float | None
    ) -> tuple[float | None, Sequence[Iterable[list[torch.Tensor]]]]:
        """Clip by the norm over all parameters; the same on every rank to the bit."""
        if clip_norm is None:
            return None, adding
        sums = [list(pieces) for pieces in adding]
        chunks = [chunk for pieces in sums for piece in pieces for chunk in piece]
        squares = square_norms(chunks)
        everyones = self._world.neighbours.exchange(struct.pack(f"<{len(squares)}d", *squares))
        # fsum rounds once, so the order in which ranks own chunks does not matter.
        norm = math.sqrt(math.fsum(x for data in everyones for (x,) in _DOUBLE.iter_unpack(data)))
        if norm > clip_norm:
            scale_all(chunks, clip_norm / (norm + 1e-6))
        return norm, sums

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


class _Timed:
    """Hands sums on as they come, and adds up how long each took to come."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.spent_s = 0.0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return self

    def __next__(self) -> list[torch.Tensor]:
        started = time.perf_counter()
        try:
            return next(self._sums)
        finally:
            self.spent_s += time.perf_counter() - started


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
