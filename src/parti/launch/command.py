"""`parti run`: from its options to a job and its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parti.errors import ConfigError
from parti.launch.devices import checked_count
from parti.launch.environment import (
    GRACE_S,
    ProcessTuning,
    checked_grace_s,
    grace_s,
    store_patience_s,
)
from parti.launch.job import Job, Nodes, run_to_exit_code
from parti.launch.output import terminal_console
from parti.launch.rerun import interpreter_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line of `parti run`, read but not judged."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    num_processes: int | None = None
    name: str | None = None
    runs_dir: Path = Path("runs")
    nodes: str | None = None
    node_rank: int | None = None
    address: str | None = None
    join: str | None = None
    num_spares: int = 0
    grace_s: float | None = None
    threads: int | None = None
    tuning: ProcessTuning = field(default_factory=ProcessTuning)


def read_options(arguments: Sequence[str]) -> RunOptions:
    """Read the command line behind `parti run`. Exits after --help, or with code 2 and a word on
    what is wrong. All that follows the script is the script's."""
    parser = argparse.ArgumentParser(
        prog="parti run",
        description="Run a script on every device of this host, or of several hosts.",
        usage="parti run [options] (script.py | -m module) [arguments of the script ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    options = (
        add(
            "-n",
            dest="num_processes",
            type=int,
            metavar="N",
            help="processes on this host [one per device]",
        ),
        add("--name", metavar="NAME", help="name of the run's directory [script and time]"),
        add(
            "--runs-dir",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="where runs are kept [runs]",
        ),
        add(
            "--nodes",
            metavar="K",
            help="hosts of the job; start `parti run` on each. MIN:MAX where they come and go",
        ),
        add("--node-rank", type=int, metavar="I", help="which of them this host is, from 0"),
        add("--address", metavar="HOST:PORT", help="where node 0 is reached; or etcd://..."),
        add("--join", metavar="HOST:PORT", help="come to a job that runs with --nodes MIN:MAX"),
        add(
            "--spares",
            dest="num_spares",
            type=int,
            default=0,
            metavar="K",
            help="warm processes that stand by to take a lost one's place [0]",
        ),
        add(
            "--grace",
            dest="grace_s",
            type=float,
            metavar="SECONDS",
            help=f"how long saving the state may take when asked to stop [{GRACE_S:g}]",
        ),
        add("--threads", type=int, metavar="T", help="threads per process [cores / processes]"),
    )
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    add("--no-allocator-tuning", action="store_true", help="let glibc give back memory each step")
    add("--no-thread-tuning", action="store_true", help="leave OMP_NUM_THREADS as it is")
    add("--no-tuning", action="store_true", help="neither of the two")
    names = {name for option in options for name in option.option_strings}
    end = _end_of_options(arguments, names)
    read = parser.parse_args(arguments[:end])
    script, *rest = arguments[end:] or [""]
    if not script:
        parser.error("no script: name one, or a module with -m")
    return RunOptions(
        script=script,
        arguments=tuple(rest),
        is_module=read.is_module,
        num_processes=read.num_processes,
        name=read.name,
        runs_dir=read.runs_dir,
        nodes=read.nodes,
        node_rank=read.node_rank,
        address=read.address,
        join=read.join,
        num_spares=read.num_spares,
        grace_s=read.grace_s,
        threads=read.threads,
        tuning=ProcessTuning(
            allocator=not (read.no_allocator_tuning or read.no_tuning),
            threads=not (read.no_thread_tuning or read.no_tuning),
        ),
    )


