"""Bringing values of all ranks together: `reduce` and `gather`.

Values that belong to micro-batches are combined in micro-batch order, in the tree of `tree.py`, so
the outcome does not depend on who computed them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from parti.comm.world import World
from parti.engine.report import Part, Parts
from parti.engine.tree import children
from parti.errors import ConfigError, DataError


class Reduction(StrEnum):
    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    @classmethod
    def of(cls, word: str) -> Reduction:
        try:
            return cls(word)
        except ValueError:
            known = ", ".join(repr(str(member)) for member in cls)
            raise ConfigError(
                f"reduction {word!r} is not known; expected one of {known}."
            ) from None


def reduce(
    world: World, value: Any, how: Reduction, axis: int | None, count: float | None
) -> torch.Tensor:
    """One tensor from everybody's; see `Replica.reduce`."""
    parts = _everyones(world, value, count)
    if not parts:
        raise DataError("there is nothing to reduce: no rank has a value.")
    tensors = [torch.as_tensor(part.value) for part in parts]
    counts = [float(part.num_samples) for part in parts]
    if axis is not None:
        counts = [float(tensor.shape[axis]) for tensor in tensors]
        tensors = [_along(tensor, how, axis) for tensor in tensors]
    match how:
        case Reduction.SUM:
            return _tree(tensors, torch.add)
        case Reduction.MIN:
            return _tree(tensors, torch.minimum)
        case Reduction.MAX:
            return _tree(tensors, torch.maximum)
        case Reduction.MEAN:
            weighed = [
                tensor.double() if axis is not None else tensor.double() * number
                for tensor, number in zip(tensors, counts, strict=True)
            ]
            mean = _tree(weighed, torch.add) / sum(counts)
            return mean.to(tensors[0].dtype if tensors[0].is_floating_point() else torch.float64)


def gather(world: World, value: Any, axis: int) -> Any:
    """Everybody's values, one after the other, on every rank."""
    parts = _everyones(world, value, None)
    if not parts:
        raise DataError("there is nothing to gather: no rank has a value.")
    return join([part.value for part in parts], axis)


def join(values: Sequence[Any], axis: int = 0) -> Any:
    """Values of one structure, one after the other, tensor by tensor."""
    flattened = [tree_flatten(value) for value in values]
    leaves = [
        _join([leaves[i] for leaves, _ in flattened], axis) for i in range(len(flattened[0][0]))
    ]
    return tree_unflatten(leaves, flattened[0][1])


def _join(values: Sequence[Any], axis: int) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return list(values)
    if values[0].dim() == 0:
        return torch.stack(list(values))
    return torch.cat(list(values), dim=axis)


def _along(tensor: torch.Tensor, how: Reduction, axis: int) -> torch.Tensor:
    match how:
        case Reduction.SUM:
            return tensor.sum(axis)
        case Reduction.MEAN:
            return tensor.double().sum(axis)
        case Reduction.MIN:
            return tensor.amin(axis)
        case Reduction.MAX:
            return tensor.amax(axis)


def _tree(
    tensors: Sequence[torch.Tensor], join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    def at(low: int, high: int) -> torch.Tensor:
        if high - low == 1:
            return tensors[low]
        left, right = children((low, high))
        return join(at(*left), at(*right))

    return at(0, len(tensors))


def _everyones(world: World, value: Any, count: float | None) -> list[Part]:
    """All parts of all ranks in micro-batch order; plain values count as one part a rank."""
    if isinstance(value, Parts):
        mine = list(value)
    else:
        mine = [Part(world.rank, 1 if count is None else count, value)]  # type: ignore[arg-type]
    if world.size == 1:
        return mine
    packed = pickle.dumps([(p.number, p.num_samples, _to_cpu(p.value)) for p in mine])
    # Pickled by this job's own processes, for each other, over memory or sockets of their own.
    everything = [Part(*part) for data in world.exchange(packed) for part in pickle.loads(data)]
    return sorted(everything, key=lambda part: part.number)


def _to_cpu(value: Any) -> Any:
    leaves, shape = tree_flatten(value)
    moved = [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in leaves]
    return tree_unflatten(moved, shape)
