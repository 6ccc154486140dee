"""Watches the boards of workers, and ends those that stand still; with their stack, if they can.

A worker found stuck is asked for its stack, continued if it is stopped (a stopped process shows
nothing), and killed a moment later. Until it is dead it is a member like any other: nobody goes on
without it before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

from parti.launch.frozen import STACK_SIGNAL, Sight, is_stopped, read_stack, why_stuck
from parti.launch.spawn import Worker

_STACK_S = 0.3
"""How long a worker has for its stack."""
_POLL_S = 0.02


class Watch:
    """Which worker gave its last sign of life when."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._beats: dict[int, tuple[int, float]] = {}
        self._condemned: dict[int, tuple[Worker, float]] = {}

    def look(
        self, workers: Iterable[Worker], others: Iterable[Worker], patience_s: float
    ) -> list[Worker]:
        """Once in every turn of the loop; who is found stuck now. `others` have no part in the
        training yet: they may take their time, but not be stopped, or they would never come."""
        now_s = time.monotonic()
        before = set(self._condemned)
        alive = [worker for worker in workers if worker.is_alive]
        others_wait = any(worker.control.board.is_waiting for worker in alive)
        if len(alive) == 1 and is_stopped(alive[0].process.pid):
            # The last one that has the state is not given up because somebody has stopped it.
            alive[0].signal(signal.SIGCONT, to_group=False)
            return []
        for worker in alive:
            if worker.stuck is None:
                self._look_at(worker, patience_s, now_s, others_wait)
        for worker in others:
            if worker.is_alive and worker.stuck is None:
                if not is_stopped(worker.process.pid):
                    self._beats[worker.member] = worker.control.board.beat, now_s
                self._look_at(worker, patience_s, now_s, others_wait)
        found = [worker for key, (worker, _) in self._condemned.items() if key not in before]
        for member, (worker, until_s) in list(self._condemned.items()):
            if now_s >= until_s or read_stack(self._directory, member):
                del self._condemned[member]
                worker.signal(signal.SIGKILL)
        return found

    def _look_at(self, worker: Worker, patience_s: float, now_s: float, others_wait: bool) -> None:
        board = worker.control.board
        beat, since_s = self._beats.get(worker.member, (-1, now_s))
        if board.beat != beat:
            self._beats[worker.member] = board.beat, now_s
            return
        if now_s - since_s <= patience_s:
            return
        worker.stuck = why_stuck(
            Sight(
                phase=board.phase,
                step=board.step,
                silent_s=now_s - since_s,
                is_waiting=board.is_waiting,
                others_wait=others_wait,
                is_lenient=board.is_lenient,
                is_stopped=is_stopped(worker.process.pid),
            ),
            patience_s,
        )
        if worker.stuck is not None:
            self._condemned[worker.member] = worker, now_s + _STACK_S
            worker.signal(STACK_SIGNAL, to_group=False)
            worker.signal(signal.SIGCONT, to_group=False)

    def next_look_s(self, patience_s: float) -> float:
        """How long the loop may sleep."""
        return _POLL_S if self._condemned else patience_s / 4

    def stack_of(self, worker: Worker) -> str:
        return read_stack(self._directory, worker.member)
