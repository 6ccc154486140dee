"""The check on the first micro-batch: what it sees, what it lets pass, that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parti.engine.transforms.change import Change, Effect, Patch
from parti.engine.transforms.first_batch import FirstBatchCheck
from parti.engine.tuning import Tuning, change_models

pytestmark = pytest.mark.usefixtures("one_thread")

Wrong = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Everything that a run more or less of the model would show in: dropout, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.5)
        self.classes = nn.Linear(4 * 2 * 2, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.convolution(images))))
        return self.classes(self.dropout(torch.flatten(x, 1)))


IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def checked(model: nn.Module, *changes: Change, images: Any = IMAGES) -> FirstBatchCheck:
    """One training call under a check of these changes."""
    for change in changes:
        change.on()
    check = FirstBatchCheck([model], changes)
    check.listen()
    model(images)
    assert not check.listening
    return check


def change_of(model: nn.Module, function: Wrong, effect: Effect) -> Change:
    return Change(
        note="made for a test", effect=effect, patches=(Patch(model, "forward", function),)
    )


def scaled(factor: float) -> Wrong:
    return lambda self, input: type(self).forward(self, input) * factor


def test_right_changes_stay_on() -> None:
    model = Net()
    changes = change_models(Tuning(), [model])
    assert len(changes) == 2
    assert checked(model, *changes).complaint is None
    assert all(p.name in p.module.__dict__ for change in changes for p in change.patches)
    assert not model._forward_pre_hooks


def test_the_call_goes_on_as_if_nothing_had_happened() -> None:
    """Outputs, gradients, statistics and the next random number, to the last bit."""
    model = Net()
    twin = copy.deepcopy(model)
    change_models(Tuning(), [twin])
    check = FirstBatchCheck([model], change_models(Tuning(), [model]))
    check.listen()
    after = []
    for each in (model, twin):
        torch.manual_seed(0)
        images = IMAGES.clone().requires_grad_()
        outputs = each(images)
        outputs.square().sum().backward()
        gradients = [images.grad, *(parameter.grad for parameter in each.parameters())]
        after.append([outputs.detach(), torch.rand(1), *gradients, *each.state_dict().values()])
    assert not check.listening and check.complaint is None
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


def test_buffers_that_nobody_writes_to_are_not_written_to() -> None:
    """Whoever watches their versions (the engine, to know what to exchange) would think so."""
    model = Net()
    model.norm.eval()
    before = [(buffer, buffer._version) for buffer in model.buffers()]
    checked(model, *change_models(Tuning(), [model]))
    after = [(buffer, buffer._version) for buffer in model.buffers()]
    assert all(a is b and i == j for (a, i), (b, j) in zip(before, after, strict=True))


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize("factor", [1.0, 1.0 + 1e-6, 1.01, float("nan"), float("inf")])
def test_how_far_a_change_may_go(factor: float, effect: Effect) -> None:
    model = Net()
    change = change_of(model.classes, scaled(factor), effect)
    complaint = checked(model, change).complaint
    if factor == 1.0 or (factor < 1.001 and effect is Effect.ROUNDING):
        assert complaint is None and "forward" in model.classes.__dict__
        return
    assert complaint is not None and "forward" not in model.classes.__dict__
    expected = "exchanged operations gave" if effect is Effect.EQUAL else "times as much as allowed"
    assert expected in complaint


def test_one_wrong_change_takes_all_of_them_off() -> None:
    model = Net()
    changes = change_models(Tuning(), [model])
    wrong = change_of(model.classes, scaled(-1.0), Effect.ROUNDING)
    assert checked(model, *changes, wrong).complaint is not None
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_one_wrong_element_of_many_is_seen_where_values_must_be_equal() -> None:
    def off_by_a_bit(self: nn.Linear, input: Tensor) -> Tensor:
        outputs = nn.Linear.forward(self, input)
        outputs[-1, -1] = outputs[-1, -1].nextafter(torch.tensor(torch.inf))
        return outputs

    model = Net()
    change = change_of(model.classes, off_by_a_bit, Effect.EQUAL)
    assert checked(model, change).complaint == "exchanged operations gave other values"


def raises(self: nn.Module, input: Tensor) -> Tensor:
    raise ZeroDivisionError("by design")


def of_another_shape(self: nn.Linear, input: Tensor) -> Tensor:
    return nn.Linear.forward(self, input)[:1]


def of_another_type(self: nn.Linear, input: Tensor) -> Tensor:
    return nn.Linear.forward(self, input).double()


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (raises, "the model raised ZeroDivisionError: by design"),
        (of_another_shape, "the outputs have other shapes or types"),
        (of_another_type, "the outputs have other shapes or types"),
    ],
)
def test_a_change_that_breaks_the_model_is_taken_off(
    function: Wrong, complaint: str, effect: Effect
) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    check = checked(model, change_of(model.classes, function, effect))
    assert check.complaint == complaint
    twin(IMAGES)
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        assert mine.equal(its)  # BatchNorm saw one call
    assert model(IMAGES).shape == (8, 5)


def test_an_error_of_the_users_own_is_raised() -> None:
    model = Net()
    model.classes = nn.Linear(7, 5)
    changes = change_models(Tuning(), [model])
    check = FirstBatchCheck([model], changes)
    check.listen()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(IMAGES)


def test_only_training_calls_count() -> None:
    model = Net()
    check = FirstBatchCheck([model], change_models(Tuning(), [model]))
    check.listen()
    with torch.no_grad():
        model(IMAGES)
    model.eval()(IMAGES)
    assert check.listening
    model.train()(IMAGES)
    assert not check.listening


def test_every_model_is_waited_for() -> None:
    models = [Net(), Net()]
    check = FirstBatchCheck(models, change_models(Tuning(), models))
    check.listen()
    models[0](IMAGES)
    assert check.listening
    models[1](IMAGES)
    assert not check.listening
    check.stop()
    assert not any(model._forward_pre_hooks for model in models)


class Normalises(Net):
    """Writes to its inputs, which are the user's batch."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.sub_(0.5).mul_(2.0))


