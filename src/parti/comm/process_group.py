"""Between GPUs, and to compare with: torch's process groups.

Owns one group over all ranks for small exchanges, and the lanes: groups of one rank a host, along
which the hosts' sums of gradients travel. Groups are made directly, not through
`init_process_group`, so a user's own use of `torch.distributed` is not disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from parti.comm.hosts import lay_lanes, own_address
from parti.comm.rendezvous import Meeting
from parti.comm.wait import name_ranks
from parti.errors import CommError, CommTimeout, PeerLost

_FRAME_BYTES = 2048
_LENGTH_BYTES = 8


class ProcessGroup:
    def __init__(
        self,
        *,
        rank: int,
        groups: Sequence[Sequence[int]],
        meet: Meeting,
        device: torch.device,
        patience_s: float,
    ) -> None:
        """`groups[h]` are the ranks of host h, ascending."""
        self._rank = rank
        self._size = sum(len(group) for group in groups)
        self._timeout = timedelta(seconds=patience_s)
        self.kind = "NCCL" if device.type == "cuda" else "gloo"
        self.hosts = tuple(tuple(group) for group in groups)
        self.host = next(h for h, group in enumerate(groups) if rank in group)
        store, self._address = self._open_store(meet)
        self._everybody = self._gloo(PrefixStore("everybody", store), rank, self._size)
        self.lanes = lay_lanes(groups)
        self._lanes: dict[int, Any] = {}
        for lane, members in enumerate(self.lanes):
            if rank in members:
                make = self._nccl if device.type == "cuda" else self._gloo
                self._lanes[lane] = make(
                    PrefixStore(f"lane{lane}", store), members.index(rank), len(members)
                )

    def abort(self, reason: str) -> None:
        return None  # a group of torch ends by its own time-out

    def close(self) -> None:
        return None

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        room = _FRAME_BYTES - _LENGTH_BYTES
        frame = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:room]
        first = self._all_gather(frame, _FRAME_BYTES)
        lengths = [int.from_bytes(data[:_LENGTH_BYTES], "little") for data in first]
        heads = [data[_LENGTH_BYTES:] for data in first]
        rest = max(lengths) - room
        if rest <= 0:
            return tuple(head[:length] for head, length in zip(heads, lengths, strict=True))
        tails = self._all_gather(payload[room:], rest)
        return tuple(
            (head + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)
        )

    def scatter_parts(
        self,
        lane: int,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Guarded:
        work = self._guard(
            lambda: self._lanes[lane].alltoall_base(
                received, sent, list(received_sizes), list(sent_sizes)
            )
        )
        return Guarded(work, self)

    def gather_parts(self, lane: int, whole: torch.Tensor, part: torch.Tensor) -> Guarded:
        return Guarded(self._guard(lambda: self._lanes[lane]._allgather_base(whole, part)), self)

    def _all_gather(self, payload: bytes, size: int) -> list[bytes]:
        mine = torch.zeros(size, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        whole = torch.empty(size * self._size, dtype=torch.uint8)
        Guarded(self._guard(lambda: self._everybody._allgather_base(whole, mine)), self).wait()
        return [each.numpy().tobytes() for each in whole.view(-1, size)]

    def _guard(self, start: Callable[[], Any]) -> Any:
        """Turn what the backend raises into an error that says who waited for what."""
        started = time.monotonic()
        try:
            return start()
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            others = name_ranks(r for r in range(self._size) if r != self._rank)
            late = waited_s >= self._timeout.total_seconds() or "imed out" in str(error)
            kind = CommTimeout if late else PeerLost
            raise kind(
                f"rank {self._rank}: an exchange between hosts failed after {waited_s:.1f} s, with "
                f"{others} taking part: {str(error).splitlines()[0]}"
            ) from error

    def _open_store(self, meet: Meeting) -> tuple[Any, str]:
        """A store for the groups to find each other, hosted by rank 0 on a free port."""
        address = own_address()
        store = None
        if self._rank == 0:
            store = TCPStore(
                "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
        port = store.port if store is not None else 0
        word = meet("store", f"{address}:{port}".encode())[0].decode()
        host, _, found = word.rpartition(":")
        if store is None:
            store = TCPStore(
                host, int(found), is_master=False, wait_for_workers=False, timeout=self._timeout
            )
        return store, address

    def _gloo(self, store: Any, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = self._timeout
        try:
            return dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise CommError(
                f"rank {self._rank} cannot join a gloo group at {self._address}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _nccl(self, store: Any, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


class Guarded:
    """An operation under way; waiting for it speaks our errors."""

    def __init__(self, work: Any, group: ProcessGroup) -> None:
        self._work = work
        self._group = group

    def wait(self) -> None:
        self._group._guard(self._work.wait)
