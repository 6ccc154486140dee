"""Between CPU hosts: our own TCP connections.

Every pair of ranks has a connection for small exchanges and signs of life, and the ranks of a lane
one more for each pair, along which the hosts' sums of gradients travel. Unlike a process group of
torch it can be aborted from any thread, and its errors say who is missing (`courier.py`).

Owns what the operations are; how bytes move is the courier's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from parti.comm.courier import Courier
from parti.comm.hosts import lay_lanes
from parti.comm.joining import join
from parti.comm.links import CONTROL, Frame, Header, Kind, Place
from parti.comm.operations import Operation
from parti.comm.rendezvous import Meeting


class Tcp:
    kind = "TCP"

    def __init__(
        self,
        *,
        rank: int,
        groups: Sequence[Sequence[int]],
        meet: Meeting,
        patience_s: float,
        silence_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`groups[h]` are the ranks of host h, ascending. `meet` is used once. `silence_s`: after
        so long without a sign of life a rank counts as lost. `check` is called while others are
        waited for here, and raises where they will not come."""
        self._rank = rank
        self._size = sum(len(group) for group in groups)
        self.hosts = tuple(tuple(group) for group in groups)
        self.host = next(h for h, group in enumerate(groups) if rank in group)
        self.lanes = lay_lanes(groups)
        wanted = [(peer, CONTROL) for peer in range(self._size)]
        for lane, members in enumerate(self.lanes):
            wanted += [(peer, lane) for peer in members if rank in members]
        wanted = [(peer, lane) for peer, lane in wanted if peer != rank]
        links = join(
            rank=rank, wanted=wanted, meet=meet, patience_s=silence_s or patience_s, check=check
        )
        self._links = {(link.lane, link.peer): link for link in links}
        self._num_begun = [0] * len(self.lanes)
        self._courier = Courier(rank=rank, links=links, patience_s=patience_s, silence_s=silence_s)
        # Also at the end of the script: a rank that just vanishes is taken for a killed one.
        self._finalizer = weakref.finalize(self, self._courier.close)

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        letters = self._courier.exchange(payload)
        return tuple(
            payload if rank == self._rank else bytes(letters[rank]) for rank in range(self._size)
        )

    def scatter_parts(
        self,
        lane: int,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Underway:
        return self._begin(
            Kind.SCATTER, lane, _parts(sent, sent_sizes), _parts(received, received_sizes)
        )

    def gather_parts(self, lane: int, whole: torch.Tensor, part: torch.Tensor) -> Underway:
        num_members = len(self.lanes[lane])
        sizes = [part.numel()] * num_members
        return self._begin(Kind.GATHER, lane, [part] * num_members, _parts(whole, sizes))

    def abort(self, reason: str) -> None:
        """Have every operation fail, here and on the other ranks. From any thread, at once."""
        self._courier.abort(reason)

    def close(self) -> None:
        """Take leave of the others. After a failure: give up the memory of what was under way."""
        self._finalizer()

    def _begin(
        self, kind: Kind, lane: int, there: list[torch.Tensor], here: list[torch.Tensor]
    ) -> Underway:
        members = self.lanes[lane]
        me = self.host
        here[me].copy_(there[me])
        number = self._num_begun[lane]
        self._num_begun[lane] += 1
        # Beginning behind me, so that not all send to the same member first.
        order = [(me + step) % len(members) for step in range(1, len(members))]
        peers = [members[i] for i in order]
        operation = Operation(
            f"{kind.name.lower()} {number} on lane {lane}", number, unsent=peers, unreceived=peers
        )
        work = []
        for i, peer in zip(order, peers, strict=True):
            memory = _bytes_of(here[i])
            place = Place(Header(kind, number, len(memory)), memory, operation)
            frame = Frame(kind, number, _bytes_of(there[i]), operation)
            work.append((self._links[lane, peer], frame, place))
        self._courier.begin(operation, work)
        return Underway(self._courier, operation)


@dataclass(frozen=True, slots=True)
class Underway:
    """A transfer under way. Its tensors belong to the courier until it has been waited for."""

    courier: Courier
    operation: Operation

    def wait(self) -> None:
        self.courier.wait(self.operation)


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    if sum(sizes) != tensor.numel():
        raise ValueError(
            f"sizes {list(sizes)} add up to {sum(sizes)} elements; the tensor has "
            f"{tensor.numel()}. Parts must follow one another and fill it."
        )
    ends = accumulate(sizes)
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    return tensor.detach().view(torch.uint8).numpy().data
