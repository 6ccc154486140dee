"""The wish that a worker stop in good order: who may utter it, and when it is heard.

While a loop with checkpoints is under way, SIGTERM and SIGUSR1 do not end the process: they are
noted, all ranks learn of it in the letters of the next step, save the state and end. A supervisor
of ours writes the same wish on the worker's board. Knows of steps and checkpoints nothing.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from parti.errors import Preempted
from parti.launch.control import CanStop, Order, Stopped, WasAsked
from parti.launch.environment import grace_s
from parti.launch.failure import signal_name
from parti.launch.worker import line

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""What Kubernetes and Slurm send before they end a job."""
SAME_S = 1.0
"""A scheduler signals a process and its parent, which passes it on: within this time that is one
and the same."""

Handler = Callable[[int, FrameType | None], object]


class Stopping:
    """From the beginning of such a loop to its end."""

    def __init__(self) -> None:
        self._process = os.getpid()
        inherited = line()
        self._end = None if inherited is None else inherited.end
        self._grace_s = grace_s(os.environ)
        self._before: dict[int, Handler | signal.Handlers] = {}
        self._signal = 0
        self._first_term_s: float | None = None
        self._is_over = False
        # Python gives signals to the main thread only. One that is ignored (nohup) stays so, and
        # a handler that was not set from Python could not be put back.
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:
                    assert not isinstance(before, int) or isinstance(before, signal.Handlers)
                    self._before[number] = before
                    signal.signal(number, self._receive)
        if self._end is not None:
            self._end.send(CanStop(True))

    @property
    def is_asked(self) -> bool:
        return self._signal != 0 or (
            self._end is not None and self._end.board.order is not Order.GO_ON
        )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked off, to load data
            if number == signal.SIGTERM:
                self._give_way(number)
            return
        if self._is_meant_to_end(number):
            self._give_way(number)
            return
        if self._signal == 0:
            self._signal = number
            if self._end is not None:
                self._end.send(WasAsked(number))
            else:
                # Not `threading`: what it locks, the interrupted code may hold.
                _thread.start_new_thread(self._end_in_time, ())
        before = self._before[number]
        if not isinstance(before, signal.Handlers):
            before(number, frame)

    def _is_meant_to_end(self, number: int) -> bool:
        """Asked a second time, or ended by the supervisor."""
        if self._end is not None and self._end.board.order is Order.END:
            return True
        if number != signal.SIGTERM:
            return False
        now_s = time.monotonic()
        if self._first_term_s is None:
            self._first_term_s = now_s
        return now_s - self._first_term_s > SAME_S

    def _give_way(self, number: int) -> None:
        """To what would have happened without us."""
        signal.signal(number, self._before[number])
        os.kill(os.getpid(), number)

    def _end_in_time(self) -> None:
        """Where no supervisor of ours keeps the time."""
        time.sleep(self._grace_s)
        if not self._is_over:
            _say(
                f"ended by {signal_name(self._signal)}: the checkpoint was not finished within "
                f"{self._grace_s:g} s (PARTI_GRACE)"
            )
            os._exit(128 + self._signal)

    def has_saved(self, step: int, directory: str, problem: str, *, is_chief: bool) -> Preempted:
        """The state is on the disk, or can't be brought there: tell it. What to raise."""
        preempted = Preempted(step, directory, problem)
        if self._end is not None:
            self._end.send(Stopped(step, directory, problem))
        elif is_chief:
            by = f"{signal_name(self._signal)}: " if self._signal else ""
            _say(f"{by}{preempted}")
        return preempted

    def close(self) -> None:
        """The loop is over: whoever was in charge of signals before is so again."""
        if self._is_over:
            return
        self._is_over = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        if self._end is not None:
            self._end.send(CanStop(False))


def _say(text: str) -> None:
    sys.stderr.write(f"parti: {text}\n")
    sys.stderr.flush()
