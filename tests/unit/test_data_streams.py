"""Streams: sharded by position, the last batch known ahead, read once or anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.data.streams import ReadyBatches
from parti.errors import ConfigError, DataError


def count_to(n: int) -> Callable[[], Iterator[int]]:
    return lambda: iter(range(n))


def facts(batch: Batch) -> tuple[int, int, int, int, bool]:
    return (
        batch.epoch,
        batch.step_in_epoch,
        batch.num_samples,
        batch.num_micro_batches,
        batch.is_last_of_epoch,
    )


@settings(max_examples=30)
@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    start=st.integers(0, 2),
)
def test_same_steps_as_data_of_known_length(
    n: int, batch_size: int, world_size: int, drop_last: bool, start: int
) -> None:
    if drop_last and batch_size > n:
        return
    choices: dict[str, Any] = {
        "batch_size": batch_size,
        "micro_batches": min(3, batch_size),
        "epochs": 2,
        "drop_last": drop_last,
    }
    steps = n // batch_size if drop_last else -(-n // batch_size)
    choices["start"] = Position(epoch=start // 2, step_in_epoch=min(start, steps))
    known = Feed(torch.arange(n), shuffle=False, owned=range, **choices)
    expected = [(facts(b), {p.number: p.data.tolist() for p in b.micro_batches}) for b in known]
    feeds = [
        Feed(count_to(n), owned=lambda active, r=r: range(active)[r::world_size], **choices)
        for r in range(world_size)
    ]
    got = []
    for batches in zip(*feeds, strict=True):
        assert len({facts(batch) for batch in batches}) == 1
        pieces = {p.number: p.data.tolist() for b in batches for p in b.micro_batches}
        got.append((facts(batches[0]), dict(sorted(pieces.items()))))
    assert got == expected


def test_a_stream_has_no_length() -> None:
    feed = Feed(count_to(5), batch_size=2, owned=range)
    assert (feed.num_samples, feed.steps_per_epoch, feed.num_steps) == (None, None, None)
    with pytest.raises(TypeError, match="not known before it has been read"):
        len(feed)


def test_an_endless_stream_is_read_as_far_as_needed() -> None:
    read = []

    def endless() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            yield number

    feed = Feed(endless, batch_size=4, owned=range)
    steps = [batch.step_in_epoch for batch in itertools.islice(feed, 3)]
    assert steps == [0, 1, 2]
    assert len(read) == 13  # one ahead, to see whether the batch is the last


class Numbers(IterableDataset[Any]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield number, random.random(), torch.rand(())


def test_an_iterable_data_set_is_told_the_epoch() -> None:
    data = Numbers()
    list(Feed(data, batch_size=4, epochs=3, start=Position(epoch=1), owned=range))
    assert data.epochs == [1, 2]


def test_randomness_inside_a_stream_is_its_own() -> None:
    def draws(share: slice, batch_size: int, model_draws: int) -> dict[tuple[int, int], Any]:
        found = {}
        for batch in Feed(
            Numbers(),
            batch_size=batch_size,
            micro_batches=2,
            epochs=2,
            owned=lambda n: range(n)[share],
        ):
            for piece in batch.micro_batches:
                columns = [column.tolist() for column in piece.data]
                for number, *drawn in zip(*columns, strict=True):
                    found[batch.epoch, number] = drawn
            torch.rand(model_draws)
            random.random()
        return found

    reference = draws(slice(None), 4, 0)
    assert len({value for drawn in reference.values() for value in drawn}) == 40
    assert draws(slice(None), 3, 7) == reference
    assert draws(slice(1, None), 4, 2).items() < reference.items()


def test_a_generator_can_be_read_once() -> None:
    with pytest.raises(ConfigError, match="epochs=2, but a generator can be read only once"):
        Feed((i for i in range(5)), batch_size=2, epochs=2, owned=range)
    feed = Feed((i for i in range(5)), batch_size=2, owned=range)
    assert [batch.num_samples for batch in feed] == [2, 2, 1]
    with pytest.raises(DataError, match="the stream gave nothing in epoch 0"):
        list(feed)


def test_errors_say_where_in_the_stream() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise OSError("connection lost")

    with pytest.raises(DataError, match="reading item 5 of the stream in epoch 0 failed: OSError"):
        list(Feed(broken, batch_size=2, owned=range))
    with pytest.raises(DataError, match="TypeError: 'int' object is not iterable"):
        list(Feed(lambda: 5, batch_size=2, owned=range))
    mixed = [[1, "a", 3, 4], [1, 2]]
    with pytest.raises(
        DataError, match=r"has from 2 to 4 items.* \(samples 0 to 1 of the stream\)"
    ):
        list(Feed(lambda: iter(mixed), batch_size=2, owned=range))
    with pytest.raises(DataError, match="ended after 3 samples in epoch 0, with drop_last"):
        list(Feed(count_to(3), batch_size=4, drop_last=True, owned=range))


def test_one_process_reads_a_stream() -> None:
    with pytest.raises(ConfigError, match="workers=2, but a stream has to be read in order"):
        Feed(count_to(3), batch_size=2, workers=2, owned=range)


def test_a_reader_left_early_is_closed() -> None:
    closed = []

    def reader() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    batches = iter(Feed(reader, batch_size=2, owned=range))
    next(batches)
    del batches
    assert closed == [True]


def test_ready_batches_are_cut_along_the_first_dimension() -> None:
    sizes = (6, 4, 1)
    batches = [{"x": torch.arange(n), "y": torch.ones(n, 2)} for n in sizes]
    feed = Feed(ReadyBatches(batches), batch_size=6, micro_batches=4, epochs=2, owned=range)
    got = list(feed)
    assert [facts(b) for b in got[:3]] == [
        (0, 0, 6, 4, False),
        (0, 1, 4, 4, False),
        (0, 2, 1, 1, True),
    ]
    assert [p.data["x"].tolist() for p in got[0].micro_batches] == [[0, 1], [2, 3], [4], [5]]
    assert len(got) == 6
    once = Feed(ReadyBatches(lambda: iter(batches)), batch_size=6, owned=range)
    assert len(list(once)) == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.arange(7), torch.arange(7)), "batch 0 of epoch 0 holds 7 samples; expected 1 to"),
        ((torch.arange(3), torch.arange(4)), "the arrays of batch 0 of epoch 0 differ in length"),
        (torch.empty(0), "holds 0 samples"),
    ],
)
def test_ready_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(Feed(ReadyBatches([batch]), batch_size=6, owned=range))


def test_ready_batches_are_not_put_together() -> None:
    with pytest.raises(ConfigError, match="ReadyBatches are batches already"):
        Feed(ReadyBatches([]), batch_size=6, collate=list, owned=range)
