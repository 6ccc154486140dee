"""ReLU behind max-pool: the same values, gradients included, and only where nobody could tell.

Which order was computed shows in the graph that autograd keeps: the last operation is the ReLU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parti.engine.transforms.change import Effect
from parti.engine.transforms.order import Reordered, reorder_calls

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INF = float("nan"), float("inf")


def is_exchanged(outputs: Tensor) -> bool:
    assert outputs.grad_fn is not None
    return outputs.grad_fn.name().startswith("Relu")


def values_and_gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    images = images.clone().requires_grad_()
    model.zero_grad()
    outputs = model(images)
    weights = torch.linspace(-1, 2, outputs.numel()).view(outputs.shape)
    (outputs * weights).nansum().backward()
    return [outputs.detach(), images.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def assert_exchanged(model: nn.Module, images: Tensor, expect: bool = True) -> Reordered:
    """The model does the same before and after, to the last bit, in the order that is expected."""
    before = values_and_gradients(model, images)
    made = reorder_calls([model], images=False)
    if made.change is not None:
        assert made.change.effect is Effect.EQUAL
        made.change.on()
    after = values_and_gradients(model, images)
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert is_exchanged(model(images.clone().requires_grad_())) is expect
    return made


def hostile(*shape: int) -> Tensor:
    """Ties, windows without a positive number, infinities and a NaN."""
    torch.manual_seed(0)
    images = torch.randint(-3, 2, shape).float()
    images.view(-1)[::7] = 0.0
    images.view(-1)[3::11] = torch.tensor([INF, -INF, -0.0]).repeat(images.numel())[
        : images.view(-1)[3::11].numel()
    ]
    images.view(-1)[5] = NAN
    return images


POOLS = {
    "plain": (nn.MaxPool2d(2), (2, 3, 8, 9)),
    "overlapping": (nn.MaxPool2d(3, 2, padding=1), (2, 3, 8, 9)),
    "dilated": (nn.MaxPool2d(2, 1, dilation=2), (2, 3, 8, 9)),
    "ceil": (nn.MaxPool2d((2, 3), ceil_mode=True), (2, 3, 7, 8)),
    "one dimension": (nn.MaxPool1d(2), (2, 3, 9)),
    "no batch": (nn.MaxPool2d(2), (3, 8, 9)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", list(POOLS))
def test_neighbours_in_a_sequential_are_exchanged(name: str, layout: torch.memory_format) -> None:
    pool, shape = POOLS[name]
    images = hostile(*shape)
    if images.dim() == 4:
        images = images.to(memory_format=layout)
    made = assert_exchanged(nn.Sequential(nn.ReLU(), pool), images)
    assert made.change is not None and made.change.note == "ReLU behind max-pool (1)"


def test_every_pair_of_a_deep_model_is_counted() -> None:
    block = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU(), nn.Tanh())
    made = assert_exchanged(
        nn.Sequential(block, nn.ReLU(), nn.MaxPool2d(2), block), torch.randn(2, 3, 20, 20), False
    )
    assert made.change is not None and made.change.note == "ReLU behind max-pool (2)"


class Loud(nn.ReLU):
    """Anybody's subclass may do something else."""


@pytest.mark.parametrize(
    ("modules", "expect"),
    [
        ([nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)], True),
        ([nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)], True),
        ([nn.Identity(), nn.ReLU(inplace=True), nn.MaxPool2d(2)], False),
        ([nn.Conv2d(3, 3, 1), Loud(), nn.MaxPool2d(2)], False),
        ([nn.Conv2d(3, 3, 1), nn.LeakyReLU(), nn.MaxPool2d(2)], False),
        ([nn.Conv2d(3, 3, 1), nn.ReLU(), nn.AvgPool2d(2)], False),
        ([nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Identity(), nn.MaxPool2d(2)], False),
    ],
    ids=lambda each: "-".join(type(m).__name__ for m in each) if isinstance(each, list) else "",
)
def test_only_what_is_known_is_exchanged(modules: list[nn.Module], expect: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), *modules)
    assert_exchanged(model, torch.randn(2, 3, 8, 8), expect)


def test_an_in_place_relu_still_writes_to_a_tensor_that_others_hold() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
    assert reorder_calls([model]).change is None
    held = torch.randn(1, 1, 4, 4)
    model(held)
    assert held.min() == 0


def test_indices_are_those_behind_the_relu() -> None:
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    assert reorder_calls([model]).change is None


