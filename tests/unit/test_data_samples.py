"""Data sets read sample by sample, and tables: seeding, bulk, errors that name the sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from parti.data.batches import Feed
from parti.errors import DataError


class Noisy(Dataset[Any]):
    """Each sample carries its index and a draw from each of the three generators."""

    def __init__(self, length: int = 40) -> None:
        self.length = length
        self.initial_seeds: dict[int, int] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.initial_seeds[index] = torch.initial_seed()
        draws = [torch.rand(()).item(), random.random(), np.random.rand()]
        return index, torch.tensor(draws, dtype=torch.float64)


class Bulk(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [self[index] for index in indices]


def noise(data: Any, *, owned: Callable[[int], Sequence[int]] = range, **settings: Any) -> Any:
    """What was drawn for each sample and epoch."""
    settings = {"batch_size": 16, "micro_batches": 4, **settings}
    found = {}
    for batch in Feed(data, owned=owned, **settings):
        for piece in batch.micro_batches:
            indices, draws = piece.data
            for index, numbers in zip(indices.tolist(), draws.tolist(), strict=True):
                found[batch.epoch, index] = tuple(numbers)
    return found


def test_randomness_is_the_sample_s_own() -> None:
    reference = noise(Noisy(), epochs=2)
    assert len(reference) == 80
    assert len({draw for draws in reference.values() for draw in draws}) == 240
    in_order = noise(Noisy(), epochs=2, shuffle=False, batch_size=5, micro_batches=1)
    assert in_order == reference
    by_rank = [
        noise(Noisy(), epochs=2, owned=lambda active, r=r: [i for i in range(active) if i % 3 == r])
        for r in range(3)
    ]
    assert {key: value for part in by_rank for key, value in part.items()} == reference
    assert noise(Noisy(), epochs=2, seed=1)[0, 0] != reference[0, 0]


def test_a_generator_of_one_s_own_can_be_made_from_the_initial_seed() -> None:
    one, other = Noisy(), Noisy()
    noise(one)
    noise(other, shuffle=False)
    assert one.initial_seeds == other.initial_seeds
    assert len(set(one.initial_seeds.values())) == 40


def test_bulk_reads_a_micro_batch_at_a_time_the_same_on_any_rank() -> None:
    data = Bulk()
    reference = noise(data)
    assert [len(call) for call in data.calls] == [4] * 8 + [2] * 4
    assert noise(Bulk(), owned=lambda active: range(2, active)).items() <= reference.items()


def test_torch_s_wrappers_read_one_by_one_unless_what_they_wrap_reads_in_bulk() -> None:
    reference = noise(Noisy())
    assert noise(Subset(Noisy(), range(40))) == reference
    assert noise(ConcatDataset([Noisy(30), Noisy(10)])).keys() == {(0, i) for i in range(30)}
    bulk = Bulk()
    noise(Subset(bulk, range(40)))
    assert len(bulk.calls) == 12


def test_a_collate_function_draws_the_same_for_a_micro_batch() -> None:
    def mix_up(samples: Sequence[Any]) -> tuple[list[int], float]:
        return [index for index, _ in samples], torch.rand(()).item() + random.random()

    def weights(owned: Callable[[int], Sequence[int]]) -> dict[tuple[int, ...], float]:
        feed = Feed(Noisy(), batch_size=16, micro_batches=4, collate=mix_up, owned=owned)
        pairs = [piece.data for batch in feed for piece in batch.micro_batches]
        return {tuple(indices): weight for indices, weight in pairs}

    reference = weights(range)
    assert len(set(reference.values())) == 12
    assert weights(lambda active: range(active // 2, active)).items() <= reference.items()


def test_lists_and_ranges_are_data_sets() -> None:
    samples = [(float(i), f"name {i}") for i in range(7)]
    (batch,) = Feed(samples, batch_size=7, micro_batches=1, owned=range, shuffle=False)
    numbers, names = batch.micro_batches[0].data
    assert numbers.tolist() == [i for i, _ in samples]
    assert names == [name for _, name in samples]
    (batch,) = Feed(range(5, 9), batch_size=4, micro_batches=1, owned=range, shuffle=False)
    assert batch.micro_batches[0].data.tolist() == [5, 6, 7, 8]


def test_an_error_names_the_sample() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise KeyError("mask")
            return index

    with pytest.raises(
        DataError, match="reading sample 17 of epoch 0 failed: KeyError: 'mask'"
    ) as e:
        list(Feed(Broken(), batch_size=8, owned=range))
    assert isinstance(e.value.__cause__, KeyError)


def test_an_error_in_bulk_names_the_samples() -> None:
    class Broken(Bulk):
        def __getitems__(self, indices: list[int]) -> Any:
            raise OSError("no such file")

    class Short(Bulk):
        def __getitems__(self, indices: list[int]) -> Any:
            return super().__getitems__(indices[1:])

    feed = Feed(Broken(), batch_size=10, micro_batches=1, owned=range, shuffle=False)
    with pytest.raises(
        DataError, match=r"reading samples 0, 1, 2, 3, 4, 5, 6, 7 … of epoch 0 failed"
    ):
        next(iter(feed))
    with pytest.raises(DataError, match="__getitems__ of Short returned 9 samples for 10 indices"):
        next(iter(Feed(Short(), batch_size=10, micro_batches=1, owned=range)))


def test_an_error_in_collate_names_the_samples() -> None:
    def broken(samples: Sequence[Any]) -> Any:
        raise ZeroDivisionError("by zero")

    feed = Feed(Noisy(), batch_size=3, owned=range, shuffle=False, collate=broken)
    expected = "putting samples 0, 1, 2 together failed: ZeroDivisionError: by zero"
    with pytest.raises(DataError, match=expected):
        next(iter(feed))
    ragged = [(torch.ones(size), size) for size in (2, 3, 2, 3, 4)]
    feed = Feed(ragged, batch_size=5, micro_batches=1, owned=range, shuffle=False)
    with pytest.raises(DataError, match=r"3 shapes in one micro-batch.*\(samples 0, 1, 2, 3, 4\)"):
        next(iter(feed))


class Table:
    """As `datasets.Dataset` looks from outside."""

    column_names = ("id", "x")

    def __init__(self, rows: dict[str, Any]) -> None:
        self.rows = rows
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return len(self.rows["id"])

    def __getitem__(self, key: list[int]) -> Any:
        self.asked.append(key)
        return {name: [values[i] for i in key] for name, values in self.rows.items()}

    def __getitems__(self, keys: list[int]) -> Any:
        columns = self[keys]
        return [{name: columns[name][i] for name in columns} for i in range(len(keys))]

    def with_format(self, kind: str) -> Table:
        return self


ROWS = {
    "id": list(range(10)),
    "x": [[i + 0.5, float(i)] for i in range(10)],
    "text": [f"t{i}" for i in range(10)],
    "flag": [i % 2 == 0 for i in range(10)],
}


def test_a_table_is_read_in_columns() -> None:
    table = Table(ROWS)
    feed = Feed(table, batch_size=4, micro_batches=2, owned=range, shuffle=False)
    first = next(iter(feed)).micro_batches[1].data
    assert table.asked == [[0, 1], [2, 3]]
    assert first["id"].tolist() == [2, 3]
    assert first["x"].dtype == torch.float32
    assert first["x"].tolist() == [[2.5, 2.0], [3.5, 3.0]]
    assert first["text"] == ["t2", "t3"]
    assert first["flag"].tolist() == [True, False]


def test_a_table_gives_rows_to_a_collate_function() -> None:
    feed = Feed(
        Table(ROWS), batch_size=4, micro_batches=1, owned=range, shuffle=False, collate=list
    )
    first = next(iter(feed)).micro_batches[0].data
    assert [row["text"] for row in first] == ["t0", "t1", "t2", "t3"]


def test_tables_that_cannot_be_batches() -> None:
    ragged = Table({"id": [1, 2], "x": [[1, 2], [3]]})
    with pytest.raises(DataError, match="column 'x' holds rows of different lengths"):
        next(iter(Feed(ragged, batch_size=2, owned=range)))
    with pytest.raises(DataError, match="the splits 'train', 'test'; pass one of them"):
        Feed({"train": ragged, "test": ragged}, batch_size=2, owned=range)

    class Arrow(Table):
        def __getitem__(self, key: list[int]) -> Any:
            return [key]

    with pytest.raises(DataError, match=r'with_format\("torch"\)'):
        next(iter(Feed(Arrow(ROWS), batch_size=2, owned=range)))
