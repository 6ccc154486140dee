"""The world as one rank sees it: its neighbours, and the way to everybody else.

`connect` decides which communication joins whom: shared memory within a CPU host on x86-64, our own
TCP connections between hosts and wherever memory cannot be shared, a process group for GPUs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from parti.comm.ledger import Ledger
from parti.comm.process_group import ProcessGroup
from parti.comm.protocol import Across, Neighbours
from parti.comm.rendezvous import Meeting
from parti.comm.shared_memory import SharedMemory
from parti.comm.solo import Solo
from parti.comm.tcp import Tcp
from parti.errors import CommError, PeerLost


class Succession(Protocol):
    """Which world comes after this one, when somebody is lost or has come."""

    @property
    def recovers(self) -> bool:
        """Whether there may be a world after this one at all."""
        ...

    def next(self, after: World, because: CommError | None) -> World:
        """Wait for a newer world with this process in it, and connect to its ranks. Called by all
        who live; raises `because` where a lost rank is the end of the job."""
        ...

    def form(self, after: World, because: PeerLost) -> None:
        """Connect to the ranks of that world, and compare notes; `next` will give it."""
        ...

    def join(self, after: World) -> World:
        """Wait for a place in a world that trains already."""
        ...

    def current(self, world: World) -> World:
        """The world that this process is in by now, if it was in `world`."""
        ...

    def is_called(self, after: World) -> bool:
        """Whether a newer world waits to be formed at a step's end. Never waits."""
        ...

    def settled(self, world: World) -> None:
        """All have settled in this world: from now on it counts."""
        ...


class OnlyWorld:
    """No world comes after this one: a lost rank is the end of the job."""

    recovers = False

    def next(self, after: World, because: CommError | None) -> World:
        raise because or CommError("there is no newer world to go to.")

    def form(self, after: World, because: PeerLost) -> None:
        raise because

    def join(self, after: World) -> World:
        return after

    def current(self, world: World) -> World:
        return world

    def is_called(self, after: World) -> bool:
        return False

    def settled(self, world: World) -> None:
        return None


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    neighbours: Neighbours
    across: Across | None = None
    order: tuple[int, ...] = (0,)
    """All ranks, host by host."""
    num_hosts: int = 1
    patience_s: float = 60.0
    generation: int = 1
    members: tuple[int, ...] = (0,)
    """Who the ranks are: a number for each process that is never given to another."""
    newcomers: tuple[int, ...] = ()
    """Those of the members who have to be given the state of the training."""
    is_paused: bool = False
    """Too few hosts are there: its ranks stand still between two steps until the next world."""
    succession: Succession = field(default_factory=OnlyWorld, repr=False, compare=False)
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.members) != self.size:
            object.__setattr__(self, "members", tuple(range(self.size)))

    @property
    def member(self) -> int:
        """Who this rank is."""
        return self.members[0] if self.size == 1 else self.members[self.rank]

    @property
    def kind(self) -> str:
        kinds = [self.neighbours.kind] if len(self.neighbours.ranks) > 1 else []
        if self.across is not None:
            kinds.append(self.across.kind)
        return " + ".join(kinds) or "none"

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        """Give mine, get everyone's, in rank order. Also a barrier."""
        return self._exchange(payload, commits=False)

    def commit(self) -> None:
        """Wait until all ranks have come so far that the step can be finished without any one of
        them. Within one host an exchange has that effect; the others need one of its own."""
        if self.across is not None:
            self._exchange(b"", commits=True)

    def _exchange(self, payload: bytes, *, commits: bool) -> tuple[bytes, ...]:
        if self.across is None:
            return self.neighbours.exchange(payload)
        return self.ledger.exchange(
            self.across,
            payload,
            commits=commits,
            go_on=functools.partial(self.succession.form, self),
        )

    def compare_notes(self) -> None:
        """Let those who missed the last exchange of the world before have it."""
        through = self.neighbours if self.across is None else self.across
        is_new = tuple(member in self.newcomers for member in self.members)
        self.ledger.compare(through, is_new, self.rank)

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the values that rank 0 holds, if they differ anywhere."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(_bytes(tensor))
        if len(set(self.exchange(digest.digest()))) == 1:
            return
        for tensor in tensors:
            sent = self.exchange(_bytes(tensor) if self.rank == 0 else b"")[0]
            flat = torch.frombuffer(bytearray(sent), dtype=torch.uint8).view(tensor.dtype)
            tensor.copy_(flat.view(tensor.shape))


def connect(
    *,
    rank: int,
    size: int,
    meet: Meeting,
    device: torch.device,
    patience_s: float,
    num_cores: int,
    silence_s: float | None = None,
    check: Callable[[], None] | None = None,
) -> World:
    """Find out who shares memory with whom, and join them. `silence_s`: after so long without a
    sign of life a rank on another host counts as lost. `check` is called while ranks of other
    hosts are waited for, and raises where they will not come."""
    if size == 1:
        return World(0, 1, Solo(0, device))
    hosts = meet("host", host_identity(device, rank).encode())
    together = tuple(other for other in range(size) if hosts[other] == hosts[rank])
    neighbours: Neighbours = Solo(rank, device)
    if len(together) > 1:

        def meet_neighbours(mine: bytes) -> tuple[bytes, ...]:
            everyones = meet("memory", mine)
            return tuple(everyones[other] for other in together)

        neighbours = SharedMemory(
            rank=rank,
            ranks=together,
            meet=meet_neighbours,
            patience_s=patience_s,
            num_cores=num_cores,
        )
    else:
        meet("memory", b"")
    order = list(dict.fromkeys(hosts))
    if len(order) == 1:
        return World(rank, size, neighbours, None, together, 1, patience_s)
    groups = [[r for r in range(size) if hosts[r] == host] for host in order]
    across: Across
    if device.type == "cpu":
        across = Tcp(
            rank=rank,
            groups=groups,
            meet=meet,
            patience_s=patience_s,
            silence_s=silence_s,
            check=check,
        )
    else:
        across = ProcessGroup(
            rank=rank, groups=groups, meet=meet, device=device, patience_s=patience_s
        )
    in_order = tuple(other for group in groups for other in group)
    return World(rank, size, neighbours, across, in_order, len(groups), patience_s)


def host_identity(device: torch.device, rank: int) -> str:
    """Equal for ranks that can map one another's memory, different for all others.

    The boot tells machines apart, the network namespace tells hosts on one machine apart, and the
    process namespace tells containers apart that cannot see one another's processes.
    """
    sharing = device.type == "cpu" and sys.platform == "linux"
    if not sharing or platform.machine() not in ("x86_64", "AMD64"):
        return f"alone:{rank}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return ":".join((boot, *spaces, str(os.getuid())))


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().tobytes()
