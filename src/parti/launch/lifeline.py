"""Ties the life of a process to its parent's, so that `kill -9` of a supervisor leaves no worker.

Owns the one system call that does it. Run as a script it is a shim: it ties itself to the parent
whose pid is its first argument, then becomes the program in the rest. A shim and not a function
run between fork and exec, because the parent may hold threads (a notebook, an imported torch).
It starts isolated and without site packages: about 12 ms. It must import nothing but the
standard library, and nothing of Parti.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends. Does nothing outside Linux.

    The kernel means the *thread* that created this process: a parent that spawns from a thread
    has to keep that thread.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above, which then came too late
        os.kill(os.getpid(), signal.SIGKILL)


def command(interpreter: str, program: list[str]) -> list[str]:
    """The command line that starts `program` through the shim, as a child of this process."""
    if sys.platform != "linux":
        return program
    return [interpreter, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *program]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
