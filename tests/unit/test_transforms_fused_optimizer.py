"""The switch to fused optimizers: the same training, with state, schedulers and saved states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parti.engine.transforms.fused_optimizer import FUSED, fuse_optimizers

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "tensor rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01, weight_decay=0.01),
}


class Course:
    """A parameter that is trained on the same gradients as any other of its shape."""

    def __init__(self, make: Make, shape: tuple[int, ...] = (6, 4, 3, 3)) -> None:
        self._generator = torch.Generator().manual_seed(1)
        start = torch.randn(shape, generator=self._generator)
        self.parameter = nn.Parameter(start)
        self.optimizer = make([self.parameter])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def run(self, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            drawn = torch.randn(self.parameter.shape, generator=self._generator)
            self.parameter.grad = torch.empty_like(self.parameter).copy_(drawn)
            self.optimizer.step()
            self.scheduler.step()
        return self.parameter.detach()


def fuse(*optimizers: Optimizer) -> None:
    made = fuse_optimizers(optimizers, [])
    assert made is not None and made.optimizers == optimizers


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_is_switched_in_the_middle_of_a_course(name: str) -> None:
    """State and scheduler go on; each step differs by rounding only."""
    plain, fused = Course(OPTIMIZERS[name]), Course(OPTIMIZERS[name])
    assert fused.run(3).equal(plain.run(3))
    before = dict(fused.optimizer.state.get(fused.parameter, {}))
    fuse(fused.optimizer)
    after = fused.optimizer.state.get(fused.parameter, {})
    assert all(after[name] is value for name, value in before.items())
    torch.testing.assert_close(fused.run(4), plain.run(4), rtol=1e-6, atol=1e-6)
    assert fused.optimizer.param_groups[0]["fused"] is True
    assert fused.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    torch.testing.assert_close(
        fused.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    )


def test_the_fused_kernel_runs() -> None:
    course = Course(OPTIMIZERS["adam"])
    fuse(course.optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        course.run(1)
    assert "aten::_fused_adam_" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_saved_state_that_was_not_fused_is_switched_over(name: str) -> None:
    plain, fused = Course(OPTIMIZERS[name]), Course(OPTIMIZERS[name])
    plain.run(3)
    fuse(fused.optimizer)
    fused.run(3)
    fused.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    assert fused.optimizer.param_groups[0]["fused"] is True
    torch.testing.assert_close(fused.run(3), plain.run(3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("where", ["at the switch", "when loaded"])
def test_state_in_another_order_than_the_weight_is_brought_into_its_order(where: str) -> None:
    """The fused kernels walk over both as flat memory."""
    plain, fused = Course(OPTIMIZERS["adam"]), Course(OPTIMIZERS["adam"])
    plain.run(3)
    turned = fused.parameter.detach().contiguous(memory_format=torch.channels_last)
    fused.parameter.data = turned
    state = copy.deepcopy(plain.optimizer.state_dict())
    fused.run(3)
    if where == "at the switch":
        fused.optimizer.load_state_dict(state)
        fuse(fused.optimizer)
    else:
        fuse(fused.optimizer)
        fused.optimizer.load_state_dict(state)
    torch.testing.assert_close(fused.run(3), plain.run(3), rtol=1e-6, atol=1e-6)
    assert fused.parameter.stride() == turned.stride()


def test_groups_that_are_added_later_are_fused_too() -> None:
    course = Course(OPTIMIZERS["adam"])
    fuse(course.optimizer)
    course.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert [group["fused"] for group in course.optimizer.param_groups] == [True, True]


class Own(torch.optim.Adam):
    pass


WEIGHT = nn.Parameter(torch.zeros(3))
LEFT: dict[str, Optimizer] = {
    "fused=False": torch.optim.Adam([WEIGHT], fused=False),
    "fused=True": torch.optim.Adam([WEIGHT], fused=True),
    "foreach=True": torch.optim.Adam([WEIGHT], foreach=True),
    "foreach=False": torch.optim.Adam([WEIGHT], foreach=False),
    "momentum of 16-bit weights": torch.optim.SGD(
        [nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))], 0.1, momentum=0.9
    ),
    "foreach=False in a group": torch.optim.Adam([{"params": [WEIGHT], "foreach": False}]),
    "differentiable": torch.optim.Adam([WEIGHT], differentiable=True),
    "capturable": torch.optim.Adam([WEIGHT], capturable=True),
    "a subclass": Own([WEIGHT]),
    "no fused form": torch.optim.RMSprop([WEIGHT]),
    "complex": torch.optim.Adam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
    "no memory": torch.optim.Adam([nn.Parameter(torch.zeros(3, device="meta"))]),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_a_choice_of_the_users_is_left_alone(name: str) -> None:
    optimizer = LEFT[name]
    before = [dict(each) for each in (optimizer.defaults, *optimizer.param_groups)]
    assert fuse_optimizers([optimizer], []) is None
    assert [dict(each) for each in (optimizer.defaults, *optimizer.param_groups)] == before


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_keep_optimizers_as_they_are(kind: type[nn.Module]) -> None:
    for sparse in (True, False):
        model = nn.Sequential(kind(4, 3, sparse=sparse))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert (fuse_optimizers([optimizer], [model]) is None) is sparse


def test_every_kind_is_named_once_in_the_note() -> None:
    optimizers = [kind([nn.Parameter(torch.zeros(2))], lr=0.1) for kind in (*FUSED, *FUSED[:2])]
    made = fuse_optimizers([*optimizers, LEFT["a subclass"]], [])
    assert made is not None and made.note == "fused SGD, Adam, AdamW, Adagrad"
    assert made.optimizers == tuple(optimizers)


def test_taken_off_an_optimizer_is_what_it_was() -> None:
    plain, fused = Course(OPTIMIZERS["adam"]), Course(OPTIMIZERS["adam"])
    made = fuse_optimizers([fused.optimizer], [])
    assert made is not None
    made.off()
    assert (
        fused.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]
    )
    assert fused.optimizer.defaults == plain.optimizer.defaults
    fused.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert fused.optimizer.param_groups[0]["fused"] is None
    assert fused.run(3).equal(plain.run(3))
