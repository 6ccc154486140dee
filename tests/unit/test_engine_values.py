"""Forward results, letters between ranks, the sentence about a wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parti.comm.protocol import Phase
from parti.comm.wait import Sighting, describe_wait, name_ranks
from parti.engine.forward import Forward, call, weigh
from parti.engine.letter import Letter, check_agreement, join_used, read, write
from parti.errors import ConfigError, RankMismatch


@pytest.mark.parametrize(
    ("result", "total", "count"),
    [
        (torch.tensor(2.0), 8.0, 4.0),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), 10.0, 4.0),
        (torch.ones(4, 5), 20.0, 20.0),
        ((torch.tensor(6.0), 3), 6.0, 3.0),
        (SimpleNamespace(loss=torch.tensor(2.0)), 8.0, 4.0),
        ({"loss": torch.tensor(2.0)}, 8.0, 4.0),
        (Forward(torch.tensor(2.0), aux="kept"), 8.0, 4.0),
    ],
)
def test_a_loss_becomes_a_sum_and_a_count(result: object, total: float, count: float) -> None:
    weighed = weigh(result, num_samples=4)
    assert weighed.tally() == (total, count)


def test_a_result_without_a_loss_is_described() -> None:
    with pytest.raises(ConfigError, match=r"returned a tuple of 3 \(Tensor, int, str\)"):
        weigh((torch.ones(2), 1, "x"), 4)


def test_batches_are_handed_over_as_their_type_suggests() -> None:
    assert call(lambda a, b: (a, b), (1, 2)) == (1, 2)
    assert call(lambda a, b: (a, b), {"b": 2, "a": 1}) == (1, 2)
    assert call(lambda x: x, 5) == 5


@pytest.mark.parametrize("used", [b"", b"\x01\x00\x01"])
def test_a_letter_arrives_as_it_was_sent(used: bytes) -> None:
    letter = Letter(7, 30, ((1.5, 8.0), (2.5, 6.0)), used, b"buffers")
    assert read(write(letter)) == letter


def test_ranks_at_different_steps_are_told_apart() -> None:
    letters = [Letter(3, 32, (), b"", b""), Letter(3, 30, (), b"", b"")]
    with pytest.raises(RankMismatch, match="32 samples, rank 1 at step 3 with 30"):
        check_agreement(letters)


def test_a_parameter_counts_as_used_when_any_micro_batch_reached_it() -> None:
    tally = ((1.0, 1.0),)
    letters = [
        Letter(0, 4, tally, b"\x01\x00\x00", b""),
        Letter(0, 4, tally, b"\x00\x00\x01", b""),
        Letter(0, 4, (), b"", b""),  # a spare has no say
    ]
    assert join_used(letters, 3) == [True, False, True]
    assert join_used([*letters, Letter(0, 4, tally, b"", b"")], 3) is None


def test_ranks_are_named_as_people_do() -> None:
    assert [name_ranks(r) for r in ([], [3], [1, 0], [0, 1, 3])] == [
        "no rank",
        "rank 3",
        "ranks 0 and 1",
        "ranks 0, 1 and 3",
    ]


def test_a_wait_says_who_is_missing_and_what_it_last_did() -> None:
    sentence = describe_wait(
        rank=2,
        operation=9,
        waited_s=30.04,
        arrived=[0, 1],
        missing=[Sighting(rank=3, phase=Phase.BACKWARD, step=117, age_s=31.0)],
    )
    assert sentence == (
        "rank 2: exchange 9 waited 30.0 s for rank 3; ranks 0 and 1 arrived. "
        "Last report from rank 3: backward of step 117, 31.0 s ago."
    )
