"""The transform that exchanges calls: see `pool_order.py` for what and `calls.py` for where."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from parti.engine.transforms.calls import hand_over_calls
from parti.engine.transforms.change import (
    Change,
    Effect,
    Patch,
    each_module,
    is_plain,
    is_replaced,
)
from parti.engine.transforms.pool_order import pairs_in, sequential_forward


@dataclass(frozen=True, slots=True)
class Reordered:
    change: Change | None
    views_are_safe: bool
    """Whether nothing in the models minds in which order an image lies in memory."""


def reorder_calls(models: Sequence[nn.Module], *, images: bool = True) -> Reordered:
    """Put ReLU behind max-pool wherever that is the same. With `images`, also bring views into a
    form that works for images in any order in memory."""
    patches: list[Patch] = []
    count = 0
    minds = False
    for module in each_module(models):
        if is_plain(module, nn.Sequential):
            pairs = pairs_in(module)
            count += pairs
            if pairs:
                patches.append(Patch(module, "forward", sequential_forward))
        elif not is_library(module):
            made = hand_over_calls(module, own_methods(module), images=images)
            patches += made.patches
            count += made.num_exchanged
            minds = minds or made.minds_order
    if not patches:
        return Reordered(None, not minds)
    note = f"ReLU behind max-pool ({count})" if count else ""
    return Reordered(Change(note=note, effect=Effect.EQUAL, patches=tuple(patches)), not minds)


def is_library(module: nn.Module) -> bool:
    """Whether the module comes with torch, which minds every memory format."""
    return type(module).__module__.partition(".")[0] == "torch"


def own_methods(module: nn.Module) -> tuple[str, ...]:
    """The methods that the user's classes define, except those replaced on this instance."""
    names: dict[str, None] = {}
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] == "torch" or kind is object:
            continue
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("__"):
                names[name] = None
    return tuple(name for name in names if not is_replaced(module, name))