Watch = Callable[[nn.Sequential], object]
WATCHES: dict[str, Watch] = {
    "hook on the relu": lambda m: m[1].register_forward_hook(lambda *_: None),
    "hook before the relu": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
    "hook on the pool": lambda m: m[2].register_full_backward_hook(lambda *_: None),
    "hook before the pool": lambda m: m[2].register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("watch", list(WATCHES))
def test_whoever_listens_between_the_two_hears_what_they_would(watch: str, when: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.MaxPool2d(2))
    if when == "before":
        WATCHES[watch](model)
        assert reorder_calls([model]).change is None
        return
    made = reorder_calls([model])
    made.change.on()  # type: ignore[union-attr]
    images = torch.randn(2, 3, 8, 8)
    assert is_exchanged(model(images))
    WATCHES[watch](model)
    heard: list[bool] = []
    model[1].register_forward_hook(lambda _, __, out: heard.append(out.shape == (2, 3, 8, 8)))
    model(images)
    assert heard == [True]


def test_an_in_place_relu_behind_a_watched_convolution_stays_where_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda _, __, out: kept.append(out))
    assert reorder_calls([model]).change is None
    model(torch.randn(2, 3, 8, 8))
    assert kept[0].min() == 0


class Nested(nn.Module):
    """The usual way to write it; what tests below change is its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.pools = nn.ModuleList([nn.MaxPool2d(2)])
        self.scale = 2.0

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.relu(self.convolution(images)))


class Functions(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(torch.relu(self.convolution(images)), 2, stride=(1, 2))


class InLines(Nested):
    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        x = F.relu(x)
        x = self.pool(x)
        return x


class InLinesInPlace(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        x = self.relu(x)
        x = self.pool(x)
        return x


class InBlocks(Nested):
    def forward(self, images: Tensor) -> Tensor:
        for _ in range(1):
            if self.scale:
                try:
                    x = F.relu(self.convolution(images))
                    x = self.pool(x)
                finally:
                    pass
        return x


class InAComprehension(Nested):
    def forward(self, images: Tensor) -> Tensor:
        (x,) = [self.pool(F.relu(x)) for x in (self.convolution(images),)]
        return x


class InAnotherMethod(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return self.encode(images)

    def encode(self, images: Tensor) -> Tensor:
        super().extra_repr()  # needs the cell of the class
        return self.pool(F.relu(self.convolution(images)))


class Inherited(InLines):
    pass


class BorrowedFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)


def borrowed(self: BorrowedFunction, images: Tensor) -> Tensor:
    return self.pool(F.relu(self.convolution(images)))


BorrowedFunction.forward = borrowed  # type: ignore[attr-defined]


def neighbours() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))


UNDERSTOOD = (
    neighbours, Nested, Functions, InLines, InLinesInPlace, InBlocks, InAComprehension,
    InAnotherMethod, Inherited, BorrowedFunction,
)  # fmt: skip


@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_calls_in_a_users_methods_are_exchanged(kind: Callable[[], nn.Module]) -> None:
    made = assert_exchanged(kind(), hostile(2, 3, 10, 10))
    assert made.change is not None and made.change.note == "ReLU behind max-pool (1)"


@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_a_changed_model_is_copied_and_pickled(kind: Callable[[], nn.Module]) -> None:
    model, images = kind(), torch.randn(2, 3, 10, 10)
    keys = list(model.state_dict())
    expected = model(images)
    reorder_calls([model]).change.on()  # type: ignore[union-attr]
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (model, twin, loaded):
        assert each(images).equal(expected)
        assert list(each.state_dict()) == keys
    assert [is_exchanged(each(images)) for each in (model, twin, loaded)] == [True, True, False]
    assert reorder_calls([loaded]).change is not None


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


class Decorated(Nested):
    @decorated
    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.relu(self.convolution(images)))


class Lambda(Nested):
    forward = lambda self, images: self.pool(self.relu(self.convolution(images)))  # noqa: E731


class PrivateName(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.relu(self.__made(images)))

    def __made(self, images: Tensor) -> Tensor:
        return self.convolution(images)


class AnotherFunction(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return self.pool(F.gelu(self.convolution(images)))


class OfASubclass(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.relu = Loud()


class OtherOperand(Nested):
    def forward(self, images: Tensor) -> Tensor:
        y = self.convolution(images)
        x = F.relu(y)
        x = self.pool(y)
        return x


class OtherNames(Nested):
    def forward(self, images: Tensor) -> Tensor:
        y = self.convolution(images)
        x = self.relu(y)
        z = self.pool(x)
        return z + x.mean() * 0


class ToldAtRunTime(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.convolution(images)), int(self.scale))


class Spread(Nested):
    def forward(self, images: Tensor) -> Tensor:
        sizes = {"kernel_size": 2}
        return F.max_pool2d(F.relu(self.convolution(images)), **sizes)


class WithIndices(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.convolution(images)), 2, return_indices=True)[0]


class WithIndicesByPlace(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.convolution(images)), 2, 2, 0, 1, False, True)[0]


class InPlace(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return self.pool(F.relu(self.convolution(images), inplace=True))


class HeldInPlace(InLinesInPlace):
    def forward(self, images: Tensor) -> Tensor:
        held = self.convolution(images)
        x = self.pool(self.relu(held))
        return x + held.mean() - held.mean()


class HeldInPlaceInLines(InLinesInPlace):
    def forward(self, images: Tensor) -> Tensor:
        x = held = self.convolution(images)
        x = self.relu(x)
        x = self.pool(x)
        return x + held.mean() - held.mean()


class SomethingBetween(Nested):
    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.convolution(images))
        self.seen = x.shape
        x = self.pool(x)
        return x


class InALambda(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return (lambda x: self.pool(F.relu(x)))(self.convolution(images))


class InAFunction(Nested):
    def forward(self, images: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.pool(F.relu(x))

        return inner(self.convolution(images))


class Generator(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return next(self.each(images))

    def each(self, images: Tensor) -> Iterator[Tensor]:
        yield self.pool(F.relu(self.convolution(images)))


class OnlyByPlace(Nested):
    def forward(self, /, images: Tensor) -> Tensor:
        return self.pool(F.relu(self.convolution(images)))


class Subscript(Nested):
    def forward(self, images: Tensor) -> Tensor:
        return self.pools[0](F.relu(self.convolution(images)))


@pytest.mark.parametrize(
    "kind",
    [
        Decorated, Lambda, PrivateName, AnotherFunction, OfASubclass, OtherOperand, OtherNames,
        ToldAtRunTime, Spread, InPlace, HeldInPlace, HeldInPlaceInLines, SomethingBetween,
        InALambda, InAFunction, Generator, OnlyByPlace, Subscript,
    ],
)  # fmt: skip
def test_what_is_not_understood_is_left_alone(kind: type[nn.Module]) -> None:
    made = assert_exchanged(kind(), torch.randn(2, 3, 10, 10), False)
    assert made.change is None


@pytest.mark.parametrize("kind", [WithIndices, WithIndicesByPlace])
def test_indices_asked_for_at_the_call_are_those_behind_the_relu(kind: type[nn.Module]) -> None:
    assert_exchanged(kind(), torch.randn(2, 3, 10, 10), False)


class HeldInPlaceAsOne(InLinesInPlace):
    """The value of a ReLU in place is the tensor that somebody holds."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        self.held = x
        x = self.relu(x)
        x = self.pool(x)
        return x


