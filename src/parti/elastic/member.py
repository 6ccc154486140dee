"""A process's own side of the membership: it says that it is here, and goes to the world it is
called to. Owns the line to its supervisor; what is decided there is in `membership`.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from parti.comm.carrier import Carrier
from parti.comm.ledger import Ledger
from parti.comm.phase import LENIENT, Phase
from parti.comm.protocol import Across, Neighbours, Transfer
from parti.comm.rendezvous import KeyValue, meeting_in
from parti.comm.solo import Solo
from parti.comm.world import World, connect
from parti.errors import CommError, CommTimeout, PeerLost
from parti.launch.control import (
    Board,
    Called,
    FromSupervisor,
    FromWorker,
    HasEntered,
    HasLost,
    IsHere,
    Refused,
    WorkersEnd,
)
from parti.launch.frozen import show_stacks_on_demand

T = TypeVar("T")

_LOOK_S = 0.05
_LISTEN_S = 3600.0
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
        meeting_place: Callable[[int], KeyValue],
        failures: Path,
        device: torch.device,
        patience_s: float,
        num_cores: int,
        has_hosts: bool,
    ) -> None:
        """`meeting_place` gives, by its generation, the place where the members of a world meet.
        `has_hosts`: they may be of several hosts."""
        self._number = number
        self._meeting_place = meeting_place
        self._device = device
        self._patience_s = patience_s
        self._num_cores = num_cores
        self._has_hosts = has_hosts
        self._ledger = Ledger()
        self._newest: Called | None = None
        self._refused = -1
        self._inside: World | None = None
        """The world that was formed last."""
        self._settled_in: World | None = None
        self._pace = _Pace(line.board)
        show_stacks_on_demand(failures, number)
        # Last: from here on another thread may call `_leave`.
        self._line = Listener(line, self._leave) if has_hosts else line

    def first(self) -> World:
        """The first world, when all are here. Where hosts come and go, it may have begun."""
        self.is_here()
        wait_s = None if self._has_hosts else max(_START_S, self._patience_s)
        return self._enter(0, None, wait_s)

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
            after.neighbours.abandon()
            self.form(after, because)
        elif not self._is_beyond(after):
            # Where there are too few hosts, others come when they come.
            self._enter(
                after.generation, None, None if after.is_paused else _ANSWER_S + self._patience_s
            )
        assert self._inside is not None
        return self._inside

    def form(self, after: World, because: CommError) -> None:
        if not self._is_beyond(after):
            self._break_up(after, because)
            self._enter(
                after.generation, because, None if self._has_hosts else _ANSWER_S + self._patience_s
            )

    def _is_beyond(self, world: World) -> bool:
        return self._inside is not None and self._inside.generation > world.generation

    def _break_up(self, world: World, because: CommError) -> None:
        """Have nobody on another host wait for me in this world."""
        if world.across is not None:
            world.across.abort(f"rank {world.rank} is on its way to another world: {because}")
        missed = tuple(world.members[rank] for rank in because.ranks)
        self._line.send(HasLost(world.generation, missed))

    def _leave(self, called: Called) -> None:
        """In the listening thread: whoever waits for a host that is gone waits no more."""
        world = self._inside
        if world is not None and called.last_torn > world.generation and world.across is not None:
            world.across.abort("a host or a process is gone, and another world has been called.")

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
                return self._go_to(called)
            except PeerLost as lost:
                after, because = called.generation, lost

    def _go_to(self, called: Called) -> World:
        before = self._inside
        try:
            world = self._connect(called)
        except CommError as error:
            if not self._has_hosts:
                raise
            # A store, or a host, that cannot be reached: who decides on worlds will find out.
            missed = tuple(called.members[rank] for rank in error.ranks)
            self._line.send(HasLost(called.generation, missed))
            raise PeerLost(str(error)) from error
        self._inside = world
        if before is not None and before.across is not None:
            before.across.close()
        if self._has_hosts:
            try:
                # What came before `_leave` could know of this world.
                self._check_newest(called)
                world.compare_notes()
            except PeerLost as lost:
                self._break_up(world, lost)
                raise
        return world

    def _await(self, after: int, because: CommError | None, deadline_s: float | None) -> Called:
        """The newest world that I am called to."""
        while True:
            newest = self._newest
            if newest is not None and newest.generation > after and self._is_called_to(newest):
                return newest
            if because is not None and self._refused >= after:
                raise because
            if self._has_hosts:
                self._pace.board.waits(True)
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise because or CommTimeout(
                    f"process {self._number} waited in vain at the start for the others. One was "
                    "not started or is still loading; raise `patience_s` in the second case."
                )
            self._read(_LOOK_S)

    def _is_called_to(self, called: Called) -> bool:
        """One that has settled somewhere is no newcomer: if it is called as one, it is ahead of
        those who call, and will be given up."""
        is_again_new = self._settled_in is not None and self._number in called.joining
        return self._number in called.members and not is_again_new

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

        def check() -> None:
            self._check_newest(called)

        store = _UntilCalled(
            lambda: self._meeting_place(called.generation), check, is_patient=self._has_hosts
        )
        # Who joins waits for the end of the others' step, however long that takes.
        wait_s = math.inf if is_new or self._has_hosts else self._patience_s
        # The supervisors end those that others wait for in vain, and do so sooner.
        patience_s = _TIMES_AS_PATIENT * self._patience_s + _ANSWER_S
        world = connect(
            rank=rank,
            size=size,
            meet=meeting_in(store, rank, size, wait_s),
            device=self._device,
            patience_s=patience_s,
            num_cores=self._num_cores,
            silence_s=self._patience_s if self._has_hosts else None,
            check=check,
        )
        return dataclasses.replace(
            world,
            neighbours=Watched(world.neighbours, self._pace),
            across=None if world.across is None else WatchedAcross(world.across, self._pace.board),
            generation=called.generation,
            members=called.members,
            newcomers=called.joining,
            is_paused=called.is_paused,
            succession=self,
            ledger=self._ledger,
        )

    def _check_newest(self, called: Called) -> None:
        self._read(0.0)
        if self._newest is not None and self._newest.generation > called.generation:
            raise PeerLost("another world has been called meanwhile.")


class _UntilCalled:
    """A place to meet that nobody waits at when a newer world has been called."""

    def __init__(
        self, place: Callable[[], KeyValue], check: Callable[[], None], *, is_patient: bool
    ) -> None:
        """`is_patient`: it may be out of reach for a while. For how long is the supervisor's to
        say."""
        self._place = place
        self._check = check
        self._is_patient = is_patient
        self._opened: KeyValue | None = None

    def set(self, key: str, value: bytes) -> None:
        def put(inside: KeyValue) -> bool:
            inside.set(key, value)
            return True

        while not self._try(put):
            pass

    def get(self, key: str, deadline_s: float) -> bytes:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                found = self._try(lambda inside: inside.get(key, min(_LOOK_S, deadline_s)))
                if found is not None:
                    return found
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise

    def _try(self, ask: Callable[[KeyValue], T]) -> T | None:
        """None where it is out of reach."""
        try:
            if self._opened is None:
                self._opened = self._place()
            return ask(self._opened)
        except CommError:
            if not self._is_patient:
                raise
            self._check()
            time.sleep(_LOOK_S)
            return None


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


class Watched(Carrier):
    """Neighbours, with all that is said of progress on the board as well."""

    def __init__(self, inside: Neighbours, pace: _Pace) -> None:
        super().__init__(inside, told=pace.report, waits=pace.board.waits)


class WatchedAcross:
    """The way to other hosts, with all waiting on the board as well."""

    def __init__(self, inside: Across, board: Board) -> None:
        self._inside = inside
        self._board = board
        self.kind = inside.kind
        self.hosts = inside.hosts
        self.host = inside.host
        self.lanes = inside.lanes

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        self._board.waits(True)
        try:
            return self._inside.exchange(payload)
        finally:
            self._board.waits(False)

    def scatter_parts(
        self,
        lane: int,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Transfer:
        transfer = self._inside.scatter_parts(lane, received, sent, received_sizes, sent_sizes)
        return _WatchedTransfer(transfer, self._board)

    def gather_parts(self, lane: int, whole: torch.Tensor, part: torch.Tensor) -> Transfer:
        return _WatchedTransfer(self._inside.gather_parts(lane, whole, part), self._board)

    def abort(self, reason: str) -> None:
        self._inside.abort(reason)

    def close(self) -> None:
        self._inside.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _WatchedTransfer:
    inside: Transfer
    board: Board

    def wait(self) -> None:
        self.board.waits(True)
        try:
            self.inside.wait()
        finally:
            self.board.waits(False)


class Listener:
    """The line to the supervisor, read by a thread of its own: what is called for at once cannot
    wait until this process comes by."""

    def __init__(self, line: WorkersEnd, heard: Callable[[Called], None]) -> None:
        self._line = line
        self._heard = heard
        self._messages: queue.SimpleQueue[FromSupervisor] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="parti-line", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        self._line.send(message)

    def receive(self, wait_s: float) -> FromSupervisor | None:
        try:
            return self._messages.get(timeout=wait_s) if wait_s > 0 else self._messages.get(False)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while True:
            message = self._line.receive(_LISTEN_S)
            if message is None:
                time.sleep(_LOOK_S)  # the supervisor is gone, and this process soon
                continue
            self._messages.put(message)
            if isinstance(message, Called):
                self._heard(message)
