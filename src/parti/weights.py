"""Weights beside the ones in training: averages over time, and copies to go back to.

Everything here is element by element and the same on every rank, so averages are as reproducible
as the weights. Knows nothing of ranks: whoever lets these write into a live model first makes sure
that nobody else is still reading it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from parti.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average, updated after every step.

    While few steps are done the average moves faster (with `warmup`): after t steps the decay is at
    most (1 + t) / (10 + t), so the random start does not linger in it.
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ConfigError(
                f"EMA(decay={self.decay}): expected a number between 0 and 1, such as 0.999."
            )

    def rate_after_step(self, num_updates: int) -> float | None:
        if not self.warmup:
            return 1.0 - self.decay
        return 1.0 - min(self.decay, (1 + num_updates) / (10 + num_updates))

    def rate_after_epoch(self, num_updates: int, epoch: int) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class SWA:
    """The plain mean of the weights at the ends of the epochs from `start_epoch` on (the first
    epoch is 1)."""

    start_epoch: int

    def __post_init__(self) -> None:
        if self.start_epoch < 1:
            raise ConfigError(f"SWA(start_epoch={self.start_epoch}): epochs are counted from 1.")

    def rate_after_step(self, num_updates: int) -> float | None:
        return None

    def rate_after_epoch(self, num_updates: int, epoch: int) -> float | None:
        return 1.0 / (num_updates + 1) if epoch >= self.start_epoch else None


Average: TypeAlias = EMA | SWA


class AverageState(TypedDict):
    num_updates: int
    tensors: list[Tensor]


class Averaging(Protocol):
    """What the Trainer asks of an average, or of none."""

    def after_step(self) -> None: ...

    def after_epoch(self, epoch: int) -> None: ...

    def is_ready(self) -> bool:
        """Whether there is an average to use in place of the weights."""
        ...

    def in_place(self) -> object:
        """A context in which the model holds the average."""
        ...

    def state_dict(self) -> AverageState | None: ...

    def load_state_dict(self, state: AverageState | None) -> None: ...


class NoAverage:
    """No average: the weights as they are."""

    def after_step(self) -> None:
        return None

    def after_epoch(self, epoch: int) -> None:
        return None

    def is_ready(self) -> bool:
        return False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        yield

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: AverageState | None) -> None:
        if state is not None:
            raise CheckpointError(
                "the saved state holds averaged weights and this Trainer keeps none; construct it "
                "with the same `average=` as when the state was saved."
            )


class AveragedWeights:
    """The average of a model's parameters and floating-point buffers."""

    def __init__(self, model: nn.Module, average: Average) -> None:
        self._average = average
        self._parameters = [p for p in model.parameters() if p.is_floating_point()]
        # A module may replace its buffers, so they are looked up by name each time.
        self._buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self._num_updates = 0
        self._means: list[Tensor] = []

    def after_step(self) -> None:
        rate = self._average.rate_after_step(self._num_updates)
        if rate is not None:
            self._move(rate)

    def after_epoch(self, epoch: int) -> None:
        rate = self._average.rate_after_epoch(self._num_updates, epoch)
        if rate is not None:
            self._move(rate)

    def is_ready(self) -> bool:
        return self._num_updates > 0

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        live = [_precise(tensor) for tensor in self._live()]
        if not self._means:
            self._means = [tensor.clone() for tensor in live]
        else:
            torch._foreach_lerp_(self._means, live, rate)
        self._num_updates += 1

    def _live(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters] + [
            buffer
            for module, name in self._buffers
            if (buffer := module._buffers[name]) is not None
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        if not self.is_ready():
            yield
            return
        kept = [tensor.clone() for tensor in self._live()]
        try:
            _copy(self._live(), self._means)
            yield
        finally:
            # Looked up once more: the weights move to other memory when ranks are lost meanwhile.
            _copy(self._live(), kept)

    def state_dict(self) -> AverageState | None:
        return {"num_updates": self._num_updates, "tensors": list(self._means)}

    def load_state_dict(self, state: AverageState | None) -> None:
        if state is None:
            raise CheckpointError(
                f"the saved state holds no averaged weights and this Trainer keeps {self._average};"
                f" construct it without `average=`, or load the model's weights alone."
            )
        live = self._live()
        shapes = [tuple(tensor.shape) for tensor in live]
        held = [tuple(tensor.shape) for tensor in state["tensors"]]
        if held and held != shapes:
            raise CheckpointError(
                f"the saved average holds {len(held)} tensors that do not fit the model's "
                f"{len(shapes)}: it was saved from another model."
            )
        self._num_updates = state["num_updates"]
        self._means = [
            saved.to(_precise(tensor), copy=True)
            for saved, tensor in zip(state["tensors"], live, strict=False)
        ]


def _precise(tensor: Tensor) -> Tensor:
    # A step of a slow average is below the resolution of 16 bits: it would stand still.
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@torch.no_grad()
def _copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(into, source, strict=True):
        a.copy_(b)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights and buffers of a moment, and the average if there is one."""

    model: Mapping[str, Tensor]
    average: AverageState | None

    def as_dict(self) -> dict[str, object]:
        return {"model": dict(self.model), "average": self.average}


def take_snapshot(model: nn.Module, averaging: Averaging) -> Snapshot:
    """Copy everything that training changes in a model."""
    tensors = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    average = averaging.state_dict()
    if average is not None:
        average = {
            "num_updates": average["num_updates"],
            "tensors": [tensor.clone() for tensor in average["tensors"]],
        }
    return Snapshot(tensors, average)


@torch.no_grad()
def restore_snapshot(snapshot: Snapshot, model: nn.Module, averaging: Averaging) -> None:
    """Write a snapshot back into the tensors it was taken from."""
    live = model.state_dict()
    for name, value in snapshot.model.items():
        live[name].copy_(value)
    averaging.load_state_dict(snapshot.average)
