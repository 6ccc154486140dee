"""The feed over data in memory: who gets what, for any number of ranks, from any point on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.data.batches import Batch, Feed
from parti.data.order import Position, permute, split
from parti.errors import ConfigError, DataError, PartiError

Owned = Callable[[int], Sequence[int]]


def rank(number: int, world_size: int) -> Owned:
    """Contiguous runs, as balanced as can be; spares get none."""

    def owned(active: int) -> range:
        return range(active * number // world_size, active * (number + 1) // world_size)

    return owned


def ids(batch: Batch) -> list[tuple[int, list[int]]]:
    return [(piece.number, piece.data.tolist()) for piece in batch.micro_batches]


def program(feeds: Sequence[Feed]) -> list[dict[int, list[int]]]:
    """For each step, the samples of every micro-batch, gathered from all ranks."""
    steps = []
    for batches in zip(*feeds, strict=True):
        facts = {
            (b.epoch, b.step_in_epoch, b.num_samples, b.num_micro_batches, b.is_last_of_epoch)
            for b in batches
        }
        assert len(facts) == 1, "ranks disagree on the global batch"
        pieces = [piece for batch in batches for piece in ids(batch)]
        step = dict(sorted(pieces))
        assert list(step) == list(range(batches[0].num_micro_batches)), "not each exactly once"
        assert len(pieces) == len(step)
        assert sum(map(len, step.values())) == batches[0].num_samples
        steps.append(step)
    return steps


@settings(max_examples=50)
@given(
    n=st.integers(1, 200),
    batch_size=st.integers(1, 60),
    micro_batches=st.integers(1, 9),
    world_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_once_an_epoch_and_the_same_for_any_number_of_ranks(
    n: int,
    batch_size: int,
    micro_batches: int,
    world_size: int,
    epochs: int,
    shuffle: bool,
    drop_last: bool,
) -> None:
    micro_batches = min(micro_batches, batch_size)
    if drop_last and batch_size > n:
        return

    def feed(owned: Owned) -> Feed:
        return Feed(
            torch.arange(n),
            batch_size=batch_size,
            micro_batches=micro_batches,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            owned=owned,
        )

    alone = program([feed(range)])
    together = program([feed(rank(r, world_size)) for r in range(world_size)])
    assert together == alone
    steps = n // batch_size if drop_last else -(-n // batch_size)
    assert len(alone) == steps * epochs == len(feed(range)) == feed(range).num_steps
    for epoch in range(epochs):
        of_epoch = alone[epoch * steps : (epoch + 1) * steps]
        seen = [sample for step in of_epoch for piece in step.values() for sample in piece]
        assert len(set(seen)) == len(seen) == (steps * batch_size if drop_last else n)
        if not shuffle:
            assert seen == list(range(len(seen)))


def test_the_order_is_that_of_the_seed_and_epoch() -> None:
    feed = Feed(torch.arange(50), batch_size=20, micro_batches=3, epochs=2, seed=9, owned=range)
    got = [sample for batch in feed for _, piece in ids(batch) for sample in piece]
    expected = [permute(np.arange(50), 50, 9, epoch).tolist() for epoch in (0, 1)]
    assert got == expected[0] + expected[1]


def test_batches_describe_themselves() -> None:
    feed = Feed(torch.arange(50), batch_size=20, micro_batches=4, epochs=2, owned=rank(0, 3))
    facts = [(b.epoch, b.step_in_epoch, b.num_samples, b.is_last_of_epoch) for b in feed]
    epoch = [(0, 20, False), (1, 20, False), (2, 10, True)]
    assert facts == [(e, *rest) for e in (0, 1) for rest in epoch]
    assert [[(p.number, p.num_samples) for p in b.micro_batches] for b in feed][:3] == [
        [(0, 5)],
        [(0, 5)],
        [(0, 3)],
    ]
    assert (feed.steps_per_epoch, feed.num_steps, feed.num_samples) == (3, 6, 50)
    assert (feed.batch_size, feed.num_micro_batches, feed.num_epochs) == (20, 4, 2)


def test_micro_batches_follow_from_the_batch_size() -> None:
    assert Feed(torch.arange(300), batch_size=256, owned=range).num_micro_batches == 8
    assert Feed(torch.arange(300), batch_size=10, owned=range).num_micro_batches == 2


def test_a_spare_rank_has_every_batch_but_no_data() -> None:
    batches = list(Feed(torch.arange(50), batch_size=20, owned=lambda active: ()))
    assert [(b.num_samples, b.micro_batches) for b in batches] == [(20, ()), (20, ()), (10, ())]


@given(start=st.integers(0, 12), shuffle=st.booleans())
def test_resuming_gives_the_rest(start: int, shuffle: bool) -> None:
    def feed(start: Position | None) -> Feed:
        return Feed(
            torch.arange(77), batch_size=20, epochs=3, shuffle=shuffle, start=start, owned=range
        )

    rest = feed(Position.at(start, 4))
    assert program([rest]) == program([feed(None)])[start:]
    assert len(rest) == 12 - start
    assert rest.num_steps == 12


def test_resuming_at_the_end_of_an_epoch_or_of_everything() -> None:
    data = torch.arange(40)
    end_of_epoch = Position(epoch=0, step_in_epoch=2)
    batches = list(Feed(data, batch_size=20, epochs=2, start=end_of_epoch, owned=range))
    assert [b.epoch for b in batches] == [1, 1]
    done = Feed(data, batch_size=20, epochs=2, start=Position(epoch=2), owned=range)
    assert (list(done), len(done)) == ([], 0)


def test_iterating_again_starts_again() -> None:
    feed = Feed(torch.arange(60), batch_size=20, owned=range)
    assert [ids(b) for b in feed] == [ids(b) for b in feed]


def test_ownership_may_change_at_any_step() -> None:
    held: list[int] = [0, 1, 2, 3]
    feed = Feed(torch.arange(100), batch_size=20, micro_batches=4, owned=lambda active: held)
    whole = [dict(ids(b)) for b in feed]
    got = []
    for batch, next_held in zip(feed, ([2, 3], [0, 3], [], [1], []), strict=True):
        got.append(dict(ids(batch)))
        held[:] = next_held
    for step, numbers in enumerate(([0, 1, 2, 3], [2, 3], [0, 3], [], [1])):
        assert got[step] == {number: whole[step][number] for number in numbers}


def test_ownership_that_makes_no_sense() -> None:
    feed = Feed(torch.arange(10), batch_size=10, micro_batches=2, owned=lambda active: (1, 2))
    with pytest.raises(DataError, match=r"micro-batches \(1, 2\) of 2; expected ascending"):
        next(iter(feed))


def test_random_states_of_the_process_are_not_touched() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    def restart() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    restart()
    expected = draw()

    class Noisy:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> float:
            return sum(draw())

    def stream() -> Any:
        for _ in range(20):
            yield sum(draw())

    for data in (torch.arange(20), Noisy(), stream):
        restart()
        list(Feed(data, batch_size=6, epochs=2, owned=range))
        assert draw() == expected, data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; expected a whole number from 1 on"),
        ({"batch_size": 2.5}, "batch_size=2.5; expected a whole number"),
        ({"batch_size": True}, "batch_size=True; expected"),
        ({"batch_size": None}, "batch_size is missing"),
        ({"batch_size": "8"}, "batch_size='8'; expected"),
        ({"micro_batches": 0}, "micro_batches=0; expected"),
        ({"micro_batches": 9}, "micro_batches=9 is more than batch_size=8"),
        ({"epochs": 0}, "epochs=0; expected"),
        ({"seed": 0.5}, "seed=0.5; expected a whole number"),
        ({"workers": -1}, "workers=-1; expected a whole number from 0 on"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch of a data set of 10 samples"),
        ({"start": Position(epoch=1, step_in_epoch=1)}, "behind the end of epochs=1"),
        ({"start": Position(step_in_epoch=3)}, "the epoch, which has 2 steps"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"batch_size": 8, **change}
    with pytest.raises(ConfigError, match=message):
        Feed(torch.arange(10), owned=range, **asked)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    feed = Feed(torch.arange(10), batch_size=np.int64(4), owned=range)
    assert len(feed) == 3


class _NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "data of type int is not a data set"),
        ("text", "data of type str is not a data set"),
        (None, "data of type NoneType is not a data set"),
        (_NoLength(), "data of type _NoLength is not a data set"),
        (dict, "the class dict is no data set"),
        ({1, 2}, "a set has no order"),
        ([], "the data set is empty"),
        (torch.empty(0, 3), "the data set is empty"),
        ((), "is an empty tuple; expected tensors"),
        (torch.tensor(3), "the array is a single number"),
        ((torch.arange(3), torch.tensor(3)), r"array \[1\] is a single number"),
        ((torch.arange(3), np.arange(4)), r"differ in length: \[0\] has 3, \[1\] has 4"),
        ({"x": torch.arange(3), "y": torch.arange(4)}, r"\['x'\] has 3, \['y'\] has 4"),
        ((torch.arange(3), "abc"), r"array \[1\] is a str; expected a tensor"),
        (np.array(["a", "b"]), "has the type <U1, which torch does not hold"),
        (torch.eye(3).to_sparse(), "expected a dense tensor"),
        ([torch.ones(2, 3), torch.ones(2, 3)], "may be 2 samples or 2 columns"),
        ([torch.ones(2), torch.ones(3)], "with 2 to 3 rows is no data set.* pass `collate=`"),
    ],
)
def test_what_is_no_data_set(data: Any, message: str) -> None:
    with pytest.raises(PartiError, match=message):
        Feed(data, batch_size=1, owned=range)


def test_data_frames_get_their_own_advice() -> None:
    class DataFrame:
        iloc = None

        def __len__(self) -> int:
            return 3

        def __getitem__(self, name: str) -> None: ...

    with pytest.raises(DataError, match="to_numpy"):
        Feed(DataFrame(), batch_size=1, owned=range)


def test_shares_of_a_short_batch_match_the_split() -> None:
    batch = next(iter(Feed(torch.arange(11), batch_size=64, micro_batches=4, owned=range)))
    assert tuple(p.num_samples for p in batch.micro_batches) == split(11, 4) == (3, 3, 3, 2)
    tiny = next(iter(Feed(torch.arange(2), batch_size=64, micro_batches=4, owned=range)))
    assert tiny.num_micro_batches == len(tiny.micro_batches) == 2
