"""What a replica tells of its course: each step once, with the part of it that this rank did."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from parti.comm.world import World
from parti.data.batches import Batch
from parti.data.order import Position
from parti.engine.replica import Replica
from parti.testing import FaultScript, on_threads

from .. import zoo

STEPS = 10
"""Two epochs of 77 samples in batches of 16."""


@dataclass(frozen=True)
class Commit:
    generation: int
    step: int
    place: tuple[int, int]
    first: int
    end: int
    num_samples: int
    has_finished: bool


@dataclass
class Notes:
    """A log in memory."""

    begun: list[tuple[int, int, Position]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    def began(self, generation: int, step: int, at: Position) -> None:
        self.begun.append((generation, step, at))

    def joined(self, generation: int, step: int, giver: int) -> None:
        raise AssertionError("nobody comes later here")

    def committed(
        self,
        generation: int,
        step: int,
        batch: Batch,
        *,
        first: int,
        end: int,
        num_samples: int,
        has_finished: bool,
    ) -> None:
        place = (batch.epoch, batch.step_in_epoch)
        self.commits.append(Commit(generation, step, place, first, end, num_samples, has_finished))


def notes(world: World, micro_batches: int = 4) -> Notes:
    kept = Notes()
    model, optimizer = zoo.make("adam")
    replica = Replica(
        strategy=None,
        world=world,
        device=torch.device("cpu"),
        models=[model],
        optimizers=[optimizer],
        seed=3,
        exact=True,
        precision=nullcontext,
        commits=kept,
    )
    zoo.train(replica, model, optimizer, micro_batches)
    return kept


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_tells_its_own_part(size: int) -> None:
    """Of five ranks one has no micro-batch: it commits all the same."""
    every = on_threads(size, notes)
    for kept in every:
        assert kept.begun == [(1, 0, Position())]
        assert [commit.step for commit in kept.commits] == list(range(STEPS))
        assert [commit.place for commit in kept.commits] == [divmod(n, 5) for n in range(STEPS)]
        assert {commit.generation for commit in kept.commits} == {1}
        assert not any(commit.has_finished for commit in kept.commits)
    for step in range(STEPS):
        row = [kept.commits[step] for kept in every]
        computed = [number for each in row for number in range(each.first, each.end)]
        assert sorted(computed) == [0, 1, 2, 3]
        assert sum(each.num_samples for each in row) == (13 if step % 5 == 4 else 16)


@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
def test_a_step_done_again_is_told_once(point: str) -> None:
    left = on_threads(3, notes, FaultScript().kill(rank=1, step=3, at=point))
    for kept in left:
        assert [commit.step for commit in kept.commits] == list(range(STEPS))
        assert [commit.generation for commit in kept.commits] == [1] * 3 + [2] * 7
    assert sum(kept.commits[3].num_samples for kept in left) == 16


@pytest.mark.parametrize("point", ["optimizer", "update", "hand_out"])
def test_who_finishes_a_step_for_a_lost_rank_says_so(point: str) -> None:
    """The gradients are of the old world, with the lost rank's in them."""
    left = on_threads(3, notes, FaultScript().kill(rank=1, step=3, at=point))
    for kept in left:
        assert [commit.step for commit in kept.commits] == list(range(STEPS))
        assert [commit.generation for commit in kept.commits] == [1] * 4 + [2] * 6
    finished = [[commit.step for commit in kept.commits if commit.has_finished] for kept in left]
    assert finished == [[3], []]
    assert sum(kept.commits[3].num_samples for kept in left) < 16
