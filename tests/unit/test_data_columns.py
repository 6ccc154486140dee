"""Data in memory: the structures it comes in, what is copied and what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, random_split

from parti.data.batches import Feed

X = torch.arange(24.0).reshape(12, 2)
Y = torch.arange(12)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Holder:
    tensors = (X, Y)


def pieces(data: Any, **settings: Any) -> list[Any]:
    settings = {"batch_size": 6, "micro_batches": 2, "shuffle": False, **settings}
    return [p.data for b in Feed(data, owned=range, **settings) for p in b.micro_batches]


def leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if dataclasses.is_dataclass(data):
        data = (data.x, data.y)
    parts = data.values() if isinstance(data, dict) else data
    return [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ((X, Y), tuple),
        ([X, Y], list),
        ({"x": X, "y": Y}, dict),
        (Pair(X, Y), Pair),
        (Record(X, Y), Record),
        ((X.numpy(), Y.numpy()), tuple),
        ((X, Y.tolist()), tuple),
        (TensorDataset(X, Y), tuple),
        (Holder(), tuple),
        (({"x": X}, Y), tuple),
        (((X, Y), {"a": [Y, X]}), tuple),
    ],
)
def test_structures_come_out_as_they_went_in(data: Any, kind: type, shuffle: bool) -> None:
    got = pieces(data, shuffle=shuffle)
    assert [type(piece) for piece in got] == [kind] * 4
    for piece in got:
        values = leaves(piece)
        rows = next(v for v in values if v.dtype == torch.int64)
        for value in values:
            assert torch.equal(value, Y[rows] if value.dim() == 1 else X[rows])
    assert isinstance(pieces(X)[0], torch.Tensor)


def test_nested_structures_keep_their_nesting() -> None:
    piece = pieces(((X, Y), {"a": [Y, (X,)]}))[1]
    assert [type(part) for part in piece] == [tuple, dict]
    assert type(piece[1]["a"]) is list
    assert torch.equal(piece[1]["a"][1][0], X[3:6])


def test_in_order_nothing_is_copied() -> None:
    images, labels = pieces((X.numpy(), Y))[3]
    assert images.data_ptr() == X[9:].data_ptr()
    assert labels.data_ptr() == Y[9:].data_ptr()


def test_shuffled_rows_are_fresh() -> None:
    (piece, *_) = pieces(X, shuffle=True)
    before = X.clone()
    piece.zero_()
    assert torch.equal(X, before)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_model_that_works_in_place_ties_no_graphs_together(shuffle: bool) -> None:
    data = X.clone()
    weight = torch.ones(2, requires_grad=True)
    for piece in pieces(data, shuffle=shuffle):
        piece.mul_(weight)
        piece.sum().backward()  # would go through the graph before it, which is gone
    assert not data.requires_grad
    assert weight.grad is not None


def test_a_tensor_with_a_history_is_taken_without_it() -> None:
    scaled = X.clone().requires_grad_() * 2
    assert not any(piece.requires_grad for piece in pieces(scaled, shuffle=True))


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_that_torch_cannot_share(shuffle: bool, tmp_path: Path) -> None:
    expected = [piece.tolist() for piece in pieces(X, shuffle=shuffle)]
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    foreign = X.numpy().astype(">f4")
    backwards = X.numpy()[::-1].copy()[::-1]
    for array in (mapped, foreign, backwards):
        got = pieces(array, shuffle=shuffle)
        assert [piece.tolist() for piece in got] == expected
        assert {piece.dtype for piece in got} == {torch.float32}
        got[0].zero_()  # ours, not the file's
    assert mapped[0].tolist() == X[0].tolist()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.uint16]
)
def test_types_are_kept(dtype: torch.dtype) -> None:
    data = Y.to(dtype)
    for shuffle in (False, True):
        assert {piece.dtype for piece in pieces(data, shuffle=shuffle)} == {dtype}


def test_subsets_pick_rows_in_bulk() -> None:
    rows = [11, 3, 5, 7, 0, 2]
    subset = Subset(TensorDataset(X, Y), rows)
    assert torch.cat([y for _, y in pieces(subset)]).tolist() == rows
    of_subset = Subset(subset, [1, 2, 3])
    assert torch.cat([y for _, y in pieces(of_subset)]).tolist() == [3, 5, 7]
    parts = random_split(TensorDataset(X, Y), [8, 4], generator=torch.Generator())
    seen = [y for part in parts for _, y in pieces(part, shuffle=True)]
    assert torch.cat(seen).sort().values.tolist() == Y.tolist()


def test_a_tensor_data_set_that_reads_its_own_way_is_asked() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    for data in (Doubled(X, Y), Subset(Doubled(X, Y), range(12))):
        assert torch.equal(torch.cat([x for x, _ in pieces(data)]), 2 * X)


def test_collate_is_given_samples_of_the_columns() -> None:
    def collate(samples: Any) -> Any:
        return [(x.tolist(), int(y)) for x, y in samples]

    got = pieces((X, Y), collate=collate)
    assert got[1] == [([6.0, 7.0], 3), ([8.0, 9.0], 4), ([10.0, 11.0], 5)]


def test_a_list_of_samples_with_collate() -> None:
    samples = [torch.ones(size) for size in (1, 3, 2)]

    def pad(samples: Any) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    (piece,) = pieces(samples, batch_size=3, micro_batches=1, collate=pad)
    assert piece.shape == (3, 3)
