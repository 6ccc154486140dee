"""Many faults at random moments of one training, and the same bits at its end.

    python tests/fault/chaos.py [--faults 200] [--processes 4] [--seed N] [--epochs E]

Processes are killed (SIGKILL) and stopped (SIGSTOP) from outside, wherever they are: in the middle
of a kernel, of an exchange, of a recovery, while they start, while they are given the state. One
process that holds the state is always left alone. The seed is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TRAINING = Path(__file__).with_name("training.py")
PATIENCE_S = 1.0
WAIT_S = 60.0
SHARE_OF_STOPS = 0.3
SHARE_AT_NEWCOMERS = 0.2


@dataclass(frozen=True)
class Crew:
    """Who is there, by number: the process ids."""

    holders: dict[int, int]
    """Those that have settled in the newest world."""
    others: dict[int, int]
    """Those that start or wait."""


def read_crew(events: Path) -> Crew:
    """From the record of the run, as its supervisor writes it."""
    pids: dict[int, int] = {}
    called: dict[int, list[int]] = {}
    settled: list[int] = []
    for line in events.read_text().splitlines():
        event = json.loads(line)
        match event["kind"]:
            case "started":
                pids[event["member"]] = event["pid"]
            case "called":
                called[event["generation"]] = event["members"]
            case "settled":
                settled = called[event["generation"]]
            case "lost":
                pids.pop(event["member"], None)
    alive = {member: pid for member, pid in pids.items() if psutil.pid_exists(pid)}
    return Crew(
        {member: pid for member, pid in alive.items() if member in settled},
        {member: pid for member, pid in alive.items() if member not in settled},
    )


def strike(job: subprocess.Popen[bytes], events: Path, draw: random.Random) -> str | None:
    """One fault; None if the job has ended before there was anybody to hit."""
    deadline = time.monotonic() + WAIT_S
    while job.poll() is None:
        crew = read_crew(events)
        victims = crew.others if draw.random() < SHARE_AT_NEWCOMERS else crew.holders
        if len(crew.holders) >= 2 and victims:
            member = draw.choice(sorted(victims))
            deed = signal.SIGSTOP if draw.random() < SHARE_OF_STOPS else signal.SIGKILL
            try:
                os.kill(victims[member], deed)
            except ProcessLookupError:
                continue
            return f"{deed.name} {member}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"no second process came within {WAIT_S:.0f} s: {crew}")
        time.sleep(0.02)
    return None


def start(directory: Path, processes: int, epochs: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "parti", "run", "-n", str(processes), "--name", "chaos",
        *(("--spares", "2") if processes > 1 else ()),
        str(TRAINING), str(epochs), str(directory / "out"),
    ]  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
    with (directory / "console").open("ab") as console:
        return subprocess.Popen(
            command, cwd=directory, stdout=console, stderr=console,
            env={**clean, "PATIENCE": str(PATIENCE_S)}, start_new_session=True,
        )  # fmt: skip


def fingerprints(directory: Path) -> set[str]:
    return {path.read_text() for path in directory.glob("out.*")}


def run(processes: int, faults: int, epochs: int, seed: int, directory: Path) -> int:
    """How many faults struck. Raises where the job did not survive them."""
    draw = random.Random(seed)
    shared_before = set(os.listdir("/dev/shm"))
    job = start(directory, processes, epochs)
    events = directory / "runs" / "chaos" / "events.jsonl"
    struck = 0
    try:
        deadline = time.monotonic() + WAIT_S
        while not events.exists():
            assert time.monotonic() < deadline and job.poll() is None, "the job did not start"
            time.sleep(0.02)
        while struck < faults and strike(job, events, draw) is not None:
            struck += 1
            time.sleep(draw.uniform(0.0, 0.8))
        job.wait(900)
    finally:
        job.kill()
    console = (directory / "console").read_text()
    assert job.returncode == 0, console[-6000:]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in _words(p)]
    assert not left, f"processes are left: {left}"
    assert set(os.listdir("/dev/shm")) <= shared_before, "shared segments are left"
    return struck


def _words(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"chaos: {given.faults} faults, {given.processes} processes, --seed {given.seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parti-chaos-") as name:
        directory = Path(name)
        struck = run(given.processes, given.faults, given.epochs, given.seed, directory)
        found = fingerprints(directory)
        took_s = time.monotonic() - started
        print(f"{struck} faults struck in {took_s:.0f} s; now the same without any")
        alone = directory / "alone"
        alone.mkdir()
        assert start(alone, 1, given.epochs).wait(3600) == 0
        same = found == fingerprints(alone)
    print(f"weights, optimizer state, metrics and history: {'EQUAL' if same else 'DIFFERENT'}")
    if struck < given.faults:
        print(f"the training was over before all {given.faults} faults: give more --epochs")
    sys.exit(0 if same and struck == given.faults else 1)


if __name__ == "__main__":
    main()
