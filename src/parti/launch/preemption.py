"""An orderly stop, as the supervisor of a host sees it: who asked for it, how far the workers are
with it, and until when. What workers do about it is in `stopping`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from parti.errors import Preempted
from parti.launch.control import Order, Stopped
from parti.launch.events import Asked, Events
from parti.launch.events import Stopped as StoppedEvent
from parti.launch.failure import signal_name
from parti.launch.spawn import Worker

SAME_S = 1.0
"""A scheduler may signal a supervisor twice at once: directly, and through its parent."""


class Preemption:
    """From the first word of it on. Times are given."""

    def __init__(self, grace_s: float, note: Callable[[str], None], record: Events) -> None:
        self._grace_s = grace_s
        self._note = note
        self._record = record
        self._first_term_s: float | None = None
        self.signal = 0
        """By which somebody asked for it; 0 if that was on another host."""
        self.until_s: float | None = None
        """The end of the grace; None as long as nobody has asked."""
        self.stopped: Stopped | None = None
        """What workers say when their state is saved."""

    def asks(self, number: int, alive: Sequence[Worker], now_s: float) -> bool:
        """A signal has come to the supervisor. Whether it is for an orderly stop; if not, the job
        is to end at once."""
        is_again = self._first_term_s is not None and now_s - self._first_term_s > SAME_S
        if number == signal.SIGTERM and self._first_term_s is None:
            self._first_term_s = now_s
        if number not in (signal.SIGTERM, signal.SIGUSR1):
            return False
        if number == signal.SIGTERM and is_again:
            return False
        if self.until_s is not None:
            return True
        if not _can_stop(alive):
            return False
        self._begin(number, f"{signal_name(number)} to the supervisor", now_s)
        return True

    def look(self, workers: Sequence[Worker], now_s: float) -> None:
        """Once in every turn: what workers have said of it."""
        for worker in workers:
            if worker.control.was_asked and self.until_s is None:
                number = worker.control.was_asked
                self._begin(number, f"{signal_name(number)} to rank {worker.rank}", now_s)
            if worker.control.stopped is not None and self.stopped is None:
                self._has_stopped(worker.control.stopped, now_s)
        if self.until_s is not None:
            for worker in workers:
                if worker.is_alive and worker.control.board.order is Order.GO_ON:
                    worker.control.board.command(Order.STOP)

    def _begin(self, number: int, why: str, now_s: float) -> None:
        self.signal, self.until_s = number, now_s + self._grace_s
        self._record.tell(Asked(why=why, grace_s=self._grace_s))
        self._note(
            f"{why}: all processes save their state after this step and end, within "
            f"{self._grace_s:g} s (--grace); a second SIGTERM ends them at once"
        )

    def _has_stopped(self, stopped: Stopped, now_s: float) -> None:
        self.stopped = stopped
        if self.until_s is None:  # asked on another host
            self.until_s = now_s + self._grace_s
        self._record.tell(
            StoppedEvent(step=stopped.step, directory=stopped.directory, problem=stopped.problem)
        )

    def is_pointless(self, alive: Sequence[Worker]) -> bool:
        """Those that were asked are through with the loop that they could have stopped in."""
        return self.until_s is not None and self.stopped is None and not _can_stop(alive)

    def is_late(self, now_s: float) -> bool:
        return self.until_s is not None and now_s >= self.until_s

    def ended_so(self, worker: Worker) -> bool:
        """This worker has ended as it should when it was asked to stop."""
        return worker.control.stopped is not None and worker.exit_code == Preempted.CODE

    @property
    def preempted(self) -> Preempted | None:
        """What the workers have raised."""
        said = self.stopped
        return None if said is None else Preempted(said.step, said.directory, said.problem)

    @property
    def words(self) -> str:
        """What a person is told in the end."""
        if self.stopped is None:
            return f"the checkpoint was not finished within {self._grace_s:g} s (--grace)"
        directory = Path(self.stopped.directory)
        if directory.is_relative_to(os.getcwd()):
            directory = directory.relative_to(os.getcwd())
        said = str(Preempted(self.stopped.step, str(directory), self.stopped.problem))
        return f"{signal_name(self.signal)}: {said}" if self.signal else said


def _can_stop(alive: Sequence[Worker]) -> bool:
    return any(worker.control.can_stop for worker in alive)
