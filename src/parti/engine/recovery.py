"""How a replica goes on when ranks are lost or have come: the update of a step as a value that can
be finished by others, and the way from one world to the next.

Whoever lives has the same weights, state and step, so nothing is read from a disk. What may be half
done is one update; `settle` first brings that to its end.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parti.comm.handover import hand_over
from parti.comm.protocol import Phase
from parti.comm.world import World
from parti.engine.gradients import Sums
from parti.engine.trained import Trained
from parti.engine.update import Order
from parti.errors import CommError, PeerLost, RankMismatch

_PLACE = struct.Struct("<q?")


class StepUpdate:
    """All that the update of one step needs. From its beginning on the step counts."""

    def __init__(
        self,
        trained: Sequence[Trained],
        orders: Sequence[Order],
        sums: Sequence[Iterable[list[torch.Tensor]]],
        scale: float,
        norm: float | None,
    ) -> None:
        self._trained = trained
        self._orders = orders
        self._sums = sums
        self._scale = scale
        self.norm = norm
        """Of all gradients, where they are clipped."""
        self.is_done = False
        self.has_finished = False
        """This process has done the part of one that is lost as well."""

    def carry_out(self) -> None:
        """My part of it."""
        for part, order, sums in zip(self._trained, self._orders, self._sums, strict=True):
            part.update.step(order, sums)

    def finish(self, lost: int) -> None:
        """The part of a neighbour who is lost. All others are through theirs."""
        self.has_finished = True
        for part, order in zip(self._trained, self._orders, strict=True):
            part.update.finish(order, lost, part.gradients.sums_of(lost, self._scale))

    def commit(self) -> None:
        """Everybody's part is done."""
        self.is_done = True
        for part in self._trained:
            part.update.commit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlers:
    """A replica on its way to the next world."""

    world: World
    trained: Sequence[Trained]
    step: Callable[[], int]
    give: Callable[[], Mapping[str, Any]]
    """The state of the training, for those who have just come."""
    take: Callable[[Mapping[str, Any]], None]
    rebuild: Callable[[World], dict[int, Trained]]


def settle(
    mine: Settlers, lost: CommError | None, unfinished: StepUpdate | None
) -> tuple[World, dict[int, Trained]]:
    """Join those who are left or have come, bring an unfinished update to its end, give newcomers
    the state, and lay everything out anew.

    If somebody is lost meanwhile, begin again: each part can be done twice.
    """
    world, is_released = mine.world, False
    while True:
        world = world.succession.next(world, lost)
        try:
            world.neighbours.report(Phase.RECOVER, mine.step())
            _check_same_place(world, mine.step(), unfinished is not None)
            if unfinished is not None and not unfinished.is_done:
                _finish(unfinished, mine.world, world)
            world.exchange(b"")  # the others have finished theirs
            if unfinished is not None:
                unfinished.commit()
            if not is_released:
                is_released = True
                for part in mine.trained:
                    part.release()
            return world, _lay_out(mine, world)
        except PeerLost as again:
            lost = again


def join(mine: Settlers) -> tuple[World, dict[int, Trained]]:
    """Become one of the ranks of a training that is under way."""
    for part in mine.trained:
        part.release()
    world = mine.world.succession.join(mine.world)
    while True:
        try:
            _check_same_place(world, mine.step(), False)
            world.exchange(b"")
            return world, _lay_out(mine, world)
        except PeerLost as lost:
            world = world.succession.next(world, lost)


def _lay_out(mine: Settlers, world: World) -> dict[int, Trained]:
    if world.newcomers:
        state = hand_over(world, mine.give)
        if state is not None:
            mine.take(state)
    trained = mine.rebuild(world)
    # Nobody lets go of the old world's memory while another may still read it.
    world.exchange(b"")
    world.succession.settled(world)
    return trained


def _check_same_place(world: World, step: int, is_unfinished: bool) -> None:
    """A check of the program: those who are left have failed in one and the same exchange. Of
    several hosts, one may be through with a step whose update another has not finished."""
    places = {
        rank: _PLACE.unpack(data)
        for rank, data in enumerate(world.exchange(_PLACE.pack(step, is_unfinished)))
        if world.members[rank] not in world.newcomers
    }
    if len({at + torn for at, torn in places.values()}) > 1:
        words = [
            f"rank {rank} {'in the update' if torn else 'at the beginning'} of step {at}"
            for rank, (at, torn) in places.items()
        ]
        raise RankMismatch(
            f"after the loss of a rank those who are left are not at the same place: "
            f"{', '.join(words)}. All ranks must call the same methods in the same order."
        )


def _finish(update: StepUpdate, old: World, world: World) -> None:
    """One of those who are left on this host does what the lost have not."""
    near = [old.members[rank] for rank in old.neighbours.ranks]
    left = [member for member in near if member in world.members]
    if old.member == left[0]:
        for index, member in enumerate(near):
            if member not in world.members:
                update.finish(index)


class Timed:
    """Hands sums on as they come, and adds up how long each took to come."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.spent_s = 0.0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return self

    def __next__(self) -> list[torch.Tensor]:
        started = time.perf_counter()
        try:
            return next(self._sums)
        finally:
            self.spent_s += time.perf_counter() - started
