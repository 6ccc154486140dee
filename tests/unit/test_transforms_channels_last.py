"""Channels-last: the same numbers up to rounding, and nothing left that a user could trip over."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parti.engine.transforms.calls import image_ends
from parti.engine.transforms.change import Effect
from parti.engine.transforms.channels_last import channels_last, lay_out_channels_last

pytestmark = pytest.mark.usefixtures("one_thread")


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, groups=2, padding=1, bias=False), nn.GELU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (4, 3, 9, 9)),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), (4, 1, 7, 6)),
    "padded": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (4, 3, 7, 6)),
    "one pixel": (lambda: nn.Sequential(nn.Conv2d(5, 4, 1), nn.Flatten()), (4, 5, 1, 1)),
    "no batch": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (3, 7, 6)),
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3), nn.GroupNorm(3, 3)),
        (2, 3, 6, 6),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm((4, 4, 5)), nn.Flatten(0, 2)),
        (2, 3, 6, 7),
    ),
}


def values_and_gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    images = images.clone().requires_grad_()
    model.zero_grad()
    outputs = model(images)
    outputs.square().sum().backward()
    return [outputs.detach(), images.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", list(MODELS))
def test_values_and_gradients_are_equal_to_rounding(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, images = make().double(), torch.randn(shape, dtype=torch.float64)
    change = lay_out_channels_last([model])
    assert change is not None and change.effect is Effect.ROUNDING
    before = values_and_gradients(model, images)
    change.on()
    after = values_and_gradients(model, images)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-11)
    change.off()
    assert all(a.equal(b) for a, b in zip(values_and_gradients(model, images), before, strict=True))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_go_through_in_channels_last_and_weights_stay_as_they_are(channels: int) -> None:
    model = cnn()
    model[0] = nn.Conv2d(channels, 8, 3)
    state = {name: (value.clone(), value.stride()) for name, value in model.state_dict().items()}
    lay_out_channels_last([model]).on()  # type: ignore[union-attr]
    seen: dict[str, bool] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: in_channels_last(out)})
        )
    # In evaluation, so that BatchNorm's statistics stay what they are as well.
    model.eval()(torch.randn(2, channels, 9, 9))
    assert [name for name, is_last in seen.items() if is_last] == list("0123456")
    after = model.state_dict()
    assert list(after) == list(state)
    for name, (value, stride) in state.items():
        assert after[name].equal(value) and after[name].stride() == stride


def in_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def test_gradients_come_in_the_order_of_the_images() -> None:
    """What pooling over all of an image, or flattening it, would hand back is in default order."""
    arrived: list[bool] = []

    class Watch(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            watched = images * 1.0
            watched.register_hook(lambda gradient: arrived.append(in_channels_last(gradient)))
            return watched * 1.0

    for end in (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Identity()):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), Watch(), end)
        lay_out_channels_last([model]).on()  # type: ignore[union-attr]
        outputs = model(torch.randn(2, 3, 9, 9))
        outputs.backward(torch.randn(outputs.shape))
    assert arrived == [True] * 3


def test_a_leaf_is_not_given_a_hook() -> None:
    """It would keep it, and one more from every step."""
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    assert image_ends(weight) is weight
    assert not weight._backward_hooks


def test_one_channel_is_relabelled_and_not_copied() -> None:
    images = torch.randn(4, 1, 5, 6)
    turned = channels_last(images)
    assert turned.equal(images) and turned.data_ptr() == images.data_ptr()
    assert turned.stride() == (30, 1, 6, 1)


@pytest.mark.parametrize(
    "pack", [lambda x: x, lambda x: {"mask": [x]}, lambda x: (x, None)], ids=["one", "dict", "pair"]
)
def test_what_leaves_a_model_can_be_viewed(pack: Callable[[Tensor], object]) -> None:
    """A loss outside the model (`scores.view(-1)`) is written for the default order."""

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> object:
            return pack(self.convolution(images))

    model = Segmenter()
    change = lay_out_channels_last([model])
    assert change is not None
    images = torch.randn(2, 3, 6, 6)
    expected = model(images)
    change.on()
    torch.testing.assert_close(model(images), expected)
    (scores,) = (x for x in torch.utils._pytree.tree_leaves(model(images)) if x is not None)
    assert scores.view(-1).shape == (2 * 4 * 4 * 4,)


def test_taken_off_an_instance_is_what_it_was() -> None:
    model = cnn()
    before = [dict(module.__dict__) for module in model.modules()]
    change = lay_out_channels_last([model])
    change.on()  # type: ignore[union-attr]
    assert any("forward" in module.__dict__ for module in model.modules())
    change.off()  # type: ignore[union-attr]
    assert [list(module.__dict__) for module in model.modules()] == [list(each) for each in before]
    for module, attributes in zip(model.modules(), before, strict=True):
        assert all(module.__dict__[name] is value for name, value in attributes.items())


def test_a_deep_copy_is_changed_and_independent() -> None:
    model = cnn().eval()
    lay_out_channels_last([model]).on()  # type: ignore[union-attr]
    twin = copy.deepcopy(model)
    images = torch.randn(2, 3, 9, 9)
    expected = model(images)
    assert twin(images).equal(expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert model(images).equal(expected)
    assert twin(images).count_nonzero() == 0


def test_a_pickle_is_the_users_model_and_can_be_changed_again() -> None:
    model = cnn().eval()
    images = torch.randn(2, 3, 9, 9)
    expected = model(images)
    lay_out_channels_last([model]).on()  # type: ignore[union-attr]
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(images).equal(expected)
    change = lay_out_channels_last([loaded])
    assert change is not None and change.note == "channels_last (2 convolutions)"
    change.on()
    torch.testing.assert_close(loaded(images), expected)
    assert in_channels_last(loaded[:7](images))


class Own(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize(
    "other",
    [
        nn.InstanceNorm2d(8),
        nn.LocalResponseNorm(2),
        nn.LazyConv2d(4, 3),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_module_that_would_suffer_keeps_all_in_default_order(other: nn.Module) -> None:
    assert lay_out_channels_last([nn.Sequential(nn.Conv2d(3, 8, 3), other)]) is None


def test_convolutions_with_a_forward_of_their_own_are_left_alone() -> None:
    assert lay_out_channels_last([nn.Sequential(Own(3, 8, 3), nn.Linear(8, 8))]) is None
    replaced = nn.Conv2d(3, 8, 3)
    replaced.forward = lambda images: images  # type: ignore[method-assign]
    assert lay_out_channels_last([replaced]) is None
    change = lay_out_channels_last([nn.Sequential(Own(3, 8, 3), replaced, nn.Conv2d(8, 8, 3))])
    assert change is not None and change.note == "channels_last (1 convolution)"