def test_inputs_that_a_model_writes_to_are_written_to_once() -> None:
    model, images = Normalises(), IMAGES.clone()
    check = checked(model, *change_models(Tuning(), [model]), images=images)
    assert check.complaint is None
    assert images.equal(IMAGES.sub(0.5).mul(2.0))


def test_the_users_hooks_prepare_the_inputs_first() -> None:
    model = Net()
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].float() / 255,))
    images = torch.randint(0, 256, (8, 3, 6, 6), dtype=torch.uint8)
    assert checked(model, *change_models(Tuning(), [model]), images=images).complaint is None


RESULTS: dict[str, Callable[[Tensor], object]] = {
    "dict": lambda x: {"scores": x, "n": len(x)},
    "nested": lambda x: [(x,), None],
    "object": lambda x: SimpleNamespace(loss=x.sum(), scores=[x]),
    "distribution": lambda x: torch.distributions.Categorical(logits=x),
    "whole numbers": lambda x: (x.abs() * 1e6).long(),
}


@pytest.mark.parametrize("name", list(RESULTS))
def test_whatever_a_model_returns_is_compared(name: str) -> None:
    class Returns(Net):
        def forward(self, images: Tensor) -> Any:
            return RESULTS[name](super().forward(images))

    torch.manual_seed(0)
    for factor in (1.0, 1.5):
        model = Returns()
        change = change_of(model.classes, scaled(factor), Effect.ROUNDING)
        assert (checked(model, change).complaint is None) is (factor == 1.0)


@pytest.mark.parametrize("name", ["autocast", "converted", "of its own type", "to fp64"])
def test_the_coarsest_type_on_the_way_says_how_much_is_rounding(name: str) -> None:
    class Converts(Net):
        def forward(self, images: Tensor) -> Tensor:
            if name == "of its own type":
                return super().forward(images.bfloat16()).float()
            if name == "converted":
                return super().forward(images).bfloat16()
            return super().forward(images).to(torch.float64 if name == "to fp64" else torch.float32)

    model = Converts().to(torch.bfloat16 if name == "of its own type" else torch.float32)
    allowed = 1e-4 if name == "to fp64" else 1e-2
    for error in (allowed, 100 * allowed):
        change = change_of(model.classes, scaled(1 + error), Effect.ROUNDING)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            complaint = checked(model, change).complaint
        assert (complaint is None) is (error == allowed)
        change.off()


def test_gradients_flow_after_a_check_under_autocast() -> None:
    """Autocast keeps the weights it has converted, those of a run without gradients too."""
    model = Net()
    with torch.autocast("cpu", torch.bfloat16):
        check = FirstBatchCheck([model], change_models(Tuning(), [model]))
        check.listen()
        outputs = model(IMAGES)
    outputs.float().square().sum().backward()
    assert check.complaint is None
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "dropout", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout()]
)
def test_which_elements_are_dropped_is_not_compared(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), dropout, nn.Conv2d(4, 4, 3))
    assert checked(model, *change_models(Tuning(), [model])).complaint is None


def test_noise_in_another_order_is_a_difference() -> None:
    """A model that draws for every element of an image in memory order is left as it was."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = self.convolution(images)
            return x + torch.randn_like(x)

    model = Noisy()
    assert "times as much" in str(checked(model, *change_models(Tuning(), [model])).complaint)
    assert "forward" not in model.convolution.__dict__
