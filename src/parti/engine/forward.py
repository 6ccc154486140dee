"""What a forward function may return, brought to one form: a sum to differentiate and its count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from parti.engine.scalar import scalar
from parti.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Forward:
    """A loss, and anything else the caller wants back for each micro-batch."""

    loss: Any
    aux: Any = None


@dataclass(frozen=True, slots=True)
class Weighed:
    """A scalar that stands for the losses of a micro-batch: `weight` times it is their sum."""

    scalar: torch.Tensor
    weight: float
    count: float
    """How many losses were summed."""
    aux: Any

    def backward(self) -> None:
        """Back-propagate the sum. The weight enters as the gradient of the scalar: no operation is
        added to the graph.

        `scalar.backward(weight)` without its checks of a gradient that is known to fit, which take
        longer than a small model's backward.
        """
        if not self.scalar.requires_grad:
            raise ConfigError(
                "the loss depends on no trainable parameter, so there is nothing to "
                "differentiate. Look for .detach(), .item(), argmax or torch.no_grad() between "
                "model and loss, and for parameters that are all frozen."
            )
        weight = scalar(self.weight, self.scalar.dtype, self.scalar.device)
        _engine_run_backward(
            (self.scalar,),
            (weight,),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    def tally(self) -> tuple[float, float]:
        """The sum and the count."""
        return self.scalar.item() * self.weight, self.count


def call(forward: Callable[..., Any], data: Any) -> Any:
    """Hand a micro-batch over the way its type suggests."""
    if isinstance(data, (tuple, list)) and not hasattr(data, "_fields"):
        return forward(*data)
    if isinstance(data, Mapping):
        return forward(**data)
    return forward(data)


def weigh(result: Any, num_samples: int) -> Weighed:
    """Turn a mean, a tensor of losses, or a (sum, count) pair into a sum and its count.

    A mean is taken to be over the samples of the micro-batch.
    """
    aux = None
    if isinstance(result, Forward):
        result, aux = result.loss, result.aux
    if isinstance(result, (tuple, list)) and len(result) == 2:
        total, count = result
        if isinstance(total, torch.Tensor) and total.dim() == 0:
            return Weighed(total, 1.0, float(count), aux)
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif not isinstance(result, torch.Tensor) and hasattr(result, "loss"):
        result = result.loss
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"the forward function returned {_describe(result)}; expected a scalar loss, a tensor "
            "of losses, a pair (sum, count), something with `.loss`, or parti.Forward(loss, aux)."
        )
    if result.dim() == 0:
        return Weighed(result, float(num_samples), float(num_samples), aux)
    return Weighed(result.sum(), 1.0, float(result.numel()), aux)


def _describe(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        inside = ", ".join(type(item).__name__ for item in result)
        return f"a {type(result).__name__} of {len(result)} ({inside})"
    return f"an object of type {type(result).__name__}"
