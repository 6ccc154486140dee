"""What counts as standing still, as a table; and signals and stacks of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parti.comm.phase import Phase
from parti.launch.frozen import STACK_SIGNAL, Sight, is_stopped, read_stack, stack_file, why_stuck

DEADLINE_S = 30.0
PATIENCE_S = 5.0

NO, SOON, LATE = None, PATIENCE_S, 600.0
"""When it is stuck: never, after the patience, after ten minutes."""


def sight(
    phase: Phase,
    silent_s: float,
    *,
    step: int = 7,
    is_waiting: bool = False,
    others_wait: bool = False,
    is_lenient: bool = False,
    is_stopped: bool = False,
) -> Sight:
    return Sight(
        phase=phase,
        step=step,
        silent_s=silent_s,
        is_waiting=is_waiting,
        others_wait=others_wait,
        is_lenient=is_lenient,
        is_stopped=is_stopped,
    )


@pytest.mark.parametrize(
    ("phase", "facts", "after_s"),
    [
        (Phase.FORWARD, "", SOON),
        (Phase.BACKWARD, "others_wait", SOON),
        (Phase.UPDATE, "", SOON),
        (Phase.REDUCE, "is_waiting", NO),
        (Phase.REDUCE, "is_waiting others_wait", NO),
        (Phase.USER, "", NO),
        (Phase.USER, "others_wait", SOON),
        (Phase.USER, "is_waiting others_wait", NO),
        (Phase.USER, "is_lenient others_wait", LATE),
        (Phase.FORWARD, "is_lenient", LATE),
        (Phase.DATA, "is_lenient others_wait", LATE),
        (Phase.SAVE, "is_lenient is_waiting", NO),
        # One that is stopped does nothing that may take long, and waits for nobody.
        (Phase.FORWARD, "is_stopped", SOON),
        (Phase.FORWARD, "is_stopped is_lenient", SOON),
        (Phase.USER, "is_stopped", SOON),
        (Phase.REDUCE, "is_stopped is_waiting", SOON),
        (Phase.WAIT, "is_stopped is_lenient is_waiting", SOON),
    ],
)
def test_who_is_stuck(phase: Phase, facts: str, after_s: float | None) -> None:
    def why(silent_s: float) -> str | None:
        return why_stuck(sight(phase, silent_s, **dict.fromkeys(facts.split(), True)), PATIENCE_S)

    if after_s is None:
        assert why(1e6) is None
    else:
        assert why(after_s) is None
        assert why(after_s + 0.1) is not None


def test_who_may_take_long_gets_ten_times_the_patience() -> None:
    saving = sight(Phase.SAVE, 899.0, is_lenient=True), sight(Phase.SAVE, 901.0, is_lenient=True)
    assert [why_stuck(each, 90.0) is None for each in saving] == [True, False]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            sight(Phase.BACKWARD, 6.04),
            "stood still in backward of step 7 for 6.0 s: it does not go on",
        ),
        (
            sight(Phase.HAND_OUT, 6.0, step=0),
            "stood still in hand out of step 0 for 6.0 s: it does not go on",
        ),
        (
            sight(Phase.START, 601.0, step=-1, is_lenient=True),
            "stood still in start for 601.0 s: it does not go on",
        ),
        (
            sight(Phase.USER, 5.5, is_stopped=True),
            "stood still in user of step 7 for 5.5 s: it was stopped (SIGSTOP)",
        ),
    ],
)
def test_what_is_told(seen: Sight, words: str) -> None:
    assert why_stuck(seen, PATIENCE_S) == words


# ---- real processes

Child = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def child() -> Iterator[Child]:
    """Starts Python that has come as far as to print a line."""
    children: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        children.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield start
    for process in children:
        process.kill()
        process.communicate()


def await_change(process: subprocess.Popen[str], kind: int) -> None:
    """Until the kernel tells that it was stopped, or goes on."""
    assert os.waitpid(process.pid, kind)[0] == process.pid


# The name of a process may hold what looks like the rest of its line in /proc.
NAMES = ["python", "x) T (y", "a b) T 1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_process_is_told_from_one_that_runs(child: Child, name: str) -> None:
    process = child(
        f"open('/proc/self/comm', 'w').write({name!r})\n"
        "import time; print('here', flush=True); time.sleep(1000)"
    )
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    await_change(process, os.WUNTRACED)
    assert is_stopped(process.pid)
    process.send_signal(signal.SIGCONT)
    await_change(process, os.WCONTINUED)
    assert not is_stopped(process.pid)


def test_a_process_that_has_ended_is_not_stopped(child: Child) -> None:
    process = child("print('here', flush=True)")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_stopped(process.pid), "it has ended and was not collected yet"
    process.wait()
    assert not is_stopped(process.pid), "there is none of this number"


STANDS_STILL = {
    "in a call that lets other threads run": """
        import time
        def stands_still():
            print("here", flush=True)
            time.sleep(1000)
    """,
    "in a call that lets no Python run": """
        import ctypes
        def stands_still():
            pause = ctypes.PyDLL(None).pause  # keeps the interpreter's lock
            print("here", flush=True)
            while True:
                pause()
    """,
    "at a lock": """
        import threading
        lock = threading.Lock()
        def stands_still():
            lock.acquire()
            print("here", flush=True)
            lock.acquire()
    """,
}


def hangs(body: str, directory: Path) -> str:
    lines = "\n".join(line[8:] for line in body.splitlines())
    return (
        "from pathlib import Path\n"
        "from parti.launch.frozen import show_stacks_on_demand\n"
        f"show_stacks_on_demand(Path({str(directory)!r}), 3)\n{lines}\nstands_still()"
    )


def await_stack(directory: Path, words: str) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while words not in (stack := read_stack(directory, 3)):
        assert time.monotonic() < deadline_s, f"no {words!r} in {stack!r}"
        time.sleep(0.001)
    return stack


@pytest.mark.parametrize("how", STANDS_STILL)
def test_the_stack_of_a_process_that_stands_still(child: Child, tmp_path: Path, how: str) -> None:
    process = child(hangs(STANDS_STILL[how], tmp_path))
    assert read_stack(tmp_path, 3) == ""
    process.send_signal(STACK_SIGNAL)
    stack = await_stack(tmp_path, "in <module>")
    assert "most recent call first" in stack
    assert "in stands_still" in stack
    assert process.poll() is None, "being asked does it no harm"


def test_all_threads_are_shown(child: Child, tmp_path: Path) -> None:
    """The one that stands still may do so because of another."""
    body = """
        import threading, time
        lock, is_held = threading.Lock(), threading.Event()
        def holds_the_lock():
            with lock:
                is_held.set()
                time.sleep(1000)
        def stands_still():
            threading.Thread(target=holds_the_lock, daemon=True).start()
            is_held.wait()
            print("here", flush=True)
            lock.acquire()
    """
    process = child(hangs(body, tmp_path))
    process.send_signal(STACK_SIGNAL)
    stack = await_stack(tmp_path, "in <module>")
    assert "in holds_the_lock" in stack
    assert "in stands_still" in stack


def test_a_stopped_process_shows_its_stack_once_it_goes_on(child: Child, tmp_path: Path) -> None:
    process = child(hangs(STANDS_STILL["in a call that lets other threads run"], tmp_path))
    process.send_signal(signal.SIGSTOP)
    await_change(process, os.WUNTRACED)
    process.send_signal(STACK_SIGNAL)
    assert read_stack(tmp_path, 3) == ""
    process.send_signal(signal.SIGCONT)
    assert "in stands_still" in await_stack(tmp_path, "in <module>")


def test_no_stack_where_none_was_asked_for(tmp_path: Path) -> None:
    assert read_stack(tmp_path, 3) == ""
    stack_file(tmp_path, 4).write_text("mine\n")
    assert read_stack(tmp_path, 3) == ""
    assert read_stack(tmp_path, 4) == "mine"
