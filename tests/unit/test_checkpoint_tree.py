"""Taking a state apart and putting it together again: exact to the bit."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parti.checkpoint import plain
from parti.checkpoint.tree import join, split
from parti.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["$x", "a.b"])
keys = texts | st.integers()
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**63 - 1, max_value=2**70)
    | st.floats()
    | texts
    | st.binary(max_size=5)
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 3)])
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


trees = st.recursive(
    leaves | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(0, 3), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """A value that is equal only to those of the same types with the same bits."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return kind, value.dtype, value.shape, content
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, dict):
        return kind, [(bits(key), bits(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return kind, [bits(inner) for inner in value]
    return kind, value


def through_json(structure: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(structure))


@given(trees)
def test_join_is_the_inverse_of_split(tree: Any) -> None:
    found = split(tree)
    assert bits(join(through_json(found.structure), found.tensors)) == bits(tree)


@given(trees)
def test_no_two_tensors_have_one_name(tree: Any) -> None:
    found = split(tree)
    assert "__metadata__" not in found.tensors
    assert not found.ties.keys() & found.tensors.keys()
    for name in found.tensors:
        assert name.encode().decode() == name


def test_names_say_where_a_tensor_is() -> None:
    model = nn.Sequential(OrderedDict(conv1=nn.Conv2d(1, 2, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1, 3, 3)).sum().backward()
    optimizer.step()
    found = split({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert list(found.tensors) == [
        "model.conv1.weight", "model.conv1.bias",
        "optimizer.state.0.step", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq",
        "optimizer.state.1.step", "optimizer.state.1.exp_avg", "optimizer.state.1.exp_avg_sq",
    ]  # fmt: skip


def test_equal_ways_get_different_names() -> None:
    one, two, three = torch.ones(1), torch.zeros(1), torch.full((1,), 3.0)
    tree = {"a": {0: one, "0": two}, "a.0": three, "__metadata__": torch.ones(2)}
    found = split(tree)
    assert list(found.tensors) == ["a.0", "a.0#2", "a.0#3", "__metadata__#2"]
    assert bits(join(found.structure, found.tensors)) == bits(tree)


def test_tied_tensors_are_held_once_and_come_back_as_one() -> None:
    shared = nn.Parameter(torch.randn(3, 4))
    tree = {"in": shared, "out": [shared.data, shared.t()]}
    found = split(tree)
    assert list(found.tensors) == ["in", "out.1"]  # the transpose shares memory, but not its shape
    assert found.ties == {"out.0": "in"}
    joined = join(found.structure, found.tensors)
    assert joined["in"] is joined["out"][0]
    assert torch.equal(joined["out"][1], shared.t())


def test_empty_tensors_are_not_tied() -> None:
    found = split({"a": torch.empty(0), "b": torch.empty(0)})
    assert list(found.tensors) == ["a", "b"]


def test_versions_of_a_models_state_survive() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    joined = join(through_json(split(state).structure), split(state).tensors)
    assert isinstance(joined, OrderedDict)
    assert joined._metadata == state._metadata  # type: ignore[attr-defined]
    nn.BatchNorm1d(2).load_state_dict(joined)


def test_entries_without_a_tensor_are_left_out() -> None:
    tree = {"model": {"w": torch.ones(1)}, "list": [torch.zeros(1), 5], "step": 3}
    found = split(tree)
    assert join(found.structure, {}) == {"model": {}, "list": [None, 5], "step": 3}


def test_the_structure_shares_nothing_with_the_state() -> None:
    inner = [1, 2]
    found = split({"a": inner, "b": {"c": inner}})
    inner.append(3)
    assert join(found.structure, {}) == {"a": [1, 2], "b": {"c": [1, 2]}}


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (np.float64(1.0), "numpy.float64"),
        (np.ones(2), "numpy.ndarray"),
        (Point(1, 2), "Point"),
        (defaultdict(int), "collections.defaultdict"),
        ({1, 2}, "builtins.set"),
        (len, "builtin_function_or_method"),
        (1j, "builtins.complex"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        split({"callbacks": [None, {"best": value}]})
    assert "callbacks.1.best is a " in str(caught.value)
    assert kind in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on the meta device"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_values_are_refused(tensor: torch.Tensor, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"model.w is a tensor {problem}"):
        split({"model": {"w": tensor}})


def test_subclasses_of_tensors_are_refused() -> None:
    class Mine(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="Mine"):
        split({"w": torch.ones(2).as_subclass(Mine)})


@given(trees)
def test_facts_hold_no_tensors(tree: Any) -> None:
    try:
        form = plain.encode(tree)
    except CheckpointError:
        return
    assert bits(plain.decode(through_json(form))) == bits(tree)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'\$picture' is no form"):
        join({"a": {"$picture": 1}}, {})