def _end_of_options(arguments: Sequence[str], with_value: set[str]) -> int:
    """Where the script is: argparse cannot be told to leave alone all that comes after it."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] in with_value else 1
    return min(position, len(arguments))


def run_script(options: RunOptions) -> int:
    """Run it; the exit code of the job."""
    environ = os.environ
    if not options.is_module:
        _check_script(Path(options.script))
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; it has to be 1 or more")
    if options.num_spares < 0:
        raise ConfigError(f"--spares is {options.num_spares}; it has to be 0 or more")
    nodes, requested = _nodes_and_request(options, environ)
    what = ("-m", options.script) if options.is_module else (options.script,)
    job = Job(
        command=tuple(sys.orig_argv),
        stem=options.script if options.is_module else Path(options.script).stem,
        num_processes=_count(options.num_processes, requested, environ),
        name=options.name,
        runs_dir=options.runs_dir,
        num_spares=options.num_spares,
        grace_s=(grace_s(environ) if options.grace_s is None else checked_grace_s(options.grace_s)),
        store_patience_s=store_patience_s(environ),
        threads=options.threads,
        tuning=options.tuning,
        nodes=nodes,
    )
    program = (sys.executable, *interpreter_flags(), *what, *options.arguments)
    return run_to_exit_code(job, program, console=terminal_console(), environ=environ)


def _count(wanted: int | None, requested: int | None, environ: Mapping[str, str]) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigError(f"-n is {wanted}; it has to be 1 or more, or left out for one per device")
    return checked_count(requested if wanted is None else wanted, environ)


def _check_script(script: Path) -> None:
    if script.is_file() or (script / "__main__.py").is_file():
        return
    if script.is_dir():
        raise ConfigError(f"{script} is a directory without a __main__.py; name a script in it")
    directory = script.parent
    names = [each.name for each in directory.iterdir()] if directory.is_dir() else []
    import difflib

    close = difflib.get_close_matches(script.name, names, n=3)
    if close:
        hint = "did you mean " + " or ".join(str(directory / name) for name in close) + "?"
    elif not directory.is_dir():
        hint = f"there is no directory {directory}"
    else:
        hint = "name a Python file, or a module with -m"
    raise ConfigError(f"there is no script {script}: {hint}")


def _nodes_and_request(options: RunOptions, environ: Mapping[str, str]) -> tuple[Nodes, int | None]:
    """The hosts of the job, and how many processes the environment asks for on this one."""
    if options.join is not None:
        return _nodes_to_join(options), None
    if options.nodes is not None and ":" in options.nodes:
        return _elastic_nodes(options), None
    given = {
        "--nodes": options.nodes,
        "--node-rank": options.node_rank,
        "--address": options.address,
    }
    if all(value is None for value in given.values()):
        return _nodes_by_environment(environ)
    if options.nodes == "1" and options.address is None and not options.node_rank:
        return Nodes(), None
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing: several hosts need all of --nodes, --node-rank and "
            "--address (HOST:PORT of node 0), the same but for the rank on each"
        )
    assert options.nodes is not None
    assert options.node_rank is not None
    assert options.address is not None
    if not options.nodes.isdigit():
        raise ConfigError(f"--nodes is {options.nodes!r}; expected a number, or MIN:MAX")
    return nodes_by_options(int(options.nodes), options.node_rank, options.address), None


def _nodes_to_join(options: RunOptions) -> Nodes:
    others = {
        "--nodes": options.nodes,
        "--node-rank": options.node_rank,
        "--address": options.address,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(
            f"--join comes with {' and '.join(given)}; the job that is joined has settled these: "
            "leave them out"
        )
    assert options.join is not None
    return Nodes(address=_address_of_store("--join", options.join), joins=True)


def _elastic_nodes(options: RunOptions) -> Nodes:
    assert options.nodes is not None
    least, _, most = options.nodes.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise ConfigError(
            f"--nodes is {options.nodes!r}; expected MIN:MAX with 1 <= MIN <= MAX, such as 1:4"
        )
    if options.node_rank is not None:
        raise ConfigError(
            "--node-rank goes with a fixed number of hosts; where they come and go they are "
            "numbered as they come: leave it out"
        )
    if options.address is None:
        raise ConfigError(
            "--address missing: HOST:PORT where this host serves the store that the others join "
            "at, or etcd://host:port/name"
        )
    address = _address_of_store("--address", options.address)
    return Nodes(address=address, bounds=(int(least), int(most)))


def _address_of_store(option: str, address: str) -> str:
    return address if address.startswith("etcd://") else _tcp(option, address)


def _tcp(option: str, address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} is {address!r}; expected HOST:PORT, such as 10.0.0.1:29400")
    return f"tcp://{host}:{port}"


def nodes_by_options(num_nodes: int, node_rank: int, address: str) -> Nodes:
    if num_nodes < 1:
        raise ConfigError(f"--nodes is {num_nodes}; it has to be 1 or more")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"--node-rank is {node_rank}; with --nodes {num_nodes} it has to be "
            f"between 0 and {num_nodes - 1}"
        )
    return Nodes(node_rank=node_rank, num_nodes=num_nodes, address=_tcp("--address", address))


def _nodes_by_environment(environ: Mapping[str, str]) -> tuple[Nodes, int | None]:
    from parti.cluster import Level, resolve

    place = resolve(environ)
    if place.level is Level.RANK:
        raise ConfigError(
            f"`parti run` was started once for each rank ({place.why}) but starts the ranks of a "
            "host itself: start the script without it, or `parti run` once on each host"
        )
    if not place.in_world:
        raise ConfigError(
            f"this host is the {place.task_type} of its cluster ({place.why}), which is not one "
            "of the workers that `parti run` starts"
        )
    nodes = Nodes(node_rank=place.node_rank, num_nodes=place.num_nodes, address=place.rendezvous)
    return nodes, place.requested_local_world_size
