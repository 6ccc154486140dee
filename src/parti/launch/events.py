"""What happens to the processes of a run, a line of JSON each, for whoever looks at it later
(`parti doctor`; the format is in docs/records.md). No torch.

A line is written at once and whole, so what was written survives the supervisor too. A file that
cannot be written is told once and stops nothing. As long as the supervisor lives it holds a lock on
the file, shared with other writers: so a reader knows whether the run goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from parti.comm.phase import Phase
from parti.launch.spawn import Worker


class Began(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="began"):
    """A supervisor is about to start the processes of its host."""

    job: str
    host: str
    node_rank: int
    pid: int
    """The supervisor's."""
    world_size: int
    """At first, over all hosts."""
    clock_s: float
    """CLOCK_MONOTONIC of this host at the time from which `at_s` counts."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="started"):
    member: int
    rank: int
    pid: int
    joins: bool
    """It is to take the place of a lost one."""
    is_spare: bool


class Activated(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="activated"):
    """A spare is to take a place."""

    member: int
    rank: int


class Called(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="called"):
    """A world, with its members in the order of their ranks."""

    generation: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    why: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="settled"):
    """The world that was called counts."""

    generation: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process is, by its own last word."""

    member: int
    rank: int
    phase: str
    step: int
    for_s: float
    """Since it said so."""
    is_waiting: bool
    """For others that have not come yet."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="seen"):
    """Where all processes of this host are, at a moment when that may matter."""

    why: str
    places: tuple[Place, ...]


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lost"):
    """A process has ended by itself, and not as it should."""

    member: int
    rank: int
    pid: int
    how: str
    is_consequence: bool
    """It said only that another one is gone or late."""
    phase: str | None
    step: int | None
    for_s: float | None
    """How long it had been in that phase."""
    stack: str | None


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="asked"):
    """The run is to save its state and end."""

    why: str
    grace_s: float


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    """All processes have saved their state, and end."""

    step: int
    """How many steps have been taken."""
    directory: str
    problem: str
    """Why the state could not be saved; empty if it could."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    exit_code: int
    reason: str


Event: TypeAlias = (
    Began | Started | Activated | Called | Settled | Seen | Lost | Asked | Stopped | Ended
)


class Events(Protocol):
    """Where events are kept."""

    def tell(self, event: Event) -> None: ...

    def close(self) -> None: ...


class NoEvents:
    """Keeps nothing."""

    def tell(self, event: Event) -> None:
        return None

    def close(self) -> None:
        return None


class EventFile:
    """A file that events are added to."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        """`note` tells a person, once, if an event cannot be written."""
        self._path = path
        self._note = note
        self._has_told = False
        self._is_torn = False
        self._clock_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    @property
    def clock_s(self) -> float:
        """From here `at_s` counts."""
        return self._clock_s

    def tell(self, event: Event) -> None:
        at_s = round(time.monotonic() - self._clock_s, 6)
        content = {"time": time.time(), "at_s": at_s, **msgspec.to_builtins(event)}
        # Behind half a line, which a full disk has left, a whole one begins.
        line = b"\n" * self._is_torn + self._encoder.encode(content) + b"\n"
        try:
            num_written = os.write(self._fd, line)
        except OSError as error:
            self._complain(error.strerror or str(error))
            return
        self._is_torn = num_written < len(line)
        if self._is_torn:
            self._complain("no space left")

    def close(self) -> None:
        os.close(self._fd)

    def _complain(self, problem: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._note(f"{self._path} cannot be written ({problem}); the run goes on")


def keep_events(path: Path, begin: Callable[[float], Began], note: Callable[[str], None]) -> Events:
    """Events in this file, the first of which is what `begin` gives for the clock's time."""
    try:
        file = EventFile(path, note)
    except OSError as error:
        note(f"{path} cannot be written ({error.strerror}); the run goes on")
        return NoEvents()
    file.tell(begin(file.clock_s))
    return file


def places(workers: Iterable[Worker]) -> tuple[Place, ...]:
    """Where those are who live and have said so."""
    found = [place_of(worker) for worker in workers if worker.is_alive]
    return tuple(place for place in found if place is not None)


def place_of(worker: Worker) -> Place | None:
    """Where a process is, or was; None if it has said nothing."""
    board = worker.control.board
    if board.beat == 0:
        return None
    return Place(
        member=worker.member,
        rank=worker.rank,
        phase=Phase(board.phase).name.lower(),
        step=board.step,
        for_s=round(time.monotonic() - board.since_s, 6),
        is_waiting=board.is_waiting,
    )


def loss_of(worker: Worker, how: str, stack: str, *, is_consequence: bool) -> Lost:
    """The event of a process that has ended."""
    place = place_of(worker)
    return Lost(
        member=worker.member,
        rank=worker.rank,
        pid=worker.process.pid,
        how=how,
        is_consequence=is_consequence,
        phase=None if place is None else place.phase,
        step=None if place is None else place.step,
        for_s=None if place is None else place.for_s,
        stack=stack or None,
    )
