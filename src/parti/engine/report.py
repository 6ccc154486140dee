"""What a step and a run over a batch give back. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from parti.engine.letter import Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of one step went on this rank, in seconds."""

    compute_s: float
    comm_s: float
    """Meeting the others, waiting included, and adding gradients."""
    optimizer_s: float
    """The optimizer and the spreading of new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The outcome of one optimizer update. All but `aux` and `times` is equal on every rank."""

    step: int
    loss: float
    """The mean over everything that was counted in the global batch."""
    count: float
    """How many losses were averaged: samples, or tokens."""
    num_samples: int
    grad_norm: float | None
    aux: tuple[tuple[int, Any], ...]
    """(micro-batch, `Forward.aux`) of the micro-batches computed on this rank."""
    carried: tuple[bytes, ...]
    """What each rank carried along (see `Replica.step`)."""
    wishes: Wish
    """What any rank wants to follow from the step."""
    times: StepTimes


@dataclass(frozen=True, slots=True)
class Part:
    """What a function gave for one micro-batch."""

    number: int
    num_samples: int
    value: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """What a function gave for each micro-batch on this rank; `reduce` and `gather` take it."""

    parts: tuple[Part, ...]
    again: Callable[[], Parts] = field(repr=False)
    """The same once more, dealt to the ranks there are then."""
    generation: int = 0

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
