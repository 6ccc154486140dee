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
from pathlib import Path
from typing import assert_never

import msgspec

from parti.comm import deeds
from parti.comm.carrier import Carrier
from parti.comm.protocol import Neighbours, Phase
from parti.comm.world import Succession, World
from parti.errors import CommError, ConfigError, PeerLost

POINTS = tuple(
    phase.name.lower()
    for phase in Phase
    if phase is not Phase.START  # before a rank wears its coat
)
"""What a fault may be at."""


class Deed(StrEnum):
    """What happens to a process, or to what it stands on."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP: it stands still until somebody goes on with it or ends it."""
    HANG = "hang"
    """Its Python code never comes back, while other threads of the process go on."""
    DELAY = "delay"
    CUT = "cut"
    """The links of its host are down."""
    FILL = "fill"
    """A file system is full."""
    CORRUPT = "corrupt"
    """A byte of the newest checkpoint is another one."""


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
    target: str = ""
    """The interface that is cut, or the directory that is filled or holds the checkpoints."""


class Coat(Carrier):
    """A rank's neighbours, with faults that happen as it reports where it is."""

    def __init__(
        self,
        inside: Neighbours,
        member: int,
        faults: tuple[Fault, ...],
        carry_out: Callable[[Fault], None],
    ) -> None:
        super().__init__(inside, told=self._look)
        self._faults = tuple(fault for fault in faults if fault.member == member)
        self._carry_out = carry_out
        self._seen: dict[tuple[int, Phase], int] = {}

    def _look(self, phase: Phase, step: int) -> None:
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

    def form(self, after: World, because: PeerLost) -> None:
        self.inside.form(after, because)

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
    faults = FaultScript.read(written).faults
    if not faults:
        return world

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
        case Deed.CUT:
            deeds.cut(fault.target)
        case Deed.FILL:
            deeds.fill(fault.target)
        case Deed.CORRUPT:
            deeds.corrupt(fault.target)
        case _:
            assert_never(fault.deed)


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Which faults happen where, written as a script:

        FaultScript().kill(rank=1, step=3).kill(rank=0, step=5, at="update")

    A rank is the number of a process as it was started; one that takes the place of another has a
    number of its own. Points are the phases of a step: data (waiting for a batch), forward,
    backward, reduce, optimizer, update (before each piece of the weights), hand_out, user (the
    script, when the step before is done), evaluate, save (`Trainer.save`), recover, and wait (for a
    place, as step -1). At one point faults happen in the order of the script.

    Where a fault cannot be, as a link may not be cut, its process ends with a ConfigError.
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def read(cls, written: str) -> FaultScript:
        """The script from its text."""
        try:
            return cls(_decode(written) if written else ())
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"PARTI_FAULTS is {written!r}, which is no script of faults ({error}); expected "
                "str(FaultScript()...), or nothing."
            ) from None

    def kill(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.KILL, rank, step, at, nth)

    def stop(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.STOP, rank, step, at, nth)

    def hang(self, *, rank: int, step: int, at: str = "forward", nth: int = 1) -> FaultScript:
        return self._add(Deed.HANG, rank, step, at, nth)

    def delay(
        self, seconds: float, *, rank: int, step: int, at: str = "forward", nth: int = 1
    ) -> FaultScript:
        return self._add(Deed.DELAY, rank, step, at, nth, seconds=seconds)

    def cut(
        self,
        *,
        rank: int,
        step: int,
        at: str = "forward",
        nth: int = 1,
        interface: str | None = "eth0",
    ) -> FaultScript:
        """Set that link of the process's host down; with None, all but `lo`, but not where the
        machine itself would be cut off. Whoever wrote the test mends it. Needs CAP_NET_ADMIN."""
        return self._add(Deed.CUT, rank, step, at, nth, target=interface or "")

    def fill(
        self, directory: str | Path, *, rank: int, step: int, at: str = "forward", nth: int = 1
    ) -> FaultScript:
        """Fill the file system of a directory, of which 256 MiB at most may be free, until nothing
        fits. A file of that directory, `filled-by-a-fault`, holds what was free."""
        return self._add(Deed.FILL, rank, step, at, nth, target=str(directory))

    def corrupt(
        self, directory: str | Path, *, rank: int, step: int, at: str = "forward", nth: int = 1
    ) -> FaultScript:
        """Flip a byte in the middle of the largest file of the newest checkpoint there."""
        return self._add(Deed.CORRUPT, rank, step, at, nth, target=str(directory))

    def _add(
        self,
        deed: Deed,
        rank: int,
        step: int,
        at: str,
        nth: int,
        *,
        seconds: float = 0.0,
        target: str = "",
    ) -> FaultScript:
        if at not in POINTS:
            raise ConfigError(f"at={at!r} is no point of a step; expected {', '.join(POINTS)}.")
        fault = Fault(
            deed=deed,
            member=rank,
            step=step,
            phase=Phase[at.upper()],
            nth=nth,
            seconds=seconds,
            target=target,
        )
        return FaultScript((*self.faults, fault))

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __str__(self) -> str:
        """For PARTI_FAULTS in the environment of a job."""
        return msgspec.json.encode(self.faults).decode() if self.faults else ""


_decode = msgspec.json.Decoder(tuple[Fault, ...]).decode
