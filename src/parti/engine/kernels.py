"""torch's fused kernels for the common optimizers, without the way to them.

`Optimizer.step` sorts its tensors and asks some thirty questions before it calls one kernel. For
tensors that stay the same from step to step the answers do, too; what may change, such as the
learning rate, is read from the optimizer's groups at every call. The kernel and what it is given
are the optimizer's own, so the bits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

Group = Mapping[str, Any]


class Kernel(Protocol):
    """Steps tensors of one type, of one group, that have had their first step."""

    def columns(self, group: Group) -> tuple[str, ...]:
        """What is kept for every element, by its names in the optimizer's state."""
        ...

    def suits(self, group: Group) -> bool:
        """Whether it does what the optimizer would, with these settings."""
        ...

    def __call__(self, group: Group, bound: Bound, gradients: list[torch.Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What a kernel is called with at every step."""

    tensors: list[torch.Tensor]
    columns: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    """How many each tensor has had, for optimizers that count."""


NOTHING = Bound([], [], [])


class _Adam:
    """Adam and AdamW."""

    def columns(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def suits(self, group: Group) -> bool:
        numbers = (group["lr"], *group["betas"])
        return (
            bool(group["fused"])
            and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
            and not any(isinstance(number, torch.Tensor) for number in numbers)
        )

    def __call__(self, group: Group, bound: Bound, gradients: list[torch.Tensor]) -> None:
        torch._foreach_add_(bound.steps, 1)
        run = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        averages, squares = bound.columns
        run(
            bound.tensors,
            gradients,
            averages,
            squares,
            [],
            bound.steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )


class _SGD:
    def columns(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def suits(self, group: Group) -> bool:
        return (
            bool(group["fused"])
            and not group["differentiable"]
            and not isinstance(group["lr"], torch.Tensor)
        )

    def __call__(self, group: Group, bound: Bound, gradients: list[torch.Tensor]) -> None:
        torch._fused_sgd_(
            bound.tensors,
            gradients,
            bound.columns[0] if bound.columns else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=None,
            found_inf=None,
        )


_KERNELS: Mapping[type[Optimizer], Kernel] = {Adam: _Adam(), AdamW: _Adam(), SGD: _SGD()}


def kernel_of(optimizer: Optimizer) -> Kernel | None:
    """None where only the optimizer itself knows what its step does."""
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return None
    kernel = _KERNELS.get(type(optimizer))
    return kernel if kernel and all(map(kernel.suits, optimizer.param_groups)) else None


def bind(
    kernel: Kernel,
    group: Group,
    tensors: Sequence[torch.Tensor],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
) -> Bound | None:
    """None where the optimizer has to make a first step, or a step in parts."""
    held = [states.get(tensor) for tensor in tensors]
    names = kernel.columns(group)
    if len({tensor.dtype for tensor in tensors}) != 1 or tensors[0].is_complex():
        return None
    if not all(each is not None and all(each.get(n) is not None for n in names) for each in held):
        return None if names else Bound(list(tensors), [], [])
    known = [each for each in held if each is not None]
    columns = [[each[name] for each in known] for name in names]
    return Bound(list(tensors), columns, [each["step"] for each in known if "step" in each])
