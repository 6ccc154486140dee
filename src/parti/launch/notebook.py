"""`launch(fn, strategy)`: a function as the program of every worker, for notebooks.

Function and arguments travel to the workers with cloudpickle, in a file that only this user can
read; the result of rank 0 comes back the same way.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from parti.errors import ConfigError, WorkerFailed
from parti.launch import call
from parti.launch.devices import checked_count
from parti.launch.environment import ProcessTuning, grace_s
from parti.launch.job import Job, open_job
from parti.launch.output import Console, notebook_console, terminal_console
from parti.launch.rerun import interpreter_flags

T = TypeVar("T")


class HasLocalProcesses(Protocol):
    """A strategy, as far as the launcher knows it."""

    def num_local_processes(self) -> int: ...


def launch(
    fn: Callable[..., T],
    strategy: HasLocalProcesses | int,
    *args: object,
    threads: int | None = None,
    tuning: ProcessTuning = ProcessTuning(),  # noqa: B008 (a frozen value)
    name: str | None = None,
    runs_dir: Path = Path("runs"),
) -> T:
    """Call `fn(*args)` on every rank of this host; return what rank 0 returns.

    `strategy` says how many ranks, or is their number. What rank 0 prints appears here. If a rank
    fails, WorkerFailed tells which was the first and shows its traceback. In a process that is a
    rank already, `fn` is simply called.
    """
    if "PARTI_RANK" in os.environ:
        return fn(*args)
    wanted = _num_processes(fn, strategy)
    title = getattr(fn, "__name__", type(fn).__name__)
    job = Job(
        command=("parti.launch", title),
        stem="".join(letter for letter in title if letter.isidentifier()) or "function",
        num_processes=checked_count(wanted, os.environ),
        name=name,
        runs_dir=runs_dir,
        grace_s=grace_s(os.environ),
        threads=threads,
        tuning=tuning,
    )
    console = _console()
    with open_job(job, console) as opened:
        _send(fn, args, opened.scratch)
        program = (sys.executable, *interpreter_flags(), str(call.__file__), str(opened.scratch))
        # A Ctrl-C, or the notebook's stop button, stays a KeyboardInterrupt here.
        outcome = opened.supervise(program, os.environ, wants_signals=False)
        console.flush(1.0)
        if outcome.preempted is not None:
            raise outcome.preempted
        problem = opened.tell(outcome)
        if problem is not None:
            raise WorkerFailed(problem)
        first = min(
            opened.scratch.glob(call.RESULT.format(rank=0, member="*").replace("0" * 6, "*"))
        )
        result: T = pickle.loads(first.read_bytes())
        return result


def _num_processes(fn: object, strategy: HasLocalProcesses | int) -> int:
    if not callable(fn) or not (
        isinstance(strategy, int) or hasattr(strategy, "num_local_processes")
    ):
        raise ConfigError(
            f"launch() got a {type(fn).__name__} and a {type(strategy).__name__}; expected a "
            "function, a strategy (or a number of processes), and the function's arguments"
        )
    return strategy if isinstance(strategy, int) else strategy.num_local_processes()


def _console() -> Console:
    return terminal_console() if sys.stdout is sys.__stdout__ else notebook_console()


def _send(fn: Callable[..., object], args: tuple[object, ...], scratch: Path) -> None:
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise ConfigError(
            f"{getattr(fn, '__name__', fn)!r} cannot be sent to other processes: {error}; "
            "open files, locks and the like have to be made inside the function"
        ) from error
    (scratch / call.PATHS).write_text(json.dumps(sys.path))
    (scratch / call.CALL).write_bytes(content)