def test_a_held_tensor_is_overwritten_as_it_would_be() -> None:
    model = HeldInPlaceAsOne()
    made = reorder_calls([model])
    if made.change is not None:
        made.change.on()
    model(torch.randn(2, 3, 10, 10))
    assert model.held.min() == 0


def test_parts_that_are_replaced_later_are_followed() -> None:
    model, images = Nested(), torch.randn(2, 3, 10, 10)
    reorder_calls([model]).change.on()  # type: ignore[union-attr]
    model.pool = nn.AvgPool2d(2)
    assert model(images).equal(F.avg_pool2d(F.relu(model.convolution(images)), 2))
    model.pool = nn.MaxPool2d(3)
    assert is_exchanged(model(images))
    model.relu = nn.Tanh()
    assert model(images).equal(F.max_pool2d(torch.tanh(model.convolution(images)), 3))
    model.relu = nn.ReLU(inplace=True)
    assert is_exchanged(model(images))
    model.convolution = nn.Identity()  # its output is the caller's
    assert not is_exchanged(model(images.clone().requires_grad_() * 1.0))


def test_parts_of_a_sequential_that_are_replaced_later_are_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    images = torch.randn(2, 3, 10, 10)
    reorder_calls([model]).change.on()  # type: ignore[union-attr]
    model[2] = nn.AvgPool2d(2)
    assert model(images).equal(F.avg_pool2d(F.relu(model[0](images)), 2))
    model.append(nn.Flatten())
    assert model(images).dim() == 2


class ByMode(Nested):
    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.convolution(images)))
        return x * self.scale if self.training else x


def test_the_training_mode_and_numbers_of_the_module_are_followed() -> None:
    model, images = ByMode(), torch.randn(2, 3, 10, 10)
    reorder_calls([model]).change.on()  # type: ignore[union-attr]
    plain = model.eval()(images)
    assert model.train()(images).equal(plain * 2)
    model.scale = 3.0
    assert model(images).equal(plain * 3)
