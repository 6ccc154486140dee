"""A script that was started plainly puts itself under a supervisor: `ensure`.

The process becomes the supervisor, and its own command line, run once for each rank, becomes the
workers. It does not come back: when the workers have ended, it exits with their code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parti.errors import ConfigError
from parti.launch.devices import checked_count
from parti.launch.environment import ProcessTuning, grace_s
from parti.launch.job import Job, Nodes, run_to_exit_code
from parti.launch.output import terminal_console

_REMEDY = "call parti.launch(fn, strategy) with the training in a function, or use `parti run`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What Python knows of how this process was started."""

    orig_argv: tuple[str, ...]
    main_file: str | None
    main_module: str | None
    in_ipython: bool
    in_main_thread: bool
    in_child_of_multiprocessing: bool


def ensure(
    num_processes: int | None = None,
    *,
    threads: int | None = None,
    tuning: ProcessTuning = ProcessTuning(),  # noqa: B008 (a frozen value)
    name: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """Return in a process that is a rank already; elsewhere run this script on every rank.

    In the second case this call ends the process (SystemExit) with the exit code of the job.
    `num_processes` is what this host contributes: None for what the environment asks, or one for
    each device. The number of hosts comes from the environment (`parti.cluster.resolve`).
    """
    from parti.cluster import Level, resolve

    if "PARTI_RANK" in os.environ:  # whatever else is wrong there: a worker never becomes a parent
        return
    place = resolve()
    if place.level is Level.RANK:
        return
    context = _context()
    problem = unsuitable(context)
    if problem is not None:
        raise ConfigError(f"several processes cannot be started from {problem}: {_REMEDY}")
    wanted = num_processes or place.requested_local_world_size
    job = Job(
        command=context.orig_argv,
        stem=stem(context),
        num_processes=checked_count(wanted, os.environ),
        name=name,
        runs_dir=runs_dir,
        grace_s=grace_s(os.environ),
        threads=threads,
        tuning=tuning,
        cwd=starting_directory(context, os.getcwd(), os.environ.get("PWD")),
        nodes=Nodes(node_rank=place.node_rank, num_nodes=place.num_nodes, address=place.rendezvous),
    )
    program = (sys.executable, *context.orig_argv[1:])
    raise SystemExit(run_to_exit_code(job, program, console=terminal_console(), environ=os.environ))


def unsuitable(context: Context) -> str | None:
    """Why running this command line again would not do the same; None if it would."""
    if context.in_ipython:
        return "a notebook or IPython"
    if context.in_child_of_multiprocessing:
        return "a child process of multiprocessing"
    if not context.in_main_thread:
        return "a thread other than the main one"
    is_pytest = Path(context.main_file or "").name in ("pytest", "py.test")
    if is_pytest or context.main_module == "pytest.__main__":
        return "a test, as pytest itself would be run again"
    if context.main_file is None and "-c" not in context.orig_argv:
        return "the interactive interpreter or a script on standard input"
    return None


def stem(context: Context) -> str:
    """What the run is called: the script or the module."""
    if context.main_module is not None:
        return context.main_module.removesuffix(".__main__")
    return "command" if context.main_file is None else Path(context.main_file).stem


def starting_directory(context: Context, now: str, shells: str | None) -> str | None:
    """Where the workers start: where this process did, if it can be told that it has moved since.

    A relative path of the script names it in the directory the process was started in.
    """
    if context.main_file is None or shells is None or shells == now:
        return None
    for argument in context.orig_argv[1:]:
        moved = not _is_same(now, argument, context) and _is_same(shells, argument, context)
        if moved and not os.path.isabs(argument):
            return shells
    return None


def _is_same(directory: str, argument: str, context: Context) -> bool:
    return os.path.normpath(os.path.join(directory, argument)) == context.main_file


def _context() -> Context:
    multiprocessing = sys.modules.get("multiprocessing.process")
    ipython = sys.modules.get("IPython")
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    if main_file is not None and main_file.startswith("<"):  # "<stdin>"
        main_file = None
    spec = getattr(main, "__spec__", None)
    if not sys.executable:
        raise ConfigError(f"Python does not know its own executable: {_REMEDY}")
    return Context(
        orig_argv=tuple(sys.orig_argv),
        main_file=None if main_file is None else os.path.abspath(main_file),
        main_module=None if spec is None else str(spec.name),
        in_ipython=ipython is not None and ipython.get_ipython() is not None,
        in_main_thread=threading.current_thread() is threading.main_thread(),
        in_child_of_multiprocessing=(
            multiprocessing is not None and multiprocessing.parent_process() is not None
        ),
    )


def interpreter_flags() -> Sequence[str]:
    """The options this interpreter was started with (-X, -W, -O ...), for those it starts."""
    import subprocess

    flags: Sequence[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags
