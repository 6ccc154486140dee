"""A process's own side of the membership: it says that it is here, and goes to the world it is
called to. Owns the line to its supervisor; what is decided there is in `membership`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parti.comm.phase import LENIENT, Phase
from parti.comm.protocol import Neighbours, Region
from parti.comm.rendezvous import Directory, meeting_in
from parti.comm.solo import Solo
from parti.comm.world import OnlyWorld, World, connect
from parti.errors import CommError, CommTimeout, PeerLost
from parti.launch.control import (
    Board,
    Called,
    HasEntered,
    HasLost,
    IsHere,
    Refused,
    WorkersEnd,
)
from parti.launch.frozen import show_stacks_on_demand

_LOOK_S = 0.05
_ANSWER_S = 30.0
"""How long a supervisor may take to say what follows from a loss."""
_START_S = 60.0
"""How long processes that are started together may come after one another, at least."""
_TIMES_AS_PATIENT = 10
_NUM_FIRST_STEPS = 2
"""Steps in which models are compiled, kernels planned and memory is laid out."""


class Member:
    """The succession of worlds of a process that a supervisor has started."""

    recovers = True

    def __init__(
        self,
        line: WorkersEnd,
        *,
        number: int,
        directory: Path,
        device: torch.device,
        patience_s: float,
        num_cores: int,
    ) -> None:
        self._line = line
        self._number = number
        self._directory = directory
        self._device = device
        self._patience_s = patience_s
        self._num_cores = num_cores
        self._newest: Called | None = None
        self._refused = -1
        self._settled_in: World | None = None
        self._pace = _Pace(line.board)
        show_stacks_on_demand(directory / "failures", number)

    def first(self) -> World:
        """The first world, when all are here."""
        self.is_here()
        return self._enter(0, None, max(_START_S, self._patience_s))

    def is_here(self) -> None:
        """Ready to be called."""
        self._line.send(IsHere(self._patience_s))

    def provisional(self, rank: int) -> World:
        """Alone, until there is a place: for a process that is to join a world that trains."""
        neighbours = Watched(Solo(rank, self._device), self._pace)
        members = (self._number,)
        return World(rank, 1, neighbours, generation=0, members=members, succession=self)

    def next(self, after: World, because: CommError | None) -> World:
        if because is not None:
            self._line.send(HasLost(after.generation))
        return self._enter(after.generation, because, _ANSWER_S + self._patience_s)

    def join(self, after: World) -> World:
        """Wait for a place, for as long as it takes: the supervisor ends those it needs no more."""
        self.is_here()
        after.neighbours.report(Phase.WAIT, -1)
        return self._enter(after.generation, None, None)

    def current(self, world: World) -> World:
        return world if self._settled_in is None else self._settled_in

    def is_called(self, after: World) -> bool:
        self._read(0.0)
        return self._newest is not None and self._newest.generation > after.generation

    def settled(self, world: World) -> None:
        self._settled_in = world
        self._line.send(HasEntered(world.generation))

    def _enter(self, after: int, because: CommError | None, wait_s: float | None) -> World:
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        while True:
            called = self._await(after, because, deadline_s)
            try:
                return self._connect(called)
            except PeerLost as lost:
                after, because = called.generation, lost

    def _await(self, after: int, because: CommError | None, deadline_s: float | None) -> Called:
        """The newest world that I am called to."""
        while True:
            newest = self._newest
            if newest is not None and newest.generation > after and self._number in newest.members:
                return newest
            if because is not None and self._refused >= after:
                raise because
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise because or CommTimeout(
                    f"process {self._number} waited in vain at the start for the others. One was "
                    "not started or is still loading; raise `patience_s` in the second case."
                )
            self._read(_LOOK_S)

    def _read(self, wait_s: float) -> None:
        while (message := self._line.receive(wait_s)) is not None:
            wait_s = 0.0
            if isinstance(message, Called):
                self._newest = message
            elif isinstance(message, Refused):
                self._refused = message.generation

    def _connect(self, called: Called) -> World:
        rank, size = called.members.index(self._number), len(called.members)
        is_new = self._number in called.joining
        directory = self._directory / f"world-{called.generation}"
        directory.mkdir(exist_ok=True)
        store = _UntilCalled(Directory(directory), lambda: self._check_newest(called))
        world = connect(
            rank=rank,
            size=size,
            # Who joins waits for the end of the others' step, however long that takes.
            meet=meeting_in(store, rank, size, self._patience_s if not is_new else math.inf),
            device=self._device,
            # The supervisor ends those that others wait for in vain, and does so sooner.
            patience_s=_TIMES_AS_PATIENT * self._patience_s + _ANSWER_S,
            num_cores=self._num_cores,
        )
        if world.across is not None:
            # Groups of other libraries do not survive the loss of a member.
            return dataclasses.replace(world, succession=OnlyWorld())
        return dataclasses.replace(
            world,
            neighbours=Watched(world.neighbours, self._pace),
            generation=called.generation,
            members=called.members,
            newcomers=called.joining,
            succession=self,
        )

    def _check_newest(self, called: Called) -> None:
        self._read(0.0)
        if self._newest is not None and self._newest.generation > called.generation:
            raise PeerLost("another world has been called meanwhile.")


class _UntilCalled:
    """A place to meet that nobody waits at when a newer world has been called."""

    def __init__(self, directory: Directory, check: Callable[[], None]) -> None:
        self._directory = directory
        self._check = check

    def set(self, key: str, value: bytes) -> None:
        self._directory.set(key, value)

    def get(self, key: str, deadline_s: float) -> bytes:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                return self._directory.get(key, min(_LOOK_S, deadline_s))
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise


class _Pace:
    """Where this process is, on its board; over all worlds it takes part in."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._lenient_until = -1

    def report(self, phase: Phase, step: int) -> None:
        if self._lenient_until < 0 <= step and phase not in LENIENT:
            self._lenient_until = step + _NUM_FIRST_STEPS
        is_lenient = phase in LENIENT or step < self._lenient_until
        self.board.report(phase, step, is_lenient=is_lenient)


class Watched:
    """Neighbours, with all that is said of progress on the board as well."""

    def __init__(self, inside: Neighbours, pace: _Pace) -> None:
        self._inside = inside
        self._pace = pace

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
        board = self._pace.board
        board.waits(True)
        try:
            return self._inside.exchange(payload)
        finally:
            board.waits(False)

    def allocate(self, num_bytes: int) -> Region:
        board = self._pace.board
        board.waits(True)
        try:
            return self._inside.allocate(num_bytes)
        finally:
            board.waits(False)

    def report(self, phase: Phase, step: int) -> None:
        self._inside.report(phase, step)
        self._pace.report(phase, step)
