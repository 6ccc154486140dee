"""Faults at logical points of a training, for tests of what survives them.

A point is what a rank reports of itself: a phase of a step. A script says what happens at which
points; it is worn around a rank's neighbours like a coat, and does nothing of its own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from parti.comm.protocol import Neighbours, Phase, Region
from parti.comm.world import Succession, World
from parti.errors import CommError


class Deed(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP: it stands still until somebody goes on with it or ends it."""
    HANG = "hang"
    """Its Python code never comes back, while other threads of the process go on."""
    DELAY = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One deed at one point of one process."""

    deed: Deed
    member: int
    step: int
    phase: Phase
    nth: int = 1
    """At the how-manieth report of that phase in that step."""
    seconds: float = 0.0


class Coat:
    """A rank's neighbours, with faults that happen as it reports where it is."""

    def __init__(
        self,
        inside: Neighbours,
        member: int,
        faults: tuple[Fault, ...],
        carry_out: Callable[[Fault], None],
    ) -> None:
        self._inside = inside
        self._faults = tuple(fault for fault in faults if fault.member == member)
        self._carry_out = carry_out
        self._seen: dict[tuple[int, Phase], int] = {}

    @property
    def kind(self) -> str:
        return self._inside.kind

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._inside.ranks

    @property
    def index(self) -> int:
        return self._inside.index

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        return self._inside.exchange(payload)

    def allocate(self, num_bytes: int) -> Region:
        return self._inside.allocate(num_bytes)

    def report(self, phase: Phase, step: int) -> None:
        self._inside.report(phase, step)
        seen = self._seen[step, phase] = self._seen.get((step, phase), 0) + 1
        for fault in self._faults:
            if (fault.step, fault.phase, fault.nth) == (step, phase, seen):
                self._carry_out(fault)


@dataclass(frozen=True, slots=True)
class _Scripted:
    """The succession of worlds, each in its coat."""

    inside: Succession
    wear: Callable[[World], World]

    @property
    def recovers(self) -> bool:
        return self.inside.recovers

    def next(self, after: World, because: CommError | None) -> World:
        return self.wear(self.inside.next(after, because))

    def join(self, after: World) -> World:
        return self.wear(self.inside.join(after))

    def current(self, world: World) -> World:
        return world

    def is_called(self, after: World) -> bool:
        return self.inside.is_called(after)

    def settled(self, world: World) -> None:
        self.inside.settled(world)


def with_faults(world: World, written: str, carry_out: Callable[[Fault], None]) -> World:
    """The same world, and all that come after it, with the faults of a script."""
    if not written:
        return world
    faults = msgspec.json.decode(written, type=tuple[Fault, ...])

    def wear(bare: World) -> World:
        return dataclasses.replace(
            bare,
            neighbours=Coat(bare.neighbours, bare.member, faults, carry_out),
            succession=_Scripted(bare.succession, wear),
        )

    return wear(world)


def carry_out_for_real(fault: Fault) -> None:
    """Do it to this process."""
    match fault.deed:
        case Deed.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Deed.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Deed.HANG:
            while True:
                time.sleep(3600)
        case Deed.DELAY:
            time.sleep(fault.seconds)


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Which faults happen where, written as a script:

        FaultScript().kill(rank=1, step=3).kill(rank=0, step=5, at="update")

    A rank is the number of a process as it was started; one that takes the place of another has a
    number of its own. Points are the phases of a step: data, forward, backward, reduce, optimizer,
    update (before each piece of the weights), hand_out, user, evaluate, save, recover.
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.KILL, rank, step, at, nth)

    def stop(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.STOP, rank, step, at, nth)

    def hang(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.HANG, rank, step, at, nth)

    def delay(
        self, seconds: float, *, rank: int, step: int, at: str = "forward", nth: int = 1
    ) -> FaultScript:
        return self._add(Deed.DELAY, rank, step, at, nth, seconds)

    def _add(
        self, deed: Deed, rank: int, step: int, at: str, nth: int, seconds: float = 0.0
    ) -> FaultScript:
        fault = Fault(
            deed=deed, member=rank, step=step, phase=Phase[at.upper()], nth=nth, seconds=seconds
        )
        return FaultScript((*self.faults, fault))

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __str__(self) -> str:
        """For PARTI_FAULTS in the environment of a job."""
        return msgspec.json.encode(self.faults).decode() if self.faults else ""
