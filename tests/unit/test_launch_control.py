"""The line and the board, between this process, as the supervisor, and a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from parti.launch.control import (
    Activated,
    Called,
    FromSupervisor,
    HasEntered,
    HasLost,
    IsHere,
    Order,
    Refused,
    Stopped,
    SupervisorsEnd,
)

PRELUDE = """
import os, sys
from parti.launch.control import *
from parti.launch.control import read_inherited
end = read_inherited(os.environ["PARTI_CONTROL"])
"""
Worker = Callable[[SupervisorsEnd, str], "subprocess.Popen[str]"]


@pytest.fixture
def end() -> Iterator[SupervisorsEnd]:
    made = SupervisorsEnd()
    yield made
    made.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Starts Python that holds the other end, as `end`."""
    started: list[subprocess.Popen[str]] = []

    def start(end: SupervisorsEnd, script: str) -> subprocess.Popen[str]:
        line, board = end.inherited
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env={**os.environ, "PARTI_CONTROL": f"{line}:{board}"},
            pass_fds=(line, board),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        end.started()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_messages_stay_apart_and_in_order(end: SupervisorsEnd, worker: Worker) -> None:
    """Also those of a process that is dead by the time they are read."""
    process = worker(
        end,
        "end.send(IsHere(2.5))\n"
        "for generation in range(100): end.send(HasEntered(generation))\n"
        "end.send(HasLost(7))\n"
        "os.kill(os.getpid(), 9)",
    )
    assert process.wait() == -signal.SIGKILL
    entered = [HasEntered(generation) for generation in range(100)]
    assert end.receive() == [IsHere(2.5), *entered, HasLost(7)]
    assert end.receive() is None


def test_what_the_supervisor_says_comes_in_order(end: SupervisorsEnd, worker: Worker) -> None:
    process = worker(
        end,
        "assert end.receive(0.0) is None\n"
        "print('here', flush=True)\n"
        "for _ in range(4): print(end.receive(30.0), flush=True)\n"
        "print(end.receive(0.0))",
    )
    assert said(process) == "here"
    messages: list[FromSupervisor] = [
        Called(1, (0, 1, 2), ()),
        Refused(1),
        Activated(),
        Called(2, tuple(range(1000)), (999,)),
    ]
    for message in messages:
        end.send(message)
    assert [said(process) for _ in messages] == [repr(message) for message in messages]
    assert said(process) == "None"
    assert process.wait() == 0


def test_a_spare_stands_by_until_it_is_activated(end: SupervisorsEnd, worker: Worker) -> None:
    process = worker(
        end, "end.wait_for_call(); print('awake', end.receive(30.0), flush=True); input()"
    )
    end.send(Refused(1))
    end.send(Activated())
    end.send(Refused(2))
    assert said(process) == f"awake {Refused(2)}"


def test_the_board_shows_what_the_worker_does(end: SupervisorsEnd, worker: Worker) -> None:
    board = end.board
    assert (board.beat, board.phase, board.step) == (0, 0, 0)
    process = worker(
        end,
        "import time\n"
        "def tell(): print(time.monotonic(), flush=True); input()\n"
        "before = time.monotonic()\n"
        "end.board.report(3, 1 << 40, is_lenient=True); tell()\n"
        "end.board.report(2, -1, is_lenient=False); tell()\n"
        "end.board.waits(True); tell()\n"
        "end.board.waits(False); tell()\n",
    )
    at_s = float(said(process))
    assert (board.beat, board.phase, board.step) == (1, 3, 1 << 40)
    assert (board.is_lenient, board.is_waiting) == (True, False)
    assert at_s - 10.0 < board.since_s <= at_s, "one clock for both"
    go_on(process)
    said(process)
    assert (board.beat, board.phase, board.step, board.is_lenient) == (2, 2, -1, False)
    since_s = board.since_s
    go_on(process)
    said(process)
    assert (board.beat, board.is_waiting) == (3, True)
    go_on(process)
    said(process)
    assert (board.beat, board.is_waiting) == (4, False)
    assert board.since_s == since_s, "waiting is no new phase"
    go_on(process)
    assert process.wait() == 0
    assert (board.phase, board.step) == (2, -1), "the last word of the dead stays"


def test_two_workers_have_boards_and_lines_of_their_own(worker: Worker) -> None:
    ends = [SupervisorsEnd(), SupervisorsEnd()]
    for number, each in enumerate(ends):
        script = (
            f"end.board.report({number}, {number}, is_lenient=False); end.send(HasLost({number}))"
        )
        assert worker(each, script).wait() == 0
    assert [each.receive() for each in ends] == [[HasLost(0)], [HasLost(1)]]
    assert [each.board.step for each in ends] == [0, 1]
    for each in ends:
        each.close()


def test_garbage_is_ignored(end: SupervisorsEnd, worker: Worker) -> None:
    """Whatever comes between: no MessagePack, no message of ours, or one for the other side."""
    process = worker(
        end,
        "end.send(IsHere(1.0))\n"
        r"for data in (b'\xc1', b'hello', b'\x93\xa4What\x01\x02', b'\x00' * 5000):"
        "\n    end._line.send(data)\n"
        "end.send(Called(1, (0,), ()))\n"
        "end.send(HasEntered('three'))\n"
        "end.send(HasEntered(4))\n",
    )
    assert process.wait() == 0
    assert end.receive() == [IsHere(1.0), HasEntered(4)]
    assert end.receive() is None


def test_a_worker_that_is_gone_is_no_error(end: SupervisorsEnd, worker: Worker) -> None:
    process = worker(end, "print('here', flush=True); input()")
    assert said(process) == "here"
    assert end.receive() == []
    go_on(process)
    assert process.wait() == 0
    end.send(Refused(1))
    assert end.receive() is None


def test_a_supervisor_that_is_gone_is_no_error(worker: Worker) -> None:
    end = SupervisorsEnd()
    process = worker(
        end,
        "print('here', flush=True); input()\n"
        "end.send(HasLost(1)); end.board.report(1, 1, is_lenient=False)\n"
        "print(end.receive(30.0), flush=True)",
    )
    assert said(process) == "here"
    end.close()
    go_on(process)
    assert said(process) == "None"
    assert process.wait() == 0


def test_a_worker_that_reads_nothing_holds_up_nobody(end: SupervisorsEnd, worker: Worker) -> None:
    """A line holds a few hundred messages; no job changes its world so often in one step."""
    process = worker(
        end,
        "print('here', flush=True); input()\n"
        "found = [end.receive(30.0)]\n"
        "while (message := end.receive(0.0)) is not None: found.append(message)\n"
        "print([message.generation for message in found] == list(range(len(found))))\n"
        "print(len(found), flush=True)",
    )
    assert said(process) == "here"
    for generation in range(20_000):
        end.send(Called(generation, (0, 1, 2, 3), ()))
    go_on(process)
    assert said(process) == "True"
    assert 100 < int(said(process)) < 20_000


def test_processes_of_a_worker_do_not_inherit_its_line(end: SupervisorsEnd, worker: Worker) -> None:
    """One that outlives its worker would keep the line open."""
    process = worker(
        end,
        "import subprocess\n"
        "script = 'import sys; print(1, flush=True); sys.stdin.read()'\n"
        "subprocess.Popen([sys.executable, '-c', script], close_fds=False)",
    )
    assert said(process) == "1"
    assert process.wait() == 0
    assert end.receive() is None


def test_what_a_worker_says_of_stopping_is_kept_beside(end: SupervisorsEnd, worker: Worker) -> None:
    process = worker(
        end,
        "end.send(CanStop(True)); end.send(HasEntered(1)); end.send(WasAsked(15))\n"
        "print(end.board.order.name, flush=True); input()\n"
        "print(end.board.order.name, flush=True)\n"
        "end.send(Stopped(7, '/kept', '')); end.send(CanStop(False)); print(flush=True); input()",
    )
    assert said(process) == "GO_ON"
    assert end.receive() == [HasEntered(1)]
    assert (end.can_stop, end.was_asked, end.stopped) == (True, 15, None)
    end.board.command(Order.STOP)
    go_on(process)
    assert said(process) == "STOP"
    said(process)
    assert end.receive() == []
    assert (end.can_stop, end.stopped) == (False, Stopped(7, "/kept", ""))
