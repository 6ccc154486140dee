"""A torch DataLoader in place of a data set: looked through, or refused with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from parti.data.batches import Feed
from parti.errors import ConfigError

DATA = TensorDataset(torch.arange(20))


def samples(feed: Feed) -> list[int]:
    return [i for b in feed for p in b.micro_batches for i in p.data[0].tolist()]


def test_its_settings_are_taken() -> None:
    feed = Feed(DataLoader(DATA, batch_size=8, drop_last=True), batch_size=None, owned=range)
    assert samples(feed) == list(range(16))
    shuffled = Feed(DataLoader(DATA, batch_size=8, shuffle=True), batch_size=8, owned=range)
    assert samples(shuffled) == samples(Feed(DATA, batch_size=8, owned=range))


def test_its_collate_function_is_taken() -> None:
    loader = DataLoader(DATA, batch_size=4, collate_fn=len)
    feed = Feed(loader, batch_size=4, micro_batches=1, owned=range)
    assert [p.data for b in feed for p in b.micro_batches] == [4] * 5


def test_a_stream_inside() -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((i,) for i in range(5))

    feed = Feed(DataLoader(Numbers(), batch_size=2), batch_size=2, owned=range)
    assert samples(feed) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("loader", "asked", "message"),
    [
        ({}, {"batch_size": 5}, "batch_size=5 is asked for, but the DataLoader has batch_size=4"),
        ({}, {"shuffle": True}, "shuffle=True is asked for, but the DataLoader has shuffle=False"),
        ({"shuffle": True}, {"shuffle": False}, "the DataLoader has shuffle=True"),
        ({"drop_last": True}, {"drop_last": False}, "the DataLoader has drop_last=True"),
        ({"num_workers": 1}, {"workers": 2}, "workers=2 is asked for, but .* has workers=1"),
        ({"collate_fn": len}, {"collate": list}, "is asked for, but the DataLoader has collate"),
    ],
)
def test_contradictions(loader: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    made = DataLoader(DATA, **{"batch_size": 4, **loader})
    with pytest.raises(ConfigError, match=message):
        Feed(made, **{"batch_size": None, **asked}, owned=range)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"sampler": DistributedSampler(DATA, 2, 0)}, "deals with a DistributedSampler"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "deals with a SubsetRandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20)}, "WeightedRandomSampler"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, "draws with replacement"),
        ({"sampler": RandomSampler(DATA, num_samples=5)}, "or a part of the samples"),
        ({"batch_size": None}, "a batch_sampler of its own, or none"),
        (
            {
                "batch_size": 1,
                "batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False),
            },
            "a batch_sampler of its own",
        ),
    ],
)
def test_samplers_of_its_own(loader: dict[str, Any], message: str) -> None:
    made = DataLoader(DATA, **{"batch_size": 4, **loader})
    with pytest.raises(ConfigError, match=message):
        Feed(made, batch_size=4, owned=range)
