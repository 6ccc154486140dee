"""Putting changes on instances and taking them off; which part of a tuning does what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parti.engine.transforms.change import (
    Change,
    Effect,
    Patch,
    each_module,
    is_hookless,
    is_plain,
)
from parti.engine.transforms.fused_optimizer import FUSED
from parti.engine.tuning import Tuning, apply

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def doubled(self: nn.Linear, input: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(self, input)


def make_change(*modules: nn.Module) -> Change:
    patches = tuple(Patch(module, "forward", doubled) for module in modules)
    return Change(note="doubled", effect=Effect.ROUNDING, patches=patches)


def test_only_the_instance_is_changed_and_nothing_is_left_behind() -> None:
    model, other, input = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    plain, others, attributes = model(input), other(input), dict(model.__dict__)
    change = make_change(model)
    for _ in range(2):
        change.on()
        change.on()
        assert model(input).equal(2 * plain) and other(input).equal(others)
        assert not is_plain(model, nn.Linear)
        change.off()
        change.off()
        assert model(input).equal(plain) and is_plain(model, nn.Linear)
        assert model.__dict__ == attributes


def test_what_the_user_puts_in_place_later_is_kept() -> None:
    model = nn.Linear(3, 3)
    change = make_change(model)
    change.on()
    model.forward = lambda input: input  # type: ignore[method-assign]
    own = model.forward
    change.off()
    assert model.forward is own
    change.on()
    assert model.forward is own


def test_a_module_that_several_models_share_comes_once() -> None:
    shared = nn.Linear(3, 3)
    models = [nn.Sequential(shared, shared), shared, nn.Sequential(shared)]
    assert list(each_module(models)) == [models[0], shared, models[2]]


@pytest.mark.parametrize(
    "name",
    [
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)  # fmt: skip
def test_listeners_on_a_module_are_seen(name: str) -> None:
    module = nn.Linear(3, 3)
    assert is_hookless(module)
    handle = getattr(module, name)(lambda *_: None)
    assert not is_hookless(module)
    handle.remove()
    assert is_hookless(module)


def test_listeners_on_all_modules_are_seen() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_hookless(nn.Linear(3, 3))
    finally:
        handle.remove()


class Everything(nn.Module):
    """Something to do for every part."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)
        self.classes = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.pool(F.relu(self.convolution(images))).view(len(images), -1))


ALLOCATOR = "allocator keeps freed blocks"
PARTS = {
    "fused_optimizer": ["fused SGD, Adam"],
    "allocator": [ALLOCATOR],
    "layout": ["ReLU behind max-pool (1)", "channels_last (1 convolution)"],
    "fast_matmul": [],
}


@pytest.mark.parametrize("part", list(PARTS))
def test_each_part_is_turned_on_by_itself(part: str) -> None:
    model = Everything()
    optimizers = [kind(model.parameters(), lr=0.1) for kind in FUSED[:2]]
    tuning = Tuning(**{name: name == part for name in PARTS})
    applied = apply(tuning, [model], optimizers, device=CPU)
    # Where the allocator is not glibc's, there is nothing to say of it.
    assert [note for note in applied.notes if note != ALLOCATOR] == [
        note for note in PARTS[part] if note != ALLOCATOR
    ]
    assert (applied.check is not None) is bool(applied.changes) is (part == "layout")


def test_without_tuning_nothing_is_touched() -> None:
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters())
    before = [dict(module.__dict__) for module in model.modules()]
    applied = apply(Tuning.none(), [model], [optimizer], device=CPU)
    assert (applied.notes, applied.changes, applied.fused, applied.check) == ((), (), None, None)
    assert [module.__dict__ for module in model.modules()] == before
    assert optimizer.param_groups[0]["fused"] is None


def test_everything_can_be_undone() -> None:
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters())
    before = [dict(module.__dict__) for module in model.modules()]
    applied = apply(Tuning(), [model], [optimizer], device=CPU)
    assert [module.__dict__ for module in model.modules()] != before
    assert applied.check is not None
    applied.check.listen()
    applied.undo()
    assert [module.__dict__ for module in model.modules()] == before
    assert is_hookless(model)
    assert optimizer.param_groups[0]["fused"] is None and applied.notes == ()


def test_models_on_other_devices_keep_their_order() -> None:
    model = Everything().to("meta")
    applied = apply(Tuning(), [model], [], device=torch.device("meta"))
    assert applied.notes == ()
