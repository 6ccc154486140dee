"""Giving the state of a training to ranks that have just come, from one that has it.

On one host it goes through an anonymous file, which nobody but the takers can open by its process
and number, and which is gone with its last descriptor. A host on which nobody has the state gets it
from the first rank that has, piece by piece.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, cast

import torch

from parti.comm.world import World
from parti.errors import PeerLost

State = Mapping[str, Any]

_PIECE_BYTES = 1 << 22


def hand_over(world: World, state: Callable[[], State]) -> State | None:
    """Called by all ranks: those that are no newcomers give what `state` returns; newcomers get it,
    the others None."""
    old = [rank for rank in range(world.size) if world.members[rank] not in world.newcomers]
    hosts = (tuple(range(world.size)),) if world.across is None else world.across.hosts
    mine = next(host for host in hosts if world.rank in host)
    taken = _within_the_host(world, state, next((rank for rank in mine if rank in old), None))
    if any(not any(rank in old for rank in host) for host in hosts):
        sent = _between_hosts(world, state, old[0])
        if not any(rank in old for rank in mine):
            taken = sent
    return None if world.rank in old else taken


def _within_the_host(world: World, state: Callable[[], State], giver: int | None) -> State | None:
    """`giver`: the rank of this host that has the state, if there is one."""
    taken = None
    if world.rank == giver:
        with _anonymous_file() as (file, path):
            if _is_wanted(world):
                torch.save(dict(state()), file)
                file.flush()
            world.exchange(path.encode())
            world.exchange(b"")  # all have read it
        return None
    paths = world.exchange(b"")
    if giver is not None and world.members[world.rank] in world.newcomers:
        path = paths[giver].decode()
        try:
            # From a process of this job, through memory of its own.
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        except FileNotFoundError as error:
            raise PeerLost(f"rank {giver} ended while it gave its state ({path}).") from error
        taken = cast(State, loaded)
    world.exchange(b"")
    return taken


def _is_wanted(world: World) -> bool:
    """Whether a neighbour of this rank has just come."""
    return any(world.members[rank] in world.newcomers for rank in world.neighbours.ranks)


@contextmanager
def _anonymous_file() -> Iterator[tuple[IO[bytes], str]]:
    """A file, and the path by which others open it."""
    handle = os.memfd_create("parti-state", os.MFD_CLOEXEC)
    with os.fdopen(handle, "wb") as file:
        yield file, f"/proc/{os.getpid()}/fd/{handle}"


def _between_hosts(world: World, state: Callable[[], State], giver: int) -> State | None:
    """Everyone hears it; who needs it takes it."""
    data = b""
    if world.rank == giver:
        buffer = io.BytesIO()
        torch.save(dict(state()), buffer)
        data = buffer.getvalue()
    num_bytes = int(world.exchange(b"%d" % len(data))[giver])
    is_new = world.members[world.rank] in world.newcomers
    pieces = []
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = world.exchange(data[start : start + _PIECE_BYTES])[giver]
        if is_new:
            pieces.append(piece)
    if not is_new:
        return None
    # From a process of this job, over a connection that only its ranks know the token of.
    loaded = torch.load(io.BytesIO(b"".join(pieces)), map_location="cpu", weights_only=False)
    return cast(State, loaded)
