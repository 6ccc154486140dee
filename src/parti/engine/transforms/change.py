"""A change to living modules that can be put on and taken off again.

Only attributes of instances are touched. Parameters, buffers, the class of a module and the keys
of its state stay what they are. A deep copy of a changed module is changed, a pickle of it is not,
because a patch is a bound method under the name of the method that it stands before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import Any, TypeGuard, TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


class Effect(StrEnum):
    """What a change does to the numbers that a model computes."""

    EQUAL = "equal"
    """Every value is the same; only the sign of a zero may differ."""
    ROUNDING = "rounding"
    """Sums are taken in another order, in the same precision."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of one module, replaced on that instance."""

    module: nn.Module
    name: str
    function: Callable[..., Any]

    def on(self) -> None:
        if not is_replaced(self.module, self.name):
            self.module.__dict__[self.name] = MethodType(self.function, self.module)

    def off(self) -> None:
        # What the user has put there since is the user's.
        if getattr(self.module.__dict__.get(self.name), "__func__", None) is self.function:
            del self.module.__dict__[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The patches of one transform, with a few words on them for the run's header."""

    note: str
    effect: Effect
    patches: tuple[Patch, ...]

    def on(self) -> None:
        for patch in self.patches:
            patch.on()

    def off(self) -> None:
        for patch in self.patches:
            patch.off()


def each_module(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Every module of every model, once."""
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def is_plain(module: nn.Module, kind: type[_Module]) -> TypeGuard[_Module]:
    """Whether calling the module runs `kind.forward` and nothing of anybody else's."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and not is_replaced(module, "forward")
    )


def is_replaced(module: nn.Module, name: str) -> bool:
    """Whether this instance has a method of its own in place of its class's. One that was pickled
    while changed has its class's own, bound to itself."""
    own = module.__dict__.get(name)
    return own is not None and getattr(own, "__func__", None) is not getattr(type(module), name)


def is_hookless(module: nn.Module) -> bool:
    """Whether nobody listens to what goes in and out of the module."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )
