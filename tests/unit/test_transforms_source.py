"""A function from its changed source is the user's function in all but the calls; and views."""

from __future__ import annotations

import dis
import importlib.util
import itertools
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parti.engine.transforms.calls import viewed
from parti.engine.transforms.order import reorder_calls
from parti.engine.transforms.source import parsed, recompiled
from parti.engine.tuning import Tuning, change_models

pytestmark = pytest.mark.usefixtures("one_thread")

Import = Callable[[str], ModuleType]


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[Import]:
    """imported(source): a module that is read from a file of its own."""
    names = []

    def load(source: str) -> ModuleType:
        name = f"written_{len(names)}"
        names.append(name)
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def again(function: Callable[..., object]) -> FunctionType:
    """The function, from its own source, unchanged."""
    tree = parsed(function)
    assert tree is not None
    made = recompiled(function, tree, {})
    assert made is not None
    return made


SHIFT = 1


class Rich:
    """Everything that a function carries besides its body."""

    @staticmethod
    def plain() -> int:
        return 1

    def method(
        self,
        a: int,
        b: tuple[int, ...] = (1,),
        /,
        c: float = 2.0,
        *rest: int,
        d: str = "d",
        **more: int,
    ) -> tuple[object, ...]:
        """What it does."""
        total = sum(x + SHIFT for x in (a, *b, *rest))
        text = f"{total:>4}"
        # A line that is not a comment only:
        long = """first
second"""
        # And a comment in the first column.
        with torch.no_grad():
            try:
                total = (lambda: total + 0)() if total else total
            except ValueError as error:
                raise RuntimeError from error
        return total, text, long, c, d, sorted(more)  # fmt: skip


def test_defaults_globals_names_and_strings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    method = vars(Rich)["method"]
    made = again(method)
    for call in ((1,), (1, (2, 3), 4.0, 5, 6)):
        assert made(Rich(), *call, x=1) == method(Rich(), *call, x=1)
    assert made(Rich(), 1, d="e") == method(Rich(), 1, d="e")
    assert made.__defaults__ is method.__defaults__
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__"):
        assert getattr(made, name) == getattr(method, name)
    before = made(Rich(), 1)
    monkeypatch.setitem(globals(), "SHIFT", 10)
    assert made(Rich(), 1) == method(Rich(), 1) != before


def test_what_a_closure_holds_is_shared() -> None:
    count = 0

    def step(self: object, by: int) -> int:
        nonlocal count
        count += by
        return count

    made = again(step)
    assert [made(None, 1), step(None, 2), made(None, 3)] == [1, 3, 6]
    assert count == 6


def test_annotations_of_nested_functions_stay_unevaluated() -> None:
    """As the file says that they are from the future."""

    def outer(self: object) -> int:
        def inner(x: NotAName) -> NotAName:  # type: ignore[name-defined]  # noqa: F821
            return x

        return inner(1)  # type: ignore[no-any-return]

    assert again(outer)(None) == 1


def test_every_statement_keeps_its_line() -> None:
    method = vars(Rich)["method"]
    made = again(method)
    assert made.__code__.co_filename == method.__code__.co_filename
    assert made.__code__.co_firstlineno == method.__code__.co_firstlineno
    assert lines(made.__code__) == lines(method.__code__)


def lines(code: CodeType) -> list[int]:
    """The lines of the code and of what is nested in it, in order."""
    nested = [each for each in code.co_consts if isinstance(each, CodeType)]
    own = [line for line, _ in itertools.groupby(line for _, line in dis.findlinestarts(code))]
    return own + [line for each in nested for line in lines(each)]


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.convolution(images)))
        x = F.relu(x)
        x = self.pool(x)
        return x.flatten(1) @ torch.zeros(7, 7)


def test_a_traceback_through_a_changed_model_shows_the_users_lines() -> None:
    def shown(model: nn.Module) -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            model(torch.randn(2, 1, 12, 12))
        frames = traceback.extract_tb(caught.value.__traceback__)
        return [
            f"{frame.filename}:{frame.lineno}:{frame.colno}-{frame.end_colno} {frame.line}"
            for frame in frames
            if frame.name == "forward"
        ]

    model = Failing()
    before = shown(model)
    made = reorder_calls([model])
    assert made.change is not None
    made.change.on()
    assert shown(model) == before
    assert before[0].endswith("return x.flatten(1) @ torch.zeros(7, 7)")


def generator(self: object) -> Iterator[int]:
    yield 1


async def coroutine(self: object) -> int:
    return 1


decorated = torch.no_grad()(lambda self: 1)


def private(self: Rich) -> int:
    return self.__hidden  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    "function", [generator, coroutine, decorated, private, lambda self: 1, len, torch.relu]
)
def test_what_is_not_a_plain_method_is_refused(function: Callable[..., object]) -> None:
    assert parsed(function) is None


def test_a_function_without_a_file_is_refused() -> None:
    names: dict[str, Callable[..., object]] = {}
    exec("def forward(self, x):\n    return x + 1\n", names)
    assert parsed(names["forward"]) is None


SOURCE = """
    import torch.nn.functional as F
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(1, 2, 3)

        def forward(self, images):
            return F.max_pool2d(F.relu(self.convolution(images)), 2) * 1
    """


