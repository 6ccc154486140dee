"""Large linear layers write the gradient of their weight to where the neighbours read it.

Autograd makes a gradient in memory of its own, from where it would be copied to the neighbours'. A
linear layer's is one matrix product, which can be told where to put its result: no copy, and the
same bits, as it is the same product.

A destination is open only while one micro-batch is back-propagated; without one the layer does what
`nn.Linear` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from parti.engine.transforms.change import Change, Effect, Patch, each_module, is_plain

MIN_BYTES = 1 << 18
"""Below it, copying costs less than what a call from Python costs more."""

_open: dict[int, torch.Tensor] = {}
"""By the id of the parameter: where its next gradient goes."""


class Destinations:
    """While it lasts, gradients of these parameters (by id) are written to their homes.

    One that was is the parameter's `.grad` afterwards.
    """

    def __init__(self, homes: Sequence[Mapping[int, torch.Tensor]]) -> None:
        self._homes = homes

    def __enter__(self) -> None:
        for each in self._homes:
            _open.update(each)

    def __exit__(self, *_: object) -> None:
        _open.clear()


def write_directly(models: Sequence[nn.Module]) -> Change | None:
    """Prepare the large linear layers of the models."""
    patches = tuple(
        Patch(module, "forward", linear_forward)
        for module in each_module(models)
        if is_plain(module, nn.Linear) and _is_large(module.weight)
    )
    return Change(note="", effect=Effect.EQUAL, patches=patches) if patches else None


def can_be_written(parameter: torch.Tensor) -> bool:
    """Whether it is worth keeping a destination for this parameter."""
    return parameter.dim() == 2 and _is_large(parameter) and parameter.is_contiguous()


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    if not (weight.requires_grad and torch.is_grad_enabled() and _suits(input, weight, self.bias)):
        return F.linear(input, weight, self.bias)
    return _Linear.apply(input, weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


# A pickled module finds its class's own method under this name.
linear_forward.__name__ = "forward"


class _Linear(torch.autograd.Function):
    """`F.linear`, with the same products in backward as torch's own."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if for_input:
            of_input = rows.mm(weight).view(input.shape)
        if for_weight:
            inputs = input.reshape(-1, input.shape[-1])
            home = take_home(weight)
            if home is None:
                of_weight = rows.t().mm(inputs)
            else:
                weight.grad = torch.mm(rows.t(), inputs, out=home)
        if for_bias:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias


def take_home(weight: torch.Tensor) -> torch.Tensor | None:
    """Where the gradient of a weight goes, once. Who has written it there makes it the weight's."""
    home = _open.pop(id(weight), None)
    if home is None or torch.is_grad_enabled() or _somebody_looks(weight):
        return None
    return home


def _somebody_looks(weight: torch.Tensor) -> bool:
    """Whether there is a gradient already, or a hook that may change this one or waits for it."""
    return (
        weight.grad is not None
        or bool(weight._backward_hooks)
        or bool(weight._post_accumulate_grad_hooks)
    )


def _suits(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        type(input) is torch.Tensor
        and input.dim() >= 2
        and input.dtype is weight.dtype
        and (bias is None or bias.dtype is weight.dtype)
        # Other ways to run a model, which need torch's own operator.
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def _is_large(weight: torch.Tensor) -> bool:
    return (
        not isinstance(weight, nn.parameter.UninitializedParameter)
        and weight.device.type == "cpu"
        and weight.numel() * weight.element_size() >= MIN_BYTES
    )


def homes_of(
    parameters: Iterable[torch.Tensor], views: Iterable[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Destinations for those parameters that can be written directly."""
    return {
        id(parameter): view
        for parameter, view in zip(parameters, views, strict=True)
        if can_be_written(parameter)
    }
