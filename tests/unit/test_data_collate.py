"""Putting samples together: torch's rules, and errors that name the field."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from parti.data.collate import collate
from parti.errors import DataError

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    x: int
    name: str


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.zeros(2)],
        [np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)],
        [np.float32(1), np.float32(2)],
        [np.int16(1), np.int16(2)],
        [1.5, 2.0],
        [1, 2],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [{"x": 1, "y": torch.ones(1)}, {"y": torch.zeros(1), "x": 2}],
        [(1, torch.ones(2)), (2, torch.zeros(2))],
        [[1, 2.0], [3, 4.0]],
        [Point(1, {"a": 2}), Point(3, {"a": 4})],
        [(1, (2, [3])), (4, (5, [6]))],
    ],
)
def test_as_torch_does(samples: list[Any]) -> None:
    assert same(collate(samples), default_collate(samples))


def test_containers_keep_their_kind() -> None:
    assert type(collate([(1, 2), (3, 4)])) is tuple
    assert type(collate([[1, 2], [3, 4]])) is list
    assert type(collate([Point(1, 2), Point(3, 4)])) is Point
    assert type(collate([OrderedDict(a=1), OrderedDict(a=2)])) is OrderedDict
    record = collate([Record(1, "a"), Record(2, "b")])
    assert record.x.tolist() == [1, 2]
    assert record.name == ["a", "b"]


def test_read_only_arrays_are_read() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    assert collate([array, array]).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([None, None], "a sample is a builtins.NoneType, which cannot be put into a batch"),
        ([{"a": object()}], r"field \['a'\] of a sample is a builtins.object"),
        ([(1, None), (1, 2)], r"field \[1\] of a sample is a NoneType in one sample and a int"),
        ([torch.ones(1), np.ones(1)], "is a Tensor in one sample and a ndarray in another"),
        ([(torch.ones(2),), (torch.ones(3),)], r"field \[0\].* among them \(2,\) and \(3,\)"),
        ([np.ones(2), np.ones(3)], r"among them \(2,\) and \(3,\)"),
        ([[1], [1, 2]], "has from 1 to 2 items"),
        ([{"a": 1}, {"b": 1}], r"has the keys \['a'\] in one sample and \['b'\]"),
        ([np.array(["x"])], "an array of type <U1, which torch does not hold"),
    ],
)
def test_what_cannot_be_put_together(samples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate(samples)
