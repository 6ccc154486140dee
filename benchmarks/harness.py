"""Starts contenders, gives them turns one after another, and turns their reports into numbers.

Owns rounds, idle machines, medians, and files of results; must not know what a contender
computes. A round starts every contender afresh and warms it up; while one has its turn the others
wait without using the processor. So windows that are compared lie seconds apart, and what differs
from start to start (where memory landed) is averaged over rounds. Ratios are taken within a round
and their median over rounds is what is reported.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = Path.home() / ".cache" / "parti-peers"

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
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

Record = dict[str, object]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of one comparison are given alike."""

    model: str
    batch_size: int
    processes: int = 2
    threads: int = 1
    tuning: str = "users"
    warmup: int = 3
    steps: int = 10
    settle: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


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
        meeting = self.directory / "meeting"
        meeting.write_bytes(bytes(64 * self.world_size))
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
            self.versions |= self._read(START_DEADLINE_S)["versions"]  # type: ignore[operator]

    def turn(self) -> Record:
        """Let it run one window and return its report."""
        line = f"{self.setting.steps} {self.setting.settle}\n".encode()
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
            elif any(process.poll() not in (None, 0) for process in self.processes):
                raise ContenderError(self._last_words())
            elif time.monotonic() > deadline:
                raise ContenderError(f"no report in {patience_s:.0f} s. {self._last_words()}")
        line, self.pending = self.pending.split(b"\n", 1)
        return json.loads(line)  # type: ignore[no-any-return]

    def _last_words(self) -> str:
        lines = (self.directory / "output").read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-6:]) or "it printed nothing"

    def close(self) -> None:
        """End every process of it, politely first."""
        for name, fifo in self.fifos.items():
            os.close(fifo)
            self.fifos = {**self.fifos, name: -1}
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
        load = psutil.cpu_percent(interval=during_s)
        if load < below:
            return load
        if time.monotonic() > deadline:
            say(f"the machine did not become idle in {patience_s:.0f} s ({load:.0f} % busy)")
            return load


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Results:
    """Everything that was measured in one comparison: one list of turns a round and contender."""

    setting: Setting
    titles: dict[str, str]
    rounds: list[dict[str, list[Record]]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def per_round(self, name: str) -> list[float | None]:
        """The contender's samples/s in each round, the median of its turns."""
        return [
            statistics.median(_number(turn, "samples_per_s") for turn in turns[name])
            if turns.get(name)
            else None
            for turns in self.rounds
        ]

    def samples_per_s(self, name: str) -> float | None:
        """Median over rounds."""
        return _median(self.per_round(name))

    def step_s(self, name: str) -> float | None:
        """Median seconds a step."""
        return _median(
            _number(turn, "step_s") for turns in self.rounds for turn in turns.get(name, ())
        )

    def ratio(self, name: str, to: str) -> float | None:
        """How many times as fast as another, the median of the rounds' ratios."""
        return _median(self.ratios(name, to))

    def ratios(self, name: str, to: str) -> list[float]:
        """The same, one for each round in which both ran."""
        pairs = zip(self.per_round(name), self.per_round(to), strict=True)
        return [a / b for a, b in pairs if a is not None and b is not None]

    def as_data(self) -> Record:
        """For the JSON file: every single window, and what was made of them."""
        setting = self.setting
        return {
            "model": setting.model, "tuning": setting.tuning, "batch_size": setting.batch_size,
            "processes": setting.processes, "threads": setting.threads,
            "environment": dict(setting.environment), "load_before_rounds": self.loads,
            "failures": self.failures, "versions": self.versions,
            "contenders": {
                name: {
                    "title": title,
                    "samples_per_s": self.samples_per_s(name),
                    "samples_per_s_of_rounds": self.per_round(name),
                    "step_s": self.step_s(name),
                    "turns": [turns.get(name, []) for turns in self.rounds],
                }
                for name, title in self.titles.items()
            },
        }  # fmt: skip


def _number(record: Record, key: str) -> float:
    value = record[key]
    assert isinstance(value, int | float)
    return float(value)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare(
    contenders: Sequence[Contender],
    setting: Setting,
    *,
    rounds: int = 5,
    turns: int = 3,
    wait: Callable[[], float] = wait_until_idle,
) -> Results:
    """Run `rounds` rounds of all contenders; a contender that can't run is reported, not fatal."""
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
    for number in range(rounds):
        # The order turns from round to round, so that nobody always follows the same other.
        ordered = able[number % len(able) :] + able[: number % len(able)] if able else []
        results.rounds.append(_one_round(ordered, setting, results, turns, wait))
        say(f"  round {number + 1}/{rounds} of {setting.model}, {setting.tuning}")
    return results


def _one_round(
    contenders: Sequence[Contender],
    setting: Setting,
    results: Results,
    turns: int,
    wait: Callable[[], float],
) -> dict[str, list[Record]]:
    running: dict[str, Running] = {}
    reports: dict[str, list[Record]] = {}
    try:
        for contender in contenders:
            started = running[contender.name] = Running(contender, setting)
            # One after the other: two libraries starting at once could time each other out.
            _try(started, results, running, started.wait_ready)
            results.versions |= started.versions
        results.loads.append(wait())
        for _ in range(turns):
            for name, ready in list(running.items()):
                _try(
                    ready, results, running,
                    lambda n=name, r=ready: reports.setdefault(n, []).append(_undisturbed(r)),
                )  # fmt: skip
    finally:
        for left in running.values():
            left.close()
    return reports


def _undisturbed(running: Running, attempts: int = 3) -> Record:
    """One report; taken again while somebody else uses the machine, the quietest is kept."""
    reports = []
    for _ in range(attempts):
        reports.append(running.turn())
        if _number(reports[-1], "foreign_share") < DISTURBED:
            return reports[-1]
    return min(reports, key=lambda report: _number(report, "foreign_share"))


def _try(
    running: Running, results: Results, all_running: dict[str, Running], act: Callable[[], None]
) -> None:
    """Act; a contender that fails is closed, noted, and out of this round."""
    name = running.contender.name
    try:
        act()
    except ContenderError as failure:
        results.failures[name] = str(failure)
        say(f"  {name} failed: {failure}")
        all_running.pop(name).close()


def machine() -> Record:
    """What the numbers depend on: processor, cores, versions, commit, date, command."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return {
        "cpu": cpu[0] if cpu else "unknown",
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "libc": libc,
        "python": sys.version.split()[0],
        "torch": _version_of("torch"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed_since_commit": bool(_git("status", "--porcelain", "--", "src", "benchmarks")),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": " ".join(["python", _short(sys.argv[0]), *sys.argv[1:]]),
    }


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _short(path: str) -> str:
    absolute = Path(path).resolve()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else absolute.name


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page or a terminal: padded, the first column to the left."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *(line(row) for row in cells[1:])])


def times(value: float | None, goal: float | None = None) -> str:
    """A ratio for a table, with its goal and whether it is reached."""
    if value is None:
        return "–"
    if goal is None:
        return f"{value:.3f} ×"
    return f"{value:.3f} × (goal {goal:g}: {'met' if value >= goal else 'not met'})"


def save(name: str, data: Mapping[str, object], output: Path | None) -> Path:
    """Write the results beside the scripts, or where the user said."""
    path = output or HERE / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n")
    return path
