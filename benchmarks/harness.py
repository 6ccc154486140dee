"""Starts contenders, gives them turns one after another, and collects their reports.

Owns processes, rounds and idle machines; must not know what a contender computes. A round starts
every contender afresh and warms it up; while one has its turn the others wait without using the
processor. So windows that are compared lie seconds apart, and what differs from start to start
(where memory landed) is averaged over rounds. Ratios are taken within a round and their median
over rounds is what is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from results import HERE, ROOT, Record, Results, Setting, number

sys.path.insert(0, str(ROOT / "src"))

from parti.launch.environment import ALLOCATOR_SETTINGS

PEERS = Path.home() / ".cache" / "parti-peers"

ALLOCATOR = dict(ALLOCATOR_SETTINGS)
"""glibc keeps large blocks instead of giving them back at every step, as under Parti's launcher."""

FOREIGN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TF_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *ALLOCATOR,
)  # fmt: skip
"""Variables that must not leak into a contender from the shell the benchmark was started in."""

START_DEADLINE_S = 180.0
TURN_DEADLINE_S = 120.0
DISTURBED = 0.05
"""A turn during which others used more than this share of the machine is taken again."""


class ContenderError(Exception):
    """A contender ended or said nothing; the message carries the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One program in a comparison."""

    name: str
    title: str
    script: str
    python: Path = Path(sys.executable)
    requires: str | None = None
    """A module that its environment must have."""
    launcher: tuple[str, ...] | None = None
    """Given: one command starts all ranks. None: the harness starts them, in torchrun's words."""
    single: bool = False
    """One process uses all the cores that the others share out among their processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    """The models it is written for; None: all."""

    def missing(self) -> str | None:
        """Why it can't run here; None when it can."""
        if not self.python.exists():
            return "not installed (benchmarks/peers/setup.sh makes its environment)"
        if self.requires is None:
            return None
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({self.requires!r}) is None)"
        found = subprocess.run([self.python, "-c", look], check=False, cwd=ROOT, env=clean({}))
        return None if found.returncode == 0 else f"not installed: no module {self.requires}"


def clean(extra: Mapping[str, str]) -> dict[str, str]:
    """This environment without what would steer a contender, with what shall."""
    kept = {k: v for k, v in os.environ.items() if k not in FOREIGN and not k.startswith("PARTI_")}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **extra}


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port


class Running:
    """The processes of one contender, started, warmed up, and waiting for a turn."""

    def __init__(self, contender: Contender, setting: Setting) -> None:
        self.contender, self.setting = contender, setting
        self.directory = Path(tempfile.mkdtemp(prefix="parti-bench-"))
        self.world_size = 1 if contender.single else setting.processes
        for name in ("meeting", "lockstep"):
            (self.directory / name).write_bytes(bytes(64 * self.world_size))
        names = ("reports", *(f"turns-{rank}" for rank in range(self.world_size)))
        for name in names:
            os.mkfifo(self.directory / name)
        # Open for both: opening does not wait for the other side, and the FIFO outlives writers.
        self.fifos = {name: os.open(self.directory / name, os.O_RDWR) for name in names}
        self.pending = b""
        self.versions: dict[str, str] = {}
        self.log = (self.directory / "output").open("wb")
        self.processes = [self._start(rank) for rank in range(self._num_commands())]

    def _num_commands(self) -> int:
        return 1 if self.contender.launcher is not None else self.world_size

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        contender, setting = self.contender, self.setting
        command = [str(contender.python), *(contender.launcher or ()), str(HERE / contender.script)]
        for name, value in (
            ("contender", contender.name), ("model", setting.model),
            ("processes", setting.processes), ("threads", setting.threads),
            ("tuning", setting.tuning), ("batch-size", setting.batch_size),
            ("warmup", setting.warmup), ("directory", self.directory),
        ):  # fmt: skip
            command += [f"--{name}", str(value)]
        extra = {**setting.environment, **contender.environment}
        if contender.launcher is None:
            threads = str(setting.threads * (setting.processes if contender.single else 1))
            extra |= {
                "RANK": str(rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.world_size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port()), "OMP_NUM_THREADS": threads,
            }  # fmt: skip
        return subprocess.Popen(
            [*command, *contender.arguments],
            env=clean(extra), cwd=self.directory, stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def _port(self) -> int:
        if not hasattr(self, "port"):
            self.port = free_ports(self.world_size)
        return self.port

    def wait_ready(self) -> None:
        """Return once every rank has finished its warm-up."""
        for _ in range(self.world_size):
            versions = self._read(START_DEADLINE_S)["versions"]
            assert isinstance(versions, dict)
            self.versions |= versions

    def turn(self) -> Record:
        """Let it run one window and return its report."""
        line = f"{self.setting.window_s} {self.setting.settle_s}\n".encode()
        for name, fifo in self.fifos.items():
            if name != "reports":
                os.write(fifo, line)
        return self._read(TURN_DEADLINE_S)

    def _read(self, patience_s: float) -> Record:
        deadline = time.monotonic() + patience_s
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.fifos["reports"]], [], [], 0.2)
            if ready:
                self.pending += os.read(self.fifos["reports"], 65536)
            elif self._has_ended():
                raise ContenderError(self._last_words())
            elif time.monotonic() > deadline:
                raise ContenderError(f"no report in {patience_s:.0f} s. {self._last_words()}")
        line, self.pending = self.pending.split(b"\n", 1)
        return json.loads(line)  # type: ignore[no-any-return]

    def _has_ended(self) -> bool:
        """A process failed, or all are gone."""
        codes = [process.poll() for process in self.processes]
        return any(code not in (None, 0) for code in codes) or None not in codes

    def _last_words(self) -> str:
        lines = (self.directory / "output").read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-6:]) or "it printed nothing"

    def dismiss(self) -> None:
        """Tell its processes that there are no more turns."""
        for fifo in self.fifos.values():
            os.close(fifo)
        self.fifos = {}

    def close(self) -> None:
        """See every process of it end, by force if need be."""
        self.dismiss()
        for process in self.processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_until_idle(
    *, below: float = 5.0, during_s: float = 2.0, patience_s: float = 120.0
) -> float:
    """Return once the machine has been idle for a while; the load (%) it found in the end."""
    deadline = time.monotonic() + patience_s
    while True:
        load = float(psutil.cpu_percent(interval=during_s))
        if load < below:
            return load
        if time.monotonic() > deadline:
            say(f"the machine did not become idle in {patience_s:.0f} s ({load:.0f} % busy)")
            return load


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured, and how carefully."""

    rounds: int
    turns: int
    wait: Callable[[], float]


def add_options(parser: argparse.ArgumentParser, *, turns: int = 3) -> None:
    """What every benchmark that compares contenders can be told."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=turns, help="windows a round and contender")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=PEERS, help="where peers/setup.sh put them")
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")


