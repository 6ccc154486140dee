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
from parti.comm.solo import Solo
from parti.comm.wait import Sighting, describe_wait
from parti.comm.world import World
from parti.errors import CommError, CommTimeout, PeerLost

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

    def leave(self, index: int) -> None:
        with self.condition:
            self.gone.add(index)
            if self.turn == index:
                self.turn = None
            self.condition.notify_all()


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

    def check(self) -> None:
        return None  # a thread that waits holds no baton, so nobody waits in another way

    def abandon(self) -> None:
        self._hall.leave(self.index)

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


class Threads:
    """The ranks of a test over all their worlds: who lives, and which hall comes after which."""

    def __init__(self, size: int, patience_s: float) -> None:
        self.patience_s = patience_s
        self._condition = threading.Condition()
        self._living = set(range(size))
        self._worlds: list[tuple[Hall, tuple[int, ...]]] = [(Hall(size), tuple(range(size)))]
        self._waiting: set[int] = set()

    def world(self, member: int, generation: int = 1) -> World:
        hall, members = self._worlds[generation - 1]
        if len(members) == 1:
            return World(
                0,
                1,
                Solo(),
                generation=generation,
                members=members,
                succession=ThreadSuccession(self, member),
            )
        comm = Memory(hall, members.index(member), self.patience_s)
        size = len(members)
        return World(
            rank=comm.index,
            size=size,
            neighbours=comm,
            order=tuple(range(size)),
            patience_s=self.patience_s,
            generation=generation,
            members=members,
            succession=ThreadSuccession(self, member),
        )

    def next(self, member: int) -> World:
        """The world of all who live, when all of them are here."""
        with self._condition:
            generation = len(self._worlds)
            self._waiting.add(member)
            self._condition.notify_all()
            while len(self._worlds) == generation:
                if self._waiting >= self._living:
                    members = tuple(sorted(self._living))
                    self._worlds.append((Hall(len(members)), members))
                    self._waiting = set()
                    self._condition.notify_all()
                elif not self._condition.wait(self.patience_s):
                    raise CommTimeout(f"only {sorted(self._waiting)} came to the next world.")
        world = self.world(member, generation + 1)
        if isinstance(world.neighbours, Memory):
            world.neighbours.enter()
        return world

    def leave(self, member: int) -> None:
        """A thread has ended, in whatever way."""
        with self._condition:
            self._living.discard(member)
            self._condition.notify_all()
        for hall, members in self._worlds:
            if member in members:
                hall.leave(members.index(member))


class ThreadSuccession:
    """The succession of worlds as one of the threads sees it."""

    recovers = True

    def __init__(self, threads: Threads, member: int) -> None:
        self._threads = threads
        self._member = member

    def next(self, after: World, because: CommError | None) -> World:
        return self._threads.next(self._member)

    def form(self, after: World, because: PeerLost) -> None:
        raise because

    def join(self, after: World) -> World:
        raise AssertionError("threads are there from the beginning")

    def current(self, world: World) -> World:
        return world

    def is_called(self, after: World) -> bool:
        return False

    def settled(self, world: World) -> None:
        return None


class Killed(BaseException):
    """Ends the thread of a rank as SIGKILL ends a process: nothing of the rank's own catches it."""


def run_ranks(
    size: int, body: Callable[[World], T], patience_s: float = 30.0
) -> Sequence[T | None]:
    """Run `body` once for each rank, each in a thread; return the results in rank order, None of
    those who were killed.

    The first failure in time is raised, the others are its consequences.
    """
    ranks = Threads(size, patience_s)
    results: list[T | None] = [None] * size
    failures: list[BaseException] = []

    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        # OpenMP keeps its number of threads for each thread; kernels round differently with it.
        torch.set_num_threads(num_threads)
        world = ranks.world(rank)
        if isinstance(world.neighbours, Memory):
            world.neighbours.enter()
        try:
            results[rank] = body(world)
        except Killed:
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            ranks.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