@pytest.mark.parametrize(
    ("edit", "expect"),
    [
        (("* 1", "* 1"), True),
        (("* 1", "* 1  # with a remark"), True),
        (("* 1", "* 2"), False),
        (("F.relu(", "F.gelu("), False),
        (("import torch.nn.functional as F", "import torch.nn.functional as F\n"), False),
        (("def forward", "async def forward"), False),
    ],
)
def test_a_file_that_says_something_else_than_what_runs_is_not_believed(
    imported: Import, edit: tuple[str, str], expect: bool
) -> None:
    module = imported(SOURCE)
    path = Path(str(module.__file__))
    path.write_text(path.read_text().replace(*edit))
    assert (reorder_calls([module.Net()]).change is not None) is expect


def test_a_file_that_is_gone_is_not_missed(imported: Import) -> None:
    module = imported(SOURCE)
    Path(str(module.__file__)).unlink()
    assert reorder_calls([module.Net()]).change is None


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_a_view_of_an_image_in_channels_last_has_the_values_of_the_default_order() -> None:
    images = channels_last(2, 3, 4, 5)
    for shape in ((2, -1), (-1,), (2, 3, 20), (6, 20)):
        assert viewed(images, *shape).equal(images.contiguous().view(*shape))
        assert viewed(images, shape).equal(images.contiguous().view(shape))


def test_a_view_that_is_possible_is_one() -> None:
    for images in (channels_last(2, 3, 4, 5), torch.randn(2, 3, 4, 5)):
        view = viewed(images, 2, 3, 4, 5)
        assert view.data_ptr() == images.data_ptr()
    assert viewed(torch.zeros(4), torch.int32).dtype is torch.int32
    assert viewed(np.zeros(4, np.float32), np.int32).dtype == np.int32  # others have views as well


@pytest.mark.parametrize(
    "tensor", [torch.randn(2, 3, 4, 5), torch.randn(4, 6).t(), channels_last(2, 3, 4, 5)]
)
def test_a_view_that_was_impossible_before_stays_so(tensor: Tensor) -> None:
    with pytest.raises(RuntimeError):
        viewed(tensor, 7 if tensor.dim() == 4 else -1)


class Views(nn.Module):
    """A model of the kind that breaks where an image lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.classes = nn.Linear(4 * 4 * 4, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        return self.classes(x.view(x.size(0), -1))


class ViewsInAnotherMethod(Views):
    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.flat(self.convolution(images)))

    def flat(self, x: Tensor) -> Tensor:
        return x.view(size=(len(x), -1)) if self.training else x.view([len(x), -1])


class Flattens(Views):
    def forward(self, images: Tensor) -> Tensor:
        return self.classes(torch.flatten(self.convolution(images), 1))


class Reshapes(Views):
    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        return self.classes(x.reshape(-1, 64) + x.mean((1, 2, 3)).unsqueeze(1) + x.flatten(1))


class WritesInPlace(Views):
    """The view is written to, and what it views is read afterwards."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images) * 1.0
        flat = x.view(x.size(0), -1)
        flat += 1.0
        return self.classes(x.flatten(1))


class WritesByItem(WritesInPlace):
    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images) * 1.0
        flat = x.view(x.size(0), -1)
        flat[:, 0] = 1.0
        return self.classes(x.flatten(1))


class WritesByMethod(WritesInPlace):
    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images) * 1.0
        x.view(x.size(0), -1).clamp_(0.0)
        return self.classes(x.flatten(1))


class LooksAtStrides(Views):
    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images)
        first = x.stride(1) * 3
        return self.classes(torch.as_strided(x, (len(x), 64), (64, 1)) + first)


class ViewsInALambda(Views):
    def forward(self, images: Tensor) -> Tensor:
        return self.classes((lambda x: x.view(len(x), -1))(self.convolution(images)))


class ViewIsALambda(Views):
    forward = lambda self, images: self.classes(  # noqa: E731
        self.convolution(images).view(len(images), -1)
    )


def in_layout(model: nn.Module) -> bool:
    return any(each.note.startswith("channels_last") for each in change_models(Tuning(), [model]))


@pytest.mark.parametrize("kind", [Views, ViewsInAnotherMethod, Flattens, Reshapes])
def test_models_that_view_images_work_in_channels_last(kind: type[nn.Module]) -> None:
    model, images = kind().double(), torch.randn(2, 3, 6, 6).double()
    for training in (True, False):
        model.train(training)
        expected = model(images)
        changes = change_models(Tuning(), [model])
        assert any(each.note.startswith("channels_last") for each in changes)
        torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-11)
        for change in changes:
            change.off()


@pytest.mark.parametrize(
    "kind",
    [
        WritesInPlace, WritesByItem, WritesByMethod, LooksAtStrides, ViewsInALambda, ViewIsALambda,
    ],
)  # fmt: skip
def test_models_that_mind_the_order_keep_the_default_one(kind: type[nn.Module]) -> None:
    model, images = kind(), torch.randn(2, 3, 6, 6)
    expected = model(images)
    assert not in_layout(model)
    assert model(images).equal(expected)


def test_one_model_that_minds_keeps_all_of_them_in_the_default_order() -> None:
    """They may hand images to one another."""
    for models in ([Views(), LooksAtStrides()], [LooksAtStrides(), Views()]):
        assert change_models(Tuning(), models) == ()
