"""Processes of one CPU host, talking through memory they all map.

Owns the control block (who has arrived, what each is doing, small mailboxes) and the regions that
gradients and weights live in. Knows nothing of steps, layouts or trees.

Every block is an anonymous file (`memfd`), reached by the peers through `/proc/<pid>/fd/<n>`. It
has no name, so nothing is left behind when all processes are killed, and it does not count against
the size of `/dev/shm` (64 MB in many containers).

A rank arrives at exchange k by writing its mailbox and then the number k. On x86-64 stores become
visible in program order, so whoever sees the number sees everything written before it; other
architectures use the process group instead (see `world.py`).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import torch

from parti.comm.protocol import Phase, Region
from parti.comm.wait import Sighting, describe_wait
from parti.errors import CommError, CommTimeout, PeerLost

_WORDS_BYTES = 4096
_MAILBOX_BYTES = 256 * 1024
_FRAME_HEADER_BYTES = 8
_BLOCK_BYTES = _WORDS_BYTES + 2 * _MAILBOX_BYTES
# Words of the control block, each on a cache line of its own where two ranks touch it at once.
_ARRIVED, _PHASE, _STEP, _SINCE_NS, _HAS_LEFT = 0, 8, 9, 10, 11

_YIELDS_WITH_A_CORE_EACH = 4000
_YIELDS_WHEN_CROWDED = 40
_NAP_S = 0.0001


class _Block:
    """An anonymous file, mapped. Created by one rank, opened by its neighbours."""

    __slots__ = ("fd", "memory")

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        try:
            # Not `mmap.mmap`, which keeps a descriptor for itself: on a host of 200 processes those
            # of all neighbours' blocks would pass the usual limit of 1024.
            self.memory = torch.from_file(
                f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            os.close(fd)
            raise CommError(
                f"cannot map {num_bytes / 2**20:.1f} MiB of shared memory: {error}. "
                "Raise the limit on address space (`ulimit -v`) or use fewer processes."
            ) from error

    @classmethod
    def create(cls, num_bytes: int) -> _Block:
        fd = os.memfd_create("parti", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            # Reserve now: a full memory is an error here, and a bus error at the first write later.
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise CommError(
                f"cannot reserve {num_bytes / 2**20:.1f} MiB of shared memory: {error.strerror}. "
                "Free memory on this host or use fewer processes."
            ) from error
        return cls(fd, num_bytes)

    @classmethod
    def open(cls, pid: int, fd: int, num_bytes: int) -> _Block:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost(
                f"cannot map the memory of process {pid} ({path}): {error.strerror}. "
                "It has ended, or the processes of this job run under different users."
            ) from error
        return cls(mine, num_bytes)

    def close_file(self) -> None:
        """Give the descriptor back; the mapping stays."""
        os.close(self.fd)


class SharedMemory:
    """A neighbourhood of processes on one host."""

    kind = "shared memory"

    def __init__(
        self,
        *,
        rank: int,
        ranks: tuple[int, ...],
        meet: Callable[[bytes], tuple[bytes, ...]],
        patience_s: float,
        num_cores: int,
    ) -> None:
        """`meet` is used once, to hand around where the control blocks are: mine in, all out."""
        self.ranks = ranks
        self.index = ranks.index(rank)
        self._rank = rank
        self._patience_s = patience_s
        crowded = len(ranks) > num_cores
        self._num_yields = _YIELDS_WHEN_CROWDED if crowded else _YIELDS_WITH_A_CORE_EACH
        block = _Block.create(_BLOCK_BYTES)
        addresses = [
            tuple(map(int, word.decode().split(":")))
            for word in meet(f"{os.getpid()}:{block.fd}".encode())
        ]
        self._pids = [pid for pid, _ in addresses]
        self._blocks = [
            block if i == self.index else _Block.open(pid, fd, _BLOCK_BYTES)
            for i, (pid, fd) in enumerate(addresses)
        ]
        bytes_of = [mapped.memory.numpy().data for mapped in self._blocks]
        self._words = [each[:_WORDS_BYTES].cast("q") for each in bytes_of]
        self._mail = [each[_WORDS_BYTES:] for each in bytes_of]
        self._mine = self._words[self.index]
        self._others = [i for i in range(len(ranks)) if i != self.index]
        self._arrivals = 0
        self._life = _Life([self._pids[i] for i in self._others])
        self.report(Phase.START, -1)
        self.exchange(b"")  # all have mapped all control blocks
        for mapped in self._blocks:
            mapped.close_file()

    def report(self, phase: Phase, step: int) -> None:
        self._mine[_PHASE] = phase
        self._mine[_STEP] = step
        self._mine[_SINCE_NS] = time.monotonic_ns()

    def check(self) -> None:
        gone = [i for i in self._others if self._is_gone(i)]
        if gone:
            names = ", ".join(str(self.ranks[i]) for i in gone)
            raise PeerLost(f"rank {self._rank}: rank {names} is gone, or has given up.")

    def abandon(self) -> None:
        self._mine[_HAS_LEFT] = 1

    def _is_gone(self, i: int) -> bool:
        return bool(self._words[i][_HAS_LEFT]) or not self._life.is_alive(self._pids[i])

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        size = len(payload)
        room = _MAILBOX_BYTES - _FRAME_HEADER_BYTES
        frames = self._exchange_frame(size, payload[:room])
        longest = max(total for total, _ in frames)
        if longest <= room:
            return tuple(frame for _, frame in frames)
        parts = [[frame] for _, frame in frames]
        for start in range(room, longest, room):
            for i, (_, frame) in enumerate(
                self._exchange_frame(size, payload[start : start + room], start)
            ):
                parts[i].append(frame)
        return tuple(b"".join(part) for part in parts)

    def _exchange_frame(self, total: int, frame: bytes, start: int = 0) -> list[tuple[int, bytes]]:
        # Two mailboxes take turns: nobody can be two exchanges ahead of a reader.
        base = (self._arrivals & 1) * _MAILBOX_BYTES
        mail = self._mail[self.index]
        mail[base : base + _FRAME_HEADER_BYTES] = total.to_bytes(_FRAME_HEADER_BYTES, "little")
        first = base + _FRAME_HEADER_BYTES
        if frame:
            mail[first : first + len(frame)] = frame
        self._arrive_and_wait()
        frames = []
        room = _MAILBOX_BYTES - _FRAME_HEADER_BYTES
        for box in self._mail:
            size = int.from_bytes(box[base:first], "little")
            here = min(max(size - start, 0), room)
            frames.append((size, bytes(box[first : first + here]) if here else b""))
        return frames

    def allocate(self, num_bytes: int) -> Region:
        block = _Block.create(max(num_bytes, 1))
        fds = [int(word) for word in self.exchange(str(block.fd).encode())]
        blocks = [
            block if i == self.index else _Block.open(self._pids[i], fd, max(num_bytes, 1))
            for i, fd in enumerate(fds)
        ]
        self.exchange(b"")  # all have mapped it
        for mapped in blocks:
            mapped.close_file()
        return Region(tuple(mapped.memory[:num_bytes] for mapped in blocks), self.index)

    def _arrive_and_wait(self) -> None:
        self._arrivals += 1
        target = self._arrivals
        self._mine[_ARRIVED] = target
        words = self._words
        yield_core = os.sched_yield
        num_yields = self._num_yields
        for i in self._others:
            their = words[i]
            tries = 0
            while their[_ARRIVED] < target:
                yield_core()
                tries += 1
                if tries > num_yields:
                    self._wait_long(target)
                    return

    def _wait_long(self, target: int) -> None:
        """The slow part of a wait: give the core away, watch for the dead, keep the deadline."""
        start = time.monotonic()
        naps = 0
        while True:
            missing = [i for i in self._others if self._words[i][_ARRIVED] < target]
            if not missing:
                return
            naps += 1
            if naps % 32 == 0:
                self._look(target, missing, time.monotonic() - start)
            time.sleep(_NAP_S)

    def _look(self, target: int, missing: list[int], waited_s: float) -> None:
        dead = [i for i in missing if self._is_gone(i)]
        # A peer may have arrived and ended between the two looks.
        dead = [i for i in dead if self._words[i][_ARRIVED] < target]
        if not dead and waited_s < self._patience_s:
            return
        sentence = describe_wait(
            rank=self._rank,
            operation=target,
            waited_s=waited_s,
            arrived=[r for i, r in enumerate(self.ranks) if i not in missing],
            missing=[self._sight(i) for i in dead or missing],
        )
        if dead:
            raise PeerLost(
                f"{sentence} Its process is gone: it was killed, or its script ended before that "
                "of the others."
            )
        raise CommTimeout(f"{sentence} Raise `patience_s` if this is expected.")

    def _sight(self, i: int) -> Sighting:
        words = self._words[i]
        return Sighting(
            rank=self.ranks[i],
            phase=Phase(words[_PHASE]),
            step=words[_STEP],
            age_s=(time.monotonic_ns() - words[_SINCE_NS]) / 1e9,
        )


class _Life:
    """Tells whether processes live, zombies counted as dead, without being their parent."""

    def __init__(self, pids: list[int]) -> None:
        self._fds: dict[int, int] = {}
        for pid in pids:
            try:
                self._fds[pid] = os.pidfd_open(pid)
            except OSError as error:
                raise PeerLost(f"process {pid} ended while the job was starting.") from error

    def is_alive(self, pid: int) -> bool:
        return not select.select([self._fds[pid]], [], [], 0)[0]

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
