"""How a job is interrupted, and what its processes see of the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multiprocess.launch.conftest import Bench, Hub

DEADLINE_S = 60.0


def test_kill_9_of_the_supervisor_leaves_no_worker(bench: Bench, hub: Hub) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    """
    process = bench.run("-n 2", script)
    hub.gather(2)
    assert len(bench.leftovers()) == 1
    process.kill()
    hub.await_end()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    bench.finish(bench.run("-n 1", "pass"))  # the next start sweeps
    assert bench.leftovers() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_supervisor_ends_the_workers(
    bench: Bench, hub: Hub, number: int, code: int
) -> None:
    process = bench.run("-n 2", "wait()")
    hub.gather(2)
    process.send_signal(number)
    found, _, err = bench.finish(process)
    hub.await_end()
    assert found == code
    assert err == f"parti: ended by {signal.Signals(number).name}\n"
    assert bench.leftovers() == []


def test_a_second_interrupt_does_not_wait(bench: Bench, hub: Hub) -> None:
    script = """
        signal.signal(signal.SIGTERM, lambda *_: hub.sendall(b"asked"))
        wait()
        wait()
    """
    process = bench.run("-n 1", script)
    hub.gather(1)
    process.send_signal(signal.SIGINT)
    hub.expect(0, b"asked")
    process.send_signal(signal.SIGINT)
    code, _, err = bench.finish(process)
    hub.await_end()
    assert code == 130
    assert err == "parti: ended by SIGINT\n"


def under_a_terminal(bench: Bench, script: str) -> tuple[subprocess.Popen[str], int]:
    """Under a terminal of its own, whose other side is returned."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 99))
    process = bench.run(
        "-n 1", script, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    return process, ours


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until_closed(fd: int) -> str:
    shown = b""
    while select.select([fd], [], [], DEADLINE_S)[0]:
        try:
            data = os.read(fd, 65536)
        except OSError:
            return shown.decode()
        shown += data
    raise AssertionError(f"still open after {DEADLINE_S} s; so far: {shown!r}")


def test_ctrl_c_ends_cleanly_at_once(bench: Bench, hub: Hub) -> None:
    process, terminal = under_a_terminal(bench, "wait()")
    hub.gather(1)
    pressed_s = time.monotonic()
    os.write(terminal, b"\x03")
    shown = read_until_closed(terminal)
    hub.await_end()
    assert process.wait(DEADLINE_S) == 130
    assert time.monotonic() - pressed_s < 1.5
    os.close(terminal)
    assert shown.replace("\r", "") == "^C\nparti: ended by SIGINT\n"
    assert bench.leftovers() == []


def test_rank_0_sees_the_terminal(bench: Bench) -> None:
    script = """
        if rank == 0:
            print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
            for k in range(3):
                sys.stderr.write(f"\\rstep {k}\\x1b[K")
            print()
    """
    process, terminal = under_a_terminal(bench, script)
    shown = read_until_closed(terminal)
    os.close(terminal)
    assert process.wait(DEADLINE_S) == 0
    assert shown == "True True 99\r\n\rstep 0\x1b[K\rstep 1\x1b[K\rstep 2\x1b[K\r\n"
    assert bench.read("rank0.log") == "True True 99\nstep 2\n"


def test_a_terminal_that_changes_its_size(bench: Bench, hub: Hub) -> None:
    script = """
        if rank == 0:
            import select
            wait()
            while (size := os.get_terminal_size().columns) == 99:
                select.select([], [], [], 0.01)
            print(size)
    """
    process, terminal = under_a_terminal(bench, script)
    hub.gather(1)
    termios.tcsetwinsize(terminal, (24, 50))
    hub.release()
    assert read_until_closed(terminal) == "50\r\n"
    os.close(terminal)
    assert process.wait(DEADLINE_S) == 0


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_job_that_is_suspended_goes_on_where_it_was(bench: Bench, hub: Hub) -> None:
    process = bench.run("-n 2", "wait()")
    pids = hub.gather(2)
    process.send_signal(signal.SIGTSTP)
    deadline_s = time.monotonic() + DEADLINE_S
    while {state_of(pid) for pid in (process.pid, *pids.values())} != {"T"}:
        assert time.monotonic() < deadline_s
    process.send_signal(signal.SIGCONT)
    hub.release()
    assert bench.finish(process) == (0, "", "")
