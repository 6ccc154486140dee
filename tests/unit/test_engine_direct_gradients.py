"""Gradients of large linear layers go straight to where the neighbours read them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parti.engine.transforms.direct_gradients import Destinations, homes_of, write_directly

WIDTH = 384  # so many bfloat16 squared are just large enough


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(model: nn.Module) -> nn.Module:
    change = write_directly([model])
    assert change is not None
    change.on()
    return model


def homes(model: nn.Module) -> dict[int, torch.Tensor]:
    parameters = list(model.parameters())
    return homes_of(parameters, [torch.full_like(p, 7.0) for p in parameters])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.small = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.tanh(self.second(F.relu(self.first(x)))))


SHAPES = [(5, WIDTH), (4, 3, WIDTH), (2, 2, 2, WIDTH), (1, WIDTH)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_same_bits_as_linear_at_home(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Model().to(dtype)
    model = changed(copy.deepcopy(plain))
    x = torch.randn(shape, dtype=dtype)
    places = homes(model)
    with Destinations([places]):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for layer in (model.first, model.second):
        assert layer.weight.grad is places[id(layer.weight)]
    assert id(model.small.weight) not in places


def test_without_a_destination_it_is_linear() -> None:
    model = changed(Model())
    model(torch.randn(5, WIDTH)).sum().backward()
    gradient = model.first.weight.grad
    with Destinations([homes(model)]):
        pass
    model.zero_grad()
    model(torch.randn(5, WIDTH)).sum().backward()
    assert gradient is not None
    assert model.first.weight.grad is not None
    assert not (model.first.weight.grad == 7.0).any()


def test_a_layer_that_is_used_twice_adds_up() -> None:
    torch.manual_seed(0)

    def loss(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(torch.tanh(layer(x))).square().sum()

    plain = nn.Linear(WIDTH, WIDTH)
    layer = changed(copy.deepcopy(plain))
    x = torch.randn(6, WIDTH)
    places = homes(layer)
    with Destinations([places]):
        loss(layer, x).backward()
    loss(plain, x).backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
    assert layer.weight.grad is places[id(layer.weight)]


def test_a_weight_tied_to_an_embedding_adds_up() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WIDTH, WIDTH)
            self.output = nn.Linear(WIDTH, WIDTH, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.output(self.embedding(words))

    plain = Tied()
    model = changed(copy.deepcopy(plain))
    words = torch.randint(WIDTH, (9,))
    with Destinations([homes(model)]):
        model(words).square().sum().backward()
    plain(words).square().sum().backward()
    assert torch.equal(model.output.weight.grad, plain.output.weight.grad)  # type: ignore[arg-type]


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a gradient penalty: a backward inside the forward, differentiated again."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).sum() + slope.square().sum()


def _of_weights(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that asks for the gradient of a weight itself."""
    (slope,) = torch.autograd.grad(model(x).sum(), model.first.weight, create_graph=True)
    return model(x).sum() + slope.square().sum()


def _checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(model, x, use_reentrant=False).square().sum()  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("loss", [_penalty, _of_weights, _checkpointed])
def test_losses_that_differentiate_on_their_own(
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = changed(copy.deepcopy(plain))
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    value = loss(model, x)
    with Destinations([homes(model)]):
        value.backward()
    loss(plain, x).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_hook_on_the_weight_still_changes_its_gradient() -> None:
    layer = changed(nn.Linear(WIDTH, WIDTH))
    layer.weight.register_hook(torch.zeros_like)
    with Destinations([homes(layer)]):
        layer(torch.ones(2, WIDTH)).sum().backward()
    assert torch.count_nonzero(layer.weight.grad) == 0  # type: ignore[arg-type]


def test_frozen_weights_and_evaluation_make_no_gradient() -> None:
    layer = changed(nn.Linear(WIDTH, WIDTH))
    layer.weight.requires_grad_(False)
    with Destinations([homes(layer)]):
        layer(torch.ones(2, WIDTH)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    with torch.no_grad():
        assert not layer(torch.ones(2, WIDTH)).requires_grad


def test_autocast_keeps_torchs_own_operator() -> None:
    layer = changed(nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.ones(2, WIDTH))
    assert out.dtype is torch.bfloat16
    places = homes(layer)
    with Destinations([places]):
        out.sum().backward()
    assert layer.weight.grad is not places[id(layer.weight)]
    assert layer.weight.grad is not None


def test_small_layers_and_other_classes_are_left_alone() -> None:
    class Mine(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    assert write_directly([nn.Linear(10, 10), Mine(WIDTH, WIDTH), nn.LazyLinear(WIDTH)]) is None
