"""Giving the state of a training to ranks that have just come, from one that has it.

On one host it goes through an anonymous file, which nobody but the takers can open by its process
and number, and which is gone with its last descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from parti.comm.world import World
from parti.errors import PeerLost


def hand_over(world: World, state: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Called by all ranks: the first that is no newcomer gives what `state` returns; newcomers get
    it, the others None."""
    is_new = [member in world.newcomers for member in world.members]
    giver = is_new.index(False)
    if world.rank == giver:
        handle = os.memfd_create("parti-state", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(handle), "wb") as file:
                torch.save(dict(state()), file)
            world.exchange(f"/proc/{os.getpid()}/fd/{handle}".encode())
            world.exchange(b"")  # all have read it
        finally:
            os.close(handle)
        return None
    path = world.exchange(b"")[giver].decode()
    taken = None
    if is_new[world.rank]:
        try:
            # From a process of this job, through memory of its own.
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        except FileNotFoundError as error:
            raise PeerLost(f"rank {giver} ended while it gave its state ({path}).") from error
        taken = cast(Mapping[str, Any], loaded)
    world.exchange(b"")
    return taken
