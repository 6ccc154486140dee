"""What the supervisors of a job agree on. On one host there is nobody to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from parti.launch.failure import Ending


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

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

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
