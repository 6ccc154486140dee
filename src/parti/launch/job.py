"""One job from the command to its outcome: directories, meeting the other hosts, supervision,
the record of the run, and the words for a person.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from parti.launch.devices import num_cores, num_gpus
from parti.launch.directories import Scratch, create_run_directory, create_scratch, write_json
from parti.launch.environment import (
    GRACE_S,
    STORE_PATIENCE_S,
    Meeting,
    ProcessTuning,
    Seat,
    worker_environment,
)
from parti.launch.events import Began, Ended, Events, keep_events
from parti.launch.failure import Ending, describe, signal_name
from parti.launch.output import Console
from parti.launch.peers import Kind, Layout, OneHost, Peers
from parti.launch.signals import signal_inbox
from parti.launch.supervisor import Assignment, Outcome, Supervisor

_RECORDED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where this host stands among those of the job."""

    node_rank: int = 0
    num_nodes: int = 1
    address: str | None = None
    """tcp://host:port of node 0; where hosts come and go, it may be that of an etcd."""
    bounds: tuple[int, int] | None = None
    """How few and how many hosts there may be, where they come and go."""
    joins: bool = False
    """This one comes to a job that others have begun."""

    @property
    def is_elastic(self) -> bool:
        return self.bounds is not None or self.joins


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run. A frozen value; nothing has happened yet."""

    command: tuple[str, ...]
    """As a person would type it, for the record."""
    stem: str
    """What the run is called where it has no name."""
    num_processes: int
    """On this host."""
    name: str | None = None
    runs_dir: Path = Path("runs")
    num_spares: int = 0
    """Warm processes that stand by on this host."""
    grace_s: float = GRACE_S
    """How long an orderly stop may take."""
    store_patience_s: float = STORE_PATIENCE_S
    """How long a store that hosts agree through, and that cannot be reached, is waited for."""
    threads: int | None = None
    tuning: ProcessTuning = field(default_factory=ProcessTuning)
    cwd: str | None = None
    nodes: Nodes = field(default_factory=Nodes)


class OpenJob:
    """A job that has its directories and its hosts."""

    def __init__(
        self, job: Job, peers: Peers, scratch: Scratch, run_directory: Path, console: Console
    ) -> None:
        self.scratch = scratch.path
        self.layout = peers.layout
        self._job = job
        self._peers = peers
        self._run_directory = run_directory
        self._console = console
        self._has_told_of_record = False
        self._facts: dict[str, object] = {}

    def supervise(
        self, program: tuple[str, ...], environ: Mapping[str, str], *, wants_signals: bool
    ) -> Outcome:
        """Run `program` on every rank of this host until it ends."""
        cores = num_cores()
        if self._job.num_processes > max(cores, num_gpus(environ)):
            self._console.note(
                f"{self._job.num_processes} processes share {cores} cores: "
                "right for a trial, slower than one process a core"
            )

        def environment_of(local_rank: int) -> dict[str, str]:
            return worker_environment(
                environ,
                seat=self._seat(local_rank),
                meeting=self._meeting(),
                cores=cores,
                tuning=self._job.tuning,
                threads=self._job.threads,
            )

        def on_started() -> None:
            self._facts = self._describe_start(environment_of(0), cores, num_gpus(environ))
            self._write_record({})

        assignment = Assignment(
            program=program,
            environment_of=environment_of,
            cwd=self._job.cwd,
            run_directory=self._run_directory,
            failure_directory=self.scratch / "failures",
            num_spares=self._job.num_spares,
            grace_s=self._job.grace_s,
        )
        with self._events() as events, signal_inbox(is_wanted=wants_signals) as inbox:
            supervisor = Supervisor(assignment, self._peers, self._console, inbox, events)
            outcome = supervisor.run(on_started)
            told = self.tell(outcome)
            reason = "all processes are through" if told is None else told.splitlines()[0]
            events.tell(Ended(exit_code=outcome.exit_code, reason=reason))
        is_stopped = outcome.announcement.kind is Kind.STOPPED
        self._write_record(
            {
                "ended": _now(),
                "exit_code": outcome.exit_code,
                "failure": None if is_stopped else told,
                "stopped": told if is_stopped else None,
            },
        )
        return outcome

    @contextlib.contextmanager
    def _events(self) -> Iterator[Events]:
        """Where the events of this host's processes are kept."""
        layout = self.layout
        node_rank = layout.node_rank
        name = "events.jsonl" if node_rank == 0 else f"events-node{node_rank}.jsonl"

        def begin(clock_s: float) -> Began:
            return Began(
                job=layout.job,
                host=layout.hosts[node_rank],
                node_rank=node_rank,
                pid=os.getpid(),
                world_size=layout.world_size,
                clock_s=clock_s,
            )

        events = keep_events(self._run_directory / name, begin, self._console.note)
        try:
            yield events
        except BaseException as error:
            events.tell(Ended(exit_code=1, reason=f"{type(error).__name__}: {error}"))
            raise
        finally:
            events.close()

    def tell(self, outcome: Outcome) -> str | None:
        """What a person is told of the job's end; None where all went well."""
        announcement = outcome.announcement
        where = f" on {announcement.host}" if self.layout.num_nodes > 1 else ""
        match announcement.kind:
            case Kind.SUCCESS:
                return None
            case Kind.SIGNAL:
                name = signal_name(announcement.signal)
                why = f": {announcement.words}" if announcement.words else ""
                return f"ended by {name}{where}{why}"
            case Kind.STOPPED:
                return announcement.words
            case Kind.LOST if announcement.words:
                return announcement.words
            case Kind.LOST:
                return (
                    f"the supervisor of node {announcement.node_rank}{where} is gone: killed, or "
                    "its host is down or cannot be reached"
                )
            case Kind.OUT:
                return announcement.words or self._peers.why_out
            case Kind.FAILURE:
                assert outcome.verdict is not None
                return describe(outcome.verdict, log_of=self._log_of)

    @property
    def has_left(self) -> bool:
        """This host was asked to leave, and has."""
        return self._peers.has_left

    def comes_again(self, outcome: Outcome) -> bool:
        """Whether this host, which the others went on without, shall join them anew. One that has
        been of no use would be of none again."""
        announcement = outcome.announcement
        is_useful = not (self._peers.has_left or announcement.words)
        return announcement.kind is Kind.OUT and is_useful

    def _log_of(self, ending: Ending) -> str:
        path = self._run_directory / f"rank{ending.rank}.log"
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        return str(path) + (f" on {ending.host}" if ending.host else "")

    def _seat(self, local_rank: int) -> Seat:
        return Seat(
            rank=self.layout.first_rank + local_rank,
            world_size=self.layout.world_size,
            local_rank=local_rank,
            local_world_size=self.layout.num_local,
            node_rank=self.layout.node_rank,
            num_nodes=self.layout.num_nodes,
        )

    def _meeting(self) -> Meeting:
        return Meeting(
            job=self.layout.job,
            rendezvous=self.layout.rendezvous or self.scratch.as_uri(),
            host_directory=str(self.scratch),
            run_directory=str(self._run_directory),
            is_elastic=self.layout.is_elastic,
        )

    def _describe_start(
        self, environ: Mapping[str, str], cores: int, gpus: int
    ) -> dict[str, object]:
        from importlib import metadata

        versions: dict[str, str] = {"python": platform.python_version()}
        for package in ("parti", "torch"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        names = [*_RECORDED_VARIABLES, *(name for name in environ if name.startswith("MALLOC_"))]
        return {
            "command": list(self._job.command),
            "directory": self._job.cwd or os.getcwd(),
            "job": self.layout.job,
            "world_size": self.layout.world_size,
            "node_rank": self.layout.node_rank,
            "hosts": list(self.layout.hosts),
            "processes_per_host": list(self.layout.local_counts),
            "elastic": self.layout.is_elastic,
            "cores": cores,
            "gpus": gpus,
            "platform": platform.platform(),
            "versions": versions,
            "environment": {name: environ[name] for name in names if name in environ},
            "started": _now(),
            "ended": None,
            "exit_code": None,
            "failure": None,
            "stopped": None,
        }

    def _write_record(self, changes: Mapping[str, object]) -> None:
        """The record is for people: a full disk is told once and does not stop the training."""
        node_rank = self.layout.node_rank
        path = self._run_directory / ("run.json" if node_rank == 0 else f"node{node_rank}.json")
        try:
            write_json(path, {**self._facts, **changes})
        except OSError as error:
            if not self._has_told_of_record:
                self._has_told_of_record = True
                self._console.note(f"{path} cannot be written ({error.strerror})")


@contextlib.contextmanager
def open_job(job: Job, console: Console) -> Iterator[OpenJob]:
    """Make the job's directories and meet the other hosts; leave nothing but the run's record."""
    is_chosen = job.name is not None
    name = job.name or f"{job.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as stack:
        if job.nodes.node_rank == 0 and not job.nodes.is_elastic:
            run_directory = create_run_directory(job.runs_dir, name, chosen_by_user=is_chosen)
            peers = _meet(job, run_directory.name, console)
        else:
            peers = _meet(job, name, console)
            # On a file system that the hosts share, node 0 has made it already.
            run_directory = create_run_directory(
                job.runs_dir, peers.layout.name, chosen_by_user=True
            )
        layout = peers.layout
        suffix = "" if layout.num_nodes == 1 else f"-node{layout.node_rank}"
        scratch = create_scratch(layout.job + suffix)
        stack.callback(scratch.remove)
        yield OpenJob(job, peers, scratch, run_directory, console)


def _meet(job: Job, name: str, console: Console) -> Peers:
    nodes = job.nodes
    if nodes.is_elastic:
        from parti.launch.elastic_hosts import meet

        assert nodes.address is not None
        return meet(
            nodes.address,
            bounds=nodes.bounds,
            job=new_job_id(),
            name=name,
            num_processes=job.num_processes,
            num_spares=job.num_spares,
            give_up_s=job.store_patience_s,
            note=console.note,
        )
    if nodes.num_nodes == 1 or nodes.address is None:
        layout = Layout(
            job=new_job_id(),
            name=name,
            node_rank=0,
            hosts=(platform.node(),),
            local_counts=(job.num_processes,),
            rendezvous=None,
        )
        return OneHost(layout, console.note)
    from parti.launch.hosts import join, this_node

    return join(
        address=nodes.address,
        node=this_node(
            node_rank=nodes.node_rank,
            num_nodes=nodes.num_nodes,
            num_processes=job.num_processes,
        ),
        job=new_job_id(),
        name=name,
        note=console.note,
    )


def new_job_id() -> str:
    return os.urandom(6).hex()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def run_to_exit_code(
    job: Job,
    program: tuple[str, ...],
    *,
    console: Console,
    environ: Mapping[str, str],
) -> int:
    """Run a job from a terminal or a scheduler: tell how it ended, return the exit code."""
    while True:
        with open_job(job, console) as opened:
            outcome = opened.supervise(program, environ, wants_signals=True)
            text = opened.tell(outcome)
            comes_again = opened.comes_again(outcome)
            has_left = opened.has_left
        if text is not None:
            console.note(text)
        if not comes_again:
            break
        job = replace(job, nodes=replace(job.nodes, bounds=None, joins=True))
    console.flush(_FLUSH_S)
    return 0 if has_left else outcome.exit_code
