"""Metrics whose values are the same to the bit, however the samples were dealt. No communication.

A metric has `update(output, target)` and `compute()`. One that also has `state()` and `merge()`
can be updated on each rank with the samples computed there and merged afterwards; the metrics
here are of that kind. They hold integers or exact sums, so the order of updates and merges leaves
no trace. Anything else with `update` and `compute`, such as a metric of torchmetrics, is fed all
samples in order on every rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeGuard, final, runtime_checkable

import torch
from torch import Tensor

from parti.errors import ConfigError

# Every finite float64 is a whole number of 2**-1074.
_UNIT_BITS = 1074


@runtime_checkable
class Metric(Protocol):
    """What the Trainer asks of a metric."""

    def update(self, output: Tensor, target: Tensor) -> object:
        """Take in some samples."""
        ...

    def compute(self) -> object:
        """The value over all samples taken in: one number, or a dictionary of numbers."""
        ...


@runtime_checkable
class MergeableMetric(Metric, Protocol):
    """A metric that can take in what another rank has seen, exactly."""

    def state(self) -> bytes:
        """All that was taken in, to be merged elsewhere."""
        ...

    def merge(self, state: bytes) -> None:
        """Take in what another metric of the same kind has seen."""
        ...


def is_mergeable(metric: Metric) -> TypeGuard[MergeableMetric]:
    """Whether each rank may feed it only what was computed there."""
    return isinstance(metric, MergeableMetric)


@final
class ExactSum:
    """A sum of floats without rounding: the same for any order and any grouping."""

    __slots__ = ("_special", "_units")

    def __init__(self, value: float = 0.0) -> None:
        self._units = 0
        self._special = 0.0  # infinities and NaN, which no integer holds
        self.add(value)

    def add(self, value: float) -> None:
        try:
            numerator, denominator = value.as_integer_ratio()
        except (OverflowError, ValueError):
            self._special += value
        else:
            # The denominator of a float is a power of two.
            self._units += numerator << (_UNIT_BITS + 1 - denominator.bit_length())

    def merge(self, other: ExactSum) -> None:
        self._units += other._units
        self._special += other._special

    def value(self) -> float:
        """The float64 nearest to the exact sum."""
        return self._divided_by(1 << _UNIT_BITS)

    def over(self, other: ExactSum) -> float:
        """The float64 nearest to the exact quotient of the two sums; NaN for nothing over nothing.

        A mean over no samples has no value, so 0 / 0 is NaN and no error.
        """
        if other._special != 0:
            return self.value() / other._special
        return self._divided_by(other._units)

    def _divided_by(self, units: int) -> float:
        if self._special != 0:  # also true of NaN
            return self._special
        if units == 0:
            return math.nan if self._units == 0 else math.inf if self._units > 0 else -math.inf
        try:
            return self._units / units
        except OverflowError:
            return math.inf if (self._units > 0) == (units > 0) else -math.inf

    def to_bytes(self) -> bytes:
        units = self._units
        special = math.nan if math.isnan(self._special) else self._special
        length = units.bit_length() // 8 + 1
        return struct.pack("<d", special) + units.to_bytes(length, "little", signed=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> ExactSum:
        made = cls()
        (made._special,) = struct.unpack("<d", data[:8])
        made._units = int.from_bytes(data[8:], "little", signed=True)
        return made

    def __repr__(self) -> str:
        return f"ExactSum({self.value()!r})"


@final
class _Hits:
    """How many of how many, as whole numbers. The tensor is read only when somebody asks."""

    __slots__ = ("_right", "_total")

    def __init__(self) -> None:
        self._right: Tensor | int = 0
        self._total: Tensor | int = 0

    def add(self, right: Tensor, counted: Tensor | None) -> None:
        """`right` marks the hits; `counted`, if given, marks the ones that count at all."""
        if counted is None:
            self._total = self._total + right.numel()
        else:
            right = right & counted
            self._total = self._total + torch.count_nonzero(counted)
        self._right = self._right + torch.count_nonzero(right)

    def share(self) -> float:
        total = int(self._total)
        return int(self._right) / total if total else math.nan

    def to_bytes(self) -> bytes:
        return struct.pack("<qq", int(self._right), int(self._total))

    def merge(self, state: bytes) -> None:
        right, total = struct.unpack("<qq", state)
        self._right = self._right + right
        self._total = self._total + total


@final
class Accuracy:
    """The share of right answers.

    Outputs hold a score for each class along dimension 1 and targets hold class numbers, or
    outputs are class numbers themselves. Where outputs and targets have one shape (two classes,
    or several labels at once), an answer is yes above `threshold`: 0.0 for logits, 0.5 for
    probabilities. Targets equal to `ignore_index` do not count.
    """

    def __init__(self, *, threshold: float | None = None, ignore_index: int | None = None) -> None:
        self.threshold = threshold
        self.ignore_index = ignore_index
        self._hits = _Hits()

    def update(self, output: Tensor, target: Tensor) -> None:
        counted = None if self.ignore_index is None else target != self.ignore_index
        self._hits.add(self._right(output, target), counted)

    def _right(self, output: Tensor, target: Tensor) -> Tensor:
        if output.dim() == target.dim() + 1:
            classes = 1 if output.dim() > 1 else 0
            output = (
                output.argmax(classes) if output.shape[classes] > 1 else output.squeeze(classes)
            )
        if output.shape != target.shape:
            raise ConfigError(
                f"Accuracy got answers of shape {tuple(output.shape)} for targets of shape "
                f"{tuple(target.shape)}; expected outputs with a score for each class along "
                f"dimension 1 and one class number a target, or outputs of the targets' shape."
            )
        if not output.is_floating_point():
            return output == target
        if self.threshold is None:
            raise ConfigError(
                f"Accuracy got scores and targets of one shape, {tuple(output.shape)}; say where "
                f"yes begins: Accuracy(threshold=0.0) for logits, Accuracy(threshold=0.5) for "
                f"probabilities. For class probabilities as targets take "
                f"Mean(lambda output, target: output.argmax(1) == target.argmax(1))."
            )
        return (output > self.threshold) == (target > 0.5)

    def compute(self) -> float:
        return self._hits.share()

    def state(self) -> bytes:
        return self._hits.to_bytes()

    def merge(self, state: bytes) -> None:
        self._hits.merge(state)

    def __repr__(self) -> str:
        return f"Accuracy(threshold={self.threshold}, ignore_index={self.ignore_index})"


@final
class TopK:
    """The share of targets among the k classes of highest score.

    Of classes with equal scores the lower number comes first, so ties are decided alike on every
    device. A target whose score is NaN is a miss.
    """

    def __init__(self, k: int, *, ignore_index: int | None = None) -> None:
        if k < 1:
            raise ConfigError(f"TopK(k={k}): expected at least 1.")
        self.k = k
        self.ignore_index = ignore_index
        self._hits = _Hits()

    def update(self, output: Tensor, target: Tensor) -> None:
        classes = 1 if output.dim() > 1 else 0
        if output.dim() != target.dim() + 1 or self.k > output.shape[classes]:
            raise ConfigError(
                f"TopK(k={self.k}) got outputs of shape {tuple(output.shape)} and targets of "
                f"shape {tuple(target.shape)}; expected at least {self.k} classes along "
                f"dimension {classes} and one class number a target."
            )
        counted = None if self.ignore_index is None else target != self.ignore_index
        label = (target if counted is None else target.where(counted, 0)).unsqueeze(classes)
        score = output.gather(classes, label)
        number = torch.arange(output.shape[classes], device=output.device)
        number = number.view(-1, *[1] * (output.dim() - classes - 1))
        ahead = (output > score) | ((output == score) & (number < label))
        right = (ahead.sum(classes) < self.k) & ~score.squeeze(classes).isnan()
        self._hits.add(right, counted)

    def compute(self) -> float:
        return self._hits.share()

    def state(self) -> bytes:
        return self._hits.to_bytes()

    def merge(self, state: bytes) -> None:
        self._hits.merge(state)

    def __repr__(self) -> str:
        return f"TopK({self.k}, ignore_index={self.ignore_index})"


def _number(value: Tensor | float) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor | float | tuple[Tensor | float, float]]


@final
class Mean:
    """The mean of a function of (output, target).

    The function returns a tensor, every element of which counts once; one number, taken as a mean
    over the samples it was given; or a pair (sum, count). Sums are exact from there on.
    """

    def __init__(self, function: Measure) -> None:
        self.function = function
        self._sum = ExactSum()
        self._count = ExactSum()

    def update(self, output: Tensor, target: Tensor) -> None:
        value = self.function(output, target)
        if isinstance(value, tuple):
            total, count = value
            self._sum.add(_number(total))
            self._count.add(_number(count))
        elif isinstance(value, Tensor) and value.dim() > 0:
            # Within a slice torch adds in an order that depends on the slice's shape only.
            self._sum.add(value.detach().sum(dtype=torch.float64).item())
            self._count.add(float(value.numel()))
        else:
            num_samples = len(target)
            self._sum.add(_number(value) * num_samples)
            self._count.add(float(num_samples))

    def compute(self) -> float:
        return self._sum.over(self._count)

    def state(self) -> bytes:
        total = self._sum.to_bytes()
        return struct.pack("<I", len(total)) + total + self._count.to_bytes()

    def merge(self, state: bytes) -> None:
        (length,) = struct.unpack("<I", state[:4])
        self._sum.merge(ExactSum.from_bytes(state[4 : 4 + length]))
        self._count.merge(ExactSum.from_bytes(state[4 + length :]))

    def __repr__(self) -> str:
        return f"Mean({getattr(self.function, '__name__', self.function)})"
