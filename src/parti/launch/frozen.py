"""Finding workers that stand still, and what their Python was doing.

A worker shows on its board that it goes on: with every phase of a step, and while it waits for
others. One that says nothing for longer than `patience` is stuck, unless it does something that
may take long: its first steps, waiting for data, saving.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from parti.comm.phase import Phase

STACK_SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""A signal that no scheduler and hardly any script uses."""
_TIMES_AS_PATIENT = 10
_LONG_S = 600.0

_files: list[TextIO] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A worker as its supervisor sees it. Times are of one clock."""

    phase: int
    step: int
    silent_s: float
    """Since its last sign of life."""
    is_waiting: bool
    """For others that have not come yet."""
    others_wait: bool
    """Somebody waits, perhaps for this one."""
    is_lenient: bool
    is_stopped: bool
    """By a signal: its state in /proc."""


def why_stuck(sight: Sight, patience_s: float) -> str | None:
    """In words; None as long as nothing is wrong. Pure."""
    if sight.is_stopped:
        limit_s, how = patience_s, "it was stopped (SIGSTOP)"
    elif sight.is_waiting or (sight.phase == Phase.USER and not sight.others_wait):
        return None  # what a script does between steps, or after the last, is its own affair
    elif sight.is_lenient:
        limit_s, how = max(_LONG_S, _TIMES_AS_PATIENT * patience_s), "it does not go on"
    else:
        limit_s, how = patience_s, "it does not go on"
    if sight.silent_s <= limit_s:
        return None
    where = Phase(sight.phase).name.lower().replace("_", " ")
    at = f" of step {sight.step}" if sight.step >= 0 else ""
    return f"stood still in {where}{at} for {sight.silent_s:.1f} s: {how}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name, in brackets, may hold anything.
    return content[content.rindex(")") + 2] in "Tt"


def stack_file(directory: Path, member: int) -> Path:
    return directory / f"stack-{member}.txt"


def show_stacks_on_demand(directory: Path, member: int) -> None:
    """Have the stacks of all threads of this process written when it gets STACK_SIGNAL. That works
    in the middle of a kernel or a lock, too: no Python runs for it."""
    file = stack_file(directory, member).open("w")
    _files.append(file)  # open for as long as the process lives
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def read_stack(directory: Path, member: int) -> str:
    """What was written so far; empty if nothing was."""
    try:
        return stack_file(directory, member).read_text().strip()
    except OSError:
        return ""
