"""What the supervisors of a job agree on. On one host there is nobody to agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from parti.launch.failure import Ending
from parti.launch.register import LocalRegister, Register


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks of a job lie on its hosts: in order of the nodes, without gaps."""

    job: str
    name: str
    """The name of the run and its directory."""
    node_rank: int
    hosts: tuple[str, ...]
    """The name of each node."""
    local_counts: tuple[int, ...]
    """The number of processes of each node."""
    rendezvous: str | None
    """Where workers of several hosts meet; None on one host."""

    is_elastic: bool = False
    """Hosts come and go: ranks and nodes are only names, and as many as there may be."""

    @property
    def num_nodes(self) -> int:
        return len(self.local_counts)

    @property
    def num_local(self) -> int:
        return self.local_counts[self.node_rank]

    @property
    def world_size(self) -> int:
        return sum(self.local_counts)

    @property
    def first_rank(self) -> int:
        return sum(self.local_counts[: self.node_rank])


class Kind(Enum):
    SUCCESS = "success"
    STOPPED = "stopped"
    """All workers have saved their state when they were asked to stop, and have ended."""
    FAILURE = "failure"
    """A worker failed."""
    SIGNAL = "signal"
    """A supervisor was told to stop."""
    LOST = "lost"
    """A supervisor, or its host, is gone."""
    OUT = "out"
    """The others go on without this host. Told to nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The end of a job on all hosts, as the node where it happened tells it."""

    kind: Kind
    node_rank: int
    host: str = ""
    ending: Ending | None = None
    signal: int = 0
    words: str = ""
    """What else there is to tell."""


class Peers(Protocol):
    """The other supervisors of the job."""

    @property
    def layout(self) -> Layout: ...

    @property
    def number(self) -> int:
        """Of this host, in the roll."""
        ...

    @property
    def can_lose(self) -> bool:
        """Whether the job goes on without a process of this host that is lost."""
        ...

    def register(self, num_spares: int) -> Register:
        """Where the roll of this host's processes lies."""
        ...

    def leave(self) -> None:
        """Have the others go on without this host."""
        ...

    @property
    def has_left(self) -> bool:
        """It was asked to, and has."""
        ...

    @property
    def why_out(self) -> str:
        """Why the others go on without it, for a person."""
        ...

    @property
    def waits_for(self) -> int | None:
        """The file descriptor that becomes readable when `poll()` has news."""

    def poll(self) -> Announcement | None:
        """The job's end, if anybody has announced it."""

    def announce(self, announcement: Announcement) -> Announcement:
        """Announce the job's end; the announcement that was first."""

    def succeed(self, announcement: Announcement) -> Announcement | None:
        """All workers of this node have ended well. The job's end, if they were the last: what is
        announced then."""

    def finish(self, failures: Sequence[Ending]) -> tuple[Ending, ...]:
        """Exchange what failed here, and leave. The failures of the others, as far as known."""


class OneHost:
    """No others."""

    number = 0
    can_lose = True
    has_left = False
    why_out = ""

    def __init__(self, layout: Layout, note: Callable[[str], None]) -> None:
        self._layout = layout
        self._note = note

    def register(self, num_spares: int) -> Register:
        return LocalRegister(self._layout.num_local, num_spares)

    def leave(self) -> None:
        self._note("this host cannot leave: there is no other to go on")

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def waits_for(self) -> int | None:
        return None

    def poll(self) -> Announcement | None:
        return None

    def announce(self, announcement: Announcement) -> Announcement:
        return announcement

    def succeed(self, announcement: Announcement) -> Announcement | None:
        return announcement

    def finish(self, failures: Sequence[Ending]) -> tuple[Ending, ...]:
        return ()
