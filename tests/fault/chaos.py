"""Many faults at random moments of one training, and the same bits at its end.

    python tests/fault/chaos.py [--faults 200] [--processes 4] [--seed N]

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

from parti.doctor.check import check
from parti.doctor.run import read_run

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


def read_crew(events: Path, struck: set[int]) -> Crew:
    """From the record of the run, as its supervisor writes it. Who has been struck is as good as
    lost, also where it is only stopped."""
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
    alive = {member: pid for member, pid in pids.items() if pid not in struck}
    return Crew(
        {member: pid for member, pid in alive.items() if member in settled},
        {member: pid for member, pid in alive.items() if member not in settled},
    )


def strike(
    job: subprocess.Popen[bytes], events: Path, draw: random.Random, struck: set[int]
) -> str | None:
    """One fault; None if the job has ended before there was anybody to hit."""
    deadline = time.monotonic() + WAIT_S
    while job.poll() is None:
        crew = read_crew(events, struck)
        victims = crew.others if draw.random() < SHARE_AT_NEWCOMERS else crew.holders
        if len(crew.holders) >= 2 and victims:
            member = draw.choice(sorted(victims))
            deed = signal.SIGSTOP if draw.random() < SHARE_OF_STOPS else signal.SIGKILL
            try:
                os.kill(victims[member], deed)
            except ProcessLookupError:
                continue
            struck.add(victims[member])
            return f"{deed.name} {member}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"no second process came within {WAIT_S:.0f} s: {crew}")
        time.sleep(0.02)
    return None


def start(directory: Path, processes: int, epochs: int = 10**6) -> subprocess.Popen[bytes]:
    """A training of so many epochs, or one that ends when `directory/stop` is there."""
    command = [
        sys.executable, "-m", "parti", "run", "-n", str(processes), "--name", "chaos",
        *(("--spares", "2") if processes > 1 else ()),
        str(TRAINING), str(epochs), str(directory / "out"),
    ]  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
    with (directory / "console").open("ab") as console:
        return subprocess.Popen(
            command, cwd=directory, stdout=console, stderr=console,
            env={**clean, "PATIENCE": str(PATIENCE_S), "STOP_FILE": str(directory / "stop")},
            start_new_session=True,
        )  # fmt: skip


def run(processes: int, faults: int, seed: int, directory: Path) -> set[str]:
    """What the processes that are there at the end have found. Raises where the job did not
    survive all faults, or left anything behind."""
    draw = random.Random(seed)
    shared_before = set(os.listdir("/dev/shm"))
    struck: set[int] = set()
    job = start(directory, processes)
    events = directory / "runs" / "chaos" / "events.jsonl"
    try:
        deadline = time.monotonic() + WAIT_S
        while not events.exists():
            assert time.monotonic() < deadline and job.poll() is None, "the job did not start"
            time.sleep(0.02)
        for _ in range(faults):
            assert strike(job, events, draw, struck) is not None, (
                directory / "console"
            ).read_text()
            time.sleep(draw.uniform(0.0, 0.8))
        (directory / "stop").touch()
        job.wait(WAIT_S)
    finally:
        job.kill()
    console = (directory / "console").read_text()
    assert job.returncode == 0, console[-6000:]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in _words(p)]
    assert not left, f"processes are left: {left}"
    assert set(os.listdir("/dev/shm")) <= shared_before, "shared segments are left"
    assert check(read_run(events.parent)) == [], "the history of commits is wrong"
    return {path.read_text() for path in directory.glob("out.*")}


def undisturbed(found: str, directory: Path) -> str:
    """What one process finds in as many epochs, with nothing happening to it."""
    directory.mkdir()
    assert start(directory, 1, int(found.split("\n")[0])).wait(3600) == 0
    (alone,) = (path.read_text() for path in directory.glob("out.*"))
    return alone


def _words(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"chaos: {given.faults} faults, {given.processes} processes, --seed {given.seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parti-chaos-") as name:
        directory = Path(name)
        found = run(given.processes, given.faults, given.seed, directory)
        took_s = time.monotonic() - started
        epochs = sorted(found)[0].split("\n")[0]
        print(f"all struck in {took_s:.0f} s and {epochs} epochs; now as many without any")
        same = found == {undisturbed(sorted(found)[0], directory / "alone")}
    print(f"weights, optimizer state, metrics and history: {'EQUAL' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