def effort_of(given: argparse.Namespace) -> Effort:
    """The same from the command line."""
    wait = (lambda: 0.0) if given.no_wait else wait_until_idle
    return Effort(rounds=given.rounds, turns=given.turns, wait=wait)


def compare(contenders: Sequence[Contender], setting: Setting, effort: Effort) -> Results:
    """Run rounds of all contenders; one that can't run is reported and does not stop the others."""
    results = Results(setting=setting, titles={c.name: c.title for c in contenders})
    able = []
    for contender in contenders:
        if contender.models is not None and setting.model not in contender.models:
            continue
        reason = contender.missing()
        if reason is None:
            able.append(contender)
        else:
            results.failures[contender.name] = reason
    for done in range(effort.rounds):
        # The order turns from round to round, so that nobody always follows the same other.
        ordered = able[done % len(able) :] + able[: done % len(able)] if able else []
        results.rounds.append(_one_round(ordered, setting, results, effort))
        say(f"  round {done + 1}/{effort.rounds} of {setting.model}, {setting.tuning}")
    return results


def _one_round(
    contenders: Sequence[Contender],
    setting: Setting,
    results: Results,
    effort: Effort,
) -> dict[str, list[Record]]:
    running: dict[str, Running] = {}
    reports: dict[str, list[Record]] = {}
    try:
        for contender in contenders:
            started = running[contender.name] = Running(contender, setting)
            # One after the other: two libraries starting at once could time each other out.
            with _noted(started, results, running):
                started.wait_ready()
            results.versions |= started.versions
        results.loads.append(effort.wait())
        for _ in range(effort.turns):
            for name, ready in list(running.items()):
                with _noted(ready, results, running):
                    reports.setdefault(name, []).append(_undisturbed(ready))
    finally:
        for left in running.values():
            left.dismiss()
        for left in running.values():
            left.close()
    return reports


def _undisturbed(running: Running, attempts: int = 3) -> Record:
    """One report; taken again while somebody else uses the machine, the quietest is kept."""
    reports = []
    for _ in range(attempts):
        reports.append(running.turn())
        if number(reports[-1], "foreign_share") < DISTURBED:
            return reports[-1]
    return min(reports, key=lambda report: number(report, "foreign_share"))


@contextmanager
def _noted(running: Running, results: Results, all_running: dict[str, Running]) -> Iterator[None]:
    """A contender that fails inside is closed, noted, and out of this round."""
    name = running.contender.name
    try:
        yield
    except ContenderError as failure:
        results.failures[name] = str(failure)
        say(f"  {name} failed: {failure}")
        all_running.pop(name).close()
