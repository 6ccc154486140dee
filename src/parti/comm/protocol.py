"""The two small protocols that everything between ranks goes through. No implementation here.

A *neighbourhood* is the set of ranks that can read one another's memory: the processes of one CPU
host, the threads of one test, or a single rank. Between neighbourhoods there is an `Across`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from parti.comm.phase import Phase as Phase


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one size on every neighbour. `views[i]` is neighbour i's, as flat bytes."""

    views: tuple[torch.Tensor, ...]
    index: int

    @property
    def mine(self) -> torch.Tensor:
        return self.views[self.index]


class Neighbours(Protocol):
    """Ranks that can read one another's memory. All of them call the same methods in one order."""

    @property
    def kind(self) -> str:
        """A word for the run's header: 'shared memory', 'memory', 'none'."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers in the world, ascending."""
        ...

    @property
    def index(self) -> int:
        """My place in `ranks`."""
        ...

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        """Give mine, get everyone's, in order. Also a barrier: writes made before it are seen."""
        ...

    def allocate(self, num_bytes: int) -> Region:
        """Zeroed memory of the same size on every neighbour."""
        ...

    def report(self, phase: Phase, step: int) -> None:
        """Leave a word on what I am doing, for whoever may wait for me."""
        ...

    def check(self) -> None:
        """For who waits for a neighbour in its own way: PeerLost if one is gone or has given up."""
        ...

    def abandon(self) -> None:
        """I come to no exchange of this neighbourhood any more; whoever waits for me is told."""
        ...


class Transfer(Protocol):
    """An operation under way between hosts."""

    def wait(self) -> None: ...


class Across(Protocol):
    """Between neighbourhoods: connections of all ranks, and lanes of one rank a host."""

    @property
    def kind(self) -> str: ...

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        ...

    @property
    def host(self) -> int:
        """My host's place in `hosts`."""
        ...

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks along each lane, one for each host."""
        ...

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        """Over all ranks of the world, in rank order."""
        ...

    def scatter_parts(
        self,
        lane: int,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Transfer:
        """Each member of the lane sends slice j of `sent` to member j. Sizes count elements."""
        ...

    def gather_parts(self, lane: int, whole: torch.Tensor, part: torch.Tensor) -> Transfer:
        """Every member's equal part, one after the other, into `whole` on every member."""
        ...

    def abort(self, reason: str) -> None:
        """Have every operation fail, here and on the other ranks. From any thread, at once."""
        ...

    def close(self) -> None:
        """Let go of connections and memory."""
        ...
