"""ReLU behind max-pooling: `pool(relu(x))` is computed as `relu(pool(x))`.

The values are equal. ReLU never decreases, so the largest element of a window is the same one; ties
that ReLU makes among non-positive elements do not matter, because their gradient is zero in either
order. A NaN goes through both. Only the sign of a zero may differ. ReLU then works on a quarter of
the elements, and pooling skips the branch misses on a tensor that is half zeros.

Two calls are exchanged where nothing can be seen between them: neighbours in an `nn.Sequential`,
and calls that stand directly around or behind one another in the source of a `forward`. The
decision is taken at each call, from what the two callables are at that moment.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parti.engine.transforms.change import is_hookless

RELU_FUNCTIONS: tuple[object, ...] = (F.relu, torch.relu)
POOL_FUNCTIONS: tuple[object, ...] = (F.max_pool1d, F.max_pool2d)
POOL_MODULES: tuple[type[nn.Module], ...] = (nn.MaxPool1d, nn.MaxPool2d)
_POOL_SETTINGS = 5
"""kernel_size, stride, padding, dilation, ceil_mode; what follows them is return_indices."""
_FRESH: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
)
"""What comes out of these is held by nobody else, so ReLU may as well not overwrite it."""


def pool_then_relu(
    pool: Any, relu: Any, producer: Any, operand: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """`pool(relu(operand), *args)`, in the cheaper order where that is the same.

    `producer` is what made the operand, if nobody else can hold on to it.
    """
    if (
        may_exchange(relu, pool, producer)
        and not kwargs.get("return_indices")
        and len(args) <= _POOL_SETTINGS
        and type(operand) is torch.Tensor
        and operand.is_floating_point()
        and operand.device.type == "cpu"
    ):
        return relu(pool(operand, *args, **kwargs))
    return pool(relu(operand), *args, **kwargs)


def sequential_forward(self: nn.Sequential, input: Any) -> Any:
    """`nn.Sequential.forward` with every ReLU before a max-pool put behind it."""
    modules = list(self._modules.values())
    before: nn.Module | None = None
    i = 0
    while i < len(modules):
        module = modules[i]
        following = modules[i + 1] if i + 1 < len(modules) else None
        if type(module) is nn.ReLU and following is not None:
            input = pool_then_relu(following, module, before, input)
            before, i = following, i + 2
        else:
            assert module is not None
            input = module(input)
            before, i = module, i + 1
    return input


# A pickled module finds its class's own method under this name.
sequential_forward.__name__ = "forward"


def may_exchange(relu: object, pool: object, producer: object) -> bool:
    """Whether these two are what they seem, and nothing listens between them."""
    return _is_relu(relu, producer) and is_max_pool(pool)


def is_max_pool(pool: object) -> bool:
    if isinstance(pool, nn.Module):
        return (
            type(pool) in POOL_MODULES
            and not pool.return_indices
            and is_hookless(pool)
            and "forward" not in pool.__dict__
        )
    return any(pool is each for each in POOL_FUNCTIONS)


def _is_relu(relu: object, producer: object) -> bool:
    if isinstance(relu, nn.ReLU):
        return (
            type(relu) is nn.ReLU
            and is_hookless(relu)
            and "forward" not in relu.__dict__
            and (not relu.inplace or _is_fresh(producer))
        )
    return any(relu is each for each in RELU_FUNCTIONS)


def _is_fresh(producer: object) -> bool:
    return type(producer) in _FRESH and isinstance(producer, nn.Module) and is_hookless(producer)


def pairs_in(module: nn.Module) -> int:
    """How many exchanges `sequential_forward` would make."""
    children = [None, *module._modules.values()]
    return sum(
        may_exchange(relu, pool, before)
        for before, relu, pool in zip(children, children[1:], children[2:], strict=False)
    )
