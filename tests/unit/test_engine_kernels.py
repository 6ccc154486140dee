"""Fused kernels, called directly: the optimizer's own bits, or left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from parti.engine.kernels import bind, kernel_of

Make = Callable[[list[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda groups: Adam(groups, lr=0.01, fused=True),
    "Adam, decay": lambda groups: Adam(groups, weight_decay=0.1, maximize=True, fused=True),
    "AdamW": lambda groups: AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, fused=True),
    "SGD": lambda groups: SGD(groups, lr=0.1, fused=True),
    "SGD, momentum": lambda groups: SGD(
        groups, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
    ),
    "SGD, dampened": lambda groups: SGD(groups, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
}


def made(make: Make, dtype: torch.dtype) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((5, 7), (3,), (130,))
    ]
    return make([{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.5}])


CASES = [
    (name, dtype)
    for name in OPTIMIZERS
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if not (name.startswith("SGD, ") and dtype is torch.bfloat16)  # torch's own has no fixed bits
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_the_optimizers_own_bits(name: str, dtype: torch.dtype) -> None:
    optimizer = made(OPTIMIZERS[name], dtype)
    generator = torch.Generator().manual_seed(1)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    twin: Optimizer | None = None
    for step in range(4):
        for parameter in everything:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        if twin is not None:
            kernel = kernel_of(twin)
            assert kernel is not None
            for group, its in zip(twin.param_groups, optimizer.param_groups, strict=True):
                group["lr"] = its["lr"] = its["lr"] * 0.9  # as a scheduler does
                bound = bind(kernel, group, group["params"], twin.state)
                assert bound is not None
                with torch.no_grad():
                    kernel(group, bound, [each.grad.clone() for each in its["params"]])
        optimizer.step()
        if step == 0:
            twin = copy.deepcopy(optimizer)
        assert twin is not None
        mine, others = optimizer.state_dict()["state"], twin.state_dict()["state"]
        assert torch.equal(_flat(mine), _flat(others))
        for theirs, group in zip(twin.param_groups, optimizer.param_groups, strict=True):
            for one, other in zip(theirs["params"], group["params"], strict=True):
                assert torch.equal(one, other)


def _flat(states: dict[int, dict[str, Any]]) -> torch.Tensor:
    held = [
        value.double().reshape(-1)
        for state in states.values()
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]
    return torch.cat(held) if held else torch.empty(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: Adam(groups),
        lambda groups: Adam(groups, fused=True, amsgrad=True),
        lambda groups: Adam(groups, lr=torch.tensor(0.1), fused=True),
        lambda groups: SGD(groups, lr=torch.tensor(0.1), fused=True),
        lambda groups: RMSprop(groups),
        lambda groups: _Mine(groups, fused=True),
    ],
    ids=["loops", "amsgrad", "lr in a tensor", "SGD's lr in a tensor", "RMSprop", "a user's own"],
)
def test_others_do_their_step_themselves(make: Make) -> None:
    assert kernel_of(made(make, torch.float32)) is None


class _Mine(Adam):
    pass


def test_a_first_step_is_the_optimizers() -> None:
    optimizer = made(OPTIMIZERS["AdamW"], torch.float32)
    kernel = kernel_of(optimizer)
    assert kernel is not None
    group = optimizer.param_groups[0]
    assert bind(kernel, group, group["params"], optimizer.state) is None
