"""torch's fused optimizers: one pass over memory instead of one for each operation.

An optimizer that already exists is switched over, with its state and its schedulers. The update is
the same formula with fewer roundings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
)
_CHOICES = ("fused", "foreach", "capturable", "differentiable")
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class FusedOptimizers:
    """What was switched over, and the way back."""

    note: str
    optimizers: tuple[Optimizer, ...]
    hooks: tuple[RemovableHandle, ...]

    def off(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for optimizer in self.optimizers:
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["fused"] = None


def fuse_optimizers(
    optimizers: Sequence[Optimizer], models: Sequence[nn.Module]
) -> FusedOptimizers | None:
    """Switch every optimizer over that has a fused form and whose user chose no other."""
    if any(_makes_sparse_gradients(module) for model in models for module in model.modules()):
        return None
    fused = tuple(each for each in optimizers if can_fuse(each))
    if not fused:
        return None
    for optimizer in fused:
        _fuse(optimizer)
    # State saved before the switch brings its own "not fused" along.
    hooks = tuple(each.register_load_state_dict_post_hook(_fuse) for each in fused)
    names = dict.fromkeys(type(each).__name__ for each in fused)
    return FusedOptimizers(f"fused {', '.join(names)}", fused, hooks)


def can_fuse(optimizer: Optimizer) -> bool:
    """Whether there is a fused form, everything is of a kind it takes, and nobody chose another."""
    return (
        type(optimizer) in FUSED
        and not any(
            settings.get(choice)
            or (choice in ("fused", "foreach") and settings.get(choice) is not None)
            for settings in (optimizer.defaults, *optimizer.param_groups)
            for choice in _CHOICES
        )
        and all(
            _takes(p) and not _loses_momentum(group, p)
            for group in optimizer.param_groups
            for p in group["params"]
        )
    )


def _fuse(optimizer: Optimizer) -> None:
    # The defaults as well, for groups that the user adds later.
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["fused"] = True
    for group in optimizer.param_groups:
        _restride(optimizer, group["params"])


def _restride(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Bring state into its parameter's order in memory. The fused kernels on CPU walk over both as
    flat memory, and would mix up elements without a word."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _takes(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in _DEVICES


def _loses_momentum(group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """On CPUs torch 2.13 keeps the momentum of 16-bit weights wrong, and in part never writes the
    memory it keeps it in: no two runs have the same."""
    is_short = parameter.dtype in (torch.bfloat16, torch.float16)
    return bool(group.get("momentum")) and is_short and parameter.device.type == "cpu"


def _makes_sparse_gradients(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
