"""Ranks as threads of one process, for tests and for debugging a large job on one core.

Only the rank that holds the baton runs; it hands the baton on when it has to wait. So ranks take
turns in a fixed order, global random generators belong to whoever runs, and every run of a test is
the same run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from parti.comm.protocol import Phase, Region
from parti.comm.wait import Sighting, describe_wait
from parti.errors import CommTimeout, PeerLost

T = TypeVar("T")


class Hall:
    """What the threads of one world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.turn: int | None = None
        self.arrived = [0] * size
        self.gone: set[int] = set()
        self.letters: dict[int, list[bytes]] = {}
        self.memory: dict[int, list[torch.Tensor]] = {}
        self.words = [(Phase.START, -1, time.monotonic()) for _ in range(size)]


class Memory:
    """One rank's end of the hall."""

    kind = "memory"

    def __init__(self, hall: Hall, rank: int, patience_s: float = 30.0) -> None:
        self.ranks = tuple(range(hall.size))
        self.index = rank
        self._hall = hall
        self._patience_s = patience_s

    def report(self, phase: Phase, step: int) -> None:
        self._hall.words[self.index] = (phase, step, time.monotonic())

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        hall = self._hall
        number = hall.arrived[self.index]
        letters = hall.letters.setdefault(number, [b""] * hall.size)
        letters[self.index] = payload
        self._wait_for_all(number + 1)
        hall.letters.pop(number - 2, None)
        return tuple(letters)

    def allocate(self, num_bytes: int) -> Region:
        hall = self._hall
        number = hall.arrived[self.index]
        views = hall.memory.setdefault(number, [torch.empty(0)] * hall.size)
        views[self.index] = torch.zeros(num_bytes, dtype=torch.uint8)
        self._wait_for_all(number + 1)
        hall.memory.pop(number - 2, None)
        return Region(tuple(views), self.index)

    def _wait_for_all(self, target: int) -> None:
        hall = self._hall
        deadline = time.monotonic() + self._patience_s
        with hall.condition:
            hall.arrived[self.index] = target
            self._pass_baton()
            while True:
                missing = [r for r in self.ranks if hall.arrived[r] < target]
                if not missing and hall.turn is None:
                    hall.turn = self.index
                    return
                dead = hall.gone.intersection(missing)
                left = deadline - time.monotonic()
                if (dead and hall.turn is None) or left <= 0:
                    raise self._complaint(target, sorted(dead) or missing, bool(dead))
                hall.condition.wait(left)

    def _complaint(self, target: int, missing: list[int], dead: bool) -> PeerLost | CommTimeout:
        now = time.monotonic()
        words = self._hall.words
        sentence = describe_wait(
            rank=self.index,
            operation=target,
            waited_s=self._patience_s,
            arrived=[r for r in self.ranks if r not in missing],
            missing=[
                Sighting(rank=r, phase=words[r][0], step=words[r][1], age_s=now - words[r][2])
                for r in missing
            ],
        )
        return PeerLost(f"{sentence} It has ended.") if dead else CommTimeout(sentence)

    def _pass_baton(self) -> None:
        if self._hall.turn == self.index:
            self._hall.turn = None
        self._hall.condition.notify_all()

    def enter(self) -> None:
        with self._hall.condition:
            while self._hall.turn is not None:
                self._hall.condition.wait()
            self._hall.turn = self.index

    def leave(self) -> None:
        with self._hall.condition:
            self._hall.gone.add(self.index)
            self._pass_baton()


def run_ranks(size: int, body: Callable[[Memory], T], patience_s: float = 30.0) -> Sequence[T]:
    """Run `body` once for each rank, each in a thread; return the results in rank order.

    The first failure in time is raised, the others are its consequences.
    """
    hall = Hall(size)
    results: list[T | None] = [None] * size
    failures: list[BaseException] = []

    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        # OpenMP keeps its number of threads for each thread; kernels round differently with it.
        torch.set_num_threads(num_threads)
        comm = Memory(hall, rank, patience_s)
        comm.enter()
        try:
            results[rank] = body(comm)
        except BaseException as error:
            failures.append(error)
        finally:
            comm.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]
