"""What a loss costs: from the fault to the next committed step; and recovery without a loss.

python benchmarks/recovery.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from contenders import all_contenders, variant
from harness import HERE, add_options, clean, compare, effort_of, say, wait_until_idle
from models import WORKLOADS
from results import Results, Setting, markdown, save, show_failures, times

from parti.data.batches import Feed
from parti.data.order import Position

MODEL = "mnist_cnn"
GOALS = {
    "a kill to the next step": 0.5,
    "a freeze to the next step, patience 1 s": 2.0,
    "a spare in place": 1.0,
    "place of a resume in 10^8 samples": 0.05,
}
STEP_GOAL = 1 / 1.02
START_GOAL = 1.5
WARM_S = 5.0
"""After which a spare has imported everything."""
_WORDS = struct.Struct("<qqqq")


class Job:
    """A training on two processes under `parti run`, watched from outside."""

    def __init__(self, directory: Path, *options: str, processes: int = 2) -> None:
        self.directory = directory
        self.events = directory / "runs" / "job" / "events.jsonl"
        command = [
            sys.executable, "-m", "parti", "run", "-n", str(processes), "--name", "job", *options,
            str(HERE / "peers" / "recovering.py"), MODEL, str(directory), "1.0",
        ]  # fmt: skip
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=directory, env=clean({}), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def holders(self) -> dict[int, int]:
        """The processes of the world that counts, by number."""
        pids: dict[int, int] = {}
        called: dict[int, list[int]] = {}
        settled: list[int] = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.events.read_text().splitlines():
                event = json.loads(line)
                if event["kind"] == "started":
                    pids[event["member"]] = event["pid"]
                elif event["kind"] == "called":
                    called[event["generation"]] = event["members"]
                elif event["kind"] == "settled":
                    settled = called[event["generation"]]
                elif event["kind"] == "lost":
                    pids.pop(event["member"], None)
        return {member: pids[member] for member in settled if member in pids}

    def steps(self, member: int) -> tuple[int, float, int, float]:
        """First and last committed step of a process, with their times."""
        with contextlib.suppress(FileNotFoundError, struct.error):
            first, first_ns, last, last_ns = _WORDS.unpack(
                (self.directory / str(member)).read_bytes()
            )
            return first, first_ns / 1e9, last, last_ns / 1e9
        return 0, 0.0, 0, 0.0

    def two_at_work(self, but: int = -1) -> dict[int, int]:
        """Wait until two processes are in the world and have committed steps in it."""
        for _ in self._looking():
            found = self.holders()
            if len(found) == 2 and but not in found and all(self.steps(m)[2] for m in found):
                return found
        raise AssertionError

    def reached_s(self, member: int, step: int) -> float:
        """When a process was first seen to have committed a step."""
        for _ in self._looking(0.001):
            if self.steps(member)[2] >= step:
                return self.steps(member)[3]
        raise AssertionError

    def _looking(self, nap_s: float = 0.02) -> Iterator[None]:
        deadline = time.monotonic() + 120
        while self.process.poll() is None:
            yield
            if time.monotonic() > deadline:
                raise TimeoutError("the job does not get on")
            time.sleep(nap_s)
        raise RuntimeError(f"the job has ended with {self.process.returncode}")

    def end(self) -> None:
        (self.directory / "stop").touch()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@contextlib.contextmanager
def a_job(*options: str, processes: int = 2) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="parti-bench-") as name:
        job = Job(Path(name), *options, processes=processes)
        try:
            yield job
        finally:
            job.end()


def faults(
    count: int, deed: signal.Signals, *options: str, rest_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Seconds from each fault to the survivor's next step, and to the newcomer's first."""
    draw = random.Random(1)
    to_step, to_place = [], []
    with a_job(*options) as job:
        for _ in range(count):
            pair = job.two_at_work()
            time.sleep(rest_s + draw.uniform(0.1, 0.4))  # anywhere in a step
            lost = draw.choice(sorted(pair))
            (left,) = set(pair) - {lost}
            struck_s = time.monotonic()
            os.kill(pair[lost], deed)
            # The step under way may still be committed without the lost one; the next cannot be.
            step = job.steps(left)[2] + 2
            to_step.append(job.reached_s(left, step) - struck_s)
            new = next(iter(set(job.two_at_work(but=lost)) - {left}))
            to_place.append(job.steps(new)[1] - struck_s)
    return to_step, to_place


def start_s() -> float:
    """A plain start of one process, to its first step."""
    with a_job(processes=1) as job:
        while job.steps(0)[2] == 0:
            time.sleep(0.002)
        return job.steps(0)[1] - job.started_s


class _Many(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> int:
        return index


def resume_s() -> float:
    """From nothing to the first batch in the middle of 10^8 samples."""
    started = time.perf_counter()
    start = Position(epoch=3, step_in_epoch=400_000)
    next(iter(Feed(_Many(), batch_size=128, epochs=10, owned=range, start=start)))
    return time.perf_counter() - started


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def step_table(results: list[Results]) -> str:
    rows = [
        (
            WORKLOADS[result.setting.model].title,
            f"{result.samples_per_s('on') or 0:,.0f}",
            f"{result.samples_per_s('off') or 0:,.0f}",
            times(result.ratio("on", "off"), STEP_GOAL),
        )
        for result in results
    ]
    return markdown(("model", "recovery on, samples/s", "off, samples/s", "ratio"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--models", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--spared", type=int, default=11)
    parser.add_argument("--starts", type=int, default=5)
    given = parser.parse_args()
    wait_until_idle()
    say(f"{given.kills} kills")
    kills, _ = faults(given.kills, signal.SIGKILL, "--spares", "2")
    say(f"{given.spared} kills with a warm spare")
    _, spared = faults(given.spared, signal.SIGKILL, "--spares", "1", rest_s=WARM_S)
    say(f"{given.freezes} freezes")
    freezes, _ = faults(given.freezes, signal.SIGSTOP, "--spares", "1")
    say(f"{given.starts} replacements from scratch, and as many plain starts")
    replaced, plain = [], []
    for _ in range(given.starts):
        replaced += faults(1, signal.SIGKILL)[1]
        plain.append(start_s())
    places = [resume_s() for _ in range(11)]
    seconds = {
        "a kill to the next step": kills,
        "a freeze to the next step, patience 1 s": freezes,
        "a spare in place": spared,
        "a replacement in place": replaced,
        "a plain start to its first step": plain,
        "place of a resume in 10^8 samples": places,
    }
    rows = [
        (
            name, str(len(values)), f"{statistics.median(values):.3f}",
            f"{percentile(values, 0.95):.3f}", _judged(name, values, plain),
        )
        for name, values in seconds.items()
    ]  # fmt: skip
    print(f"\n{markdown(('from', 'times', 'median, s', '95th percentile, s', 'goal'), rows)}")
    results = []
    for model in given.models:
        say(f"{WORKLOADS[model].title}: recovery on against off")
        parti = all_contenders(given.peers, given.processes)["parti"]
        pieces = ("--micro-batches", str(given.processes))
        contenders = [
            variant(parti, "on", "recovery on", "--recovery", "1", *pieces),
            variant(parti, "off", "recovery off", "--recovery", "0", *pieces),
        ]
        setting = Setting(
            model=model, batch_size=WORKLOADS[model].batch_size, processes=given.processes
        )
        results.append(compare(contenders, setting, effort_of(given)))
    print(f"\n{step_table(results)}")
    show_failures(results)
    data = {
        "goals": GOALS,
        "seconds": seconds,
        "comparisons": [result.as_data() for result in results],
    }
    print(f"\nwritten to {save('recovery', data, given.output)}")


def _judged(name: str, values: list[float], plain: list[float]) -> str:
    if name == "a replacement in place":
        ratio = statistics.median(values) / statistics.median(plain)
        met = "met" if ratio <= START_GOAL else "not met"
        return f"{ratio:.2f} × a plain start (goal {START_GOAL}: {met})"
    if name not in GOALS:
        return "–"
    met = "met" if percentile(values, 0.95) <= GOALS[name] else "not met"
    return f"{GOALS[name]} s: {met}"


if __name__ == "__main__":
    main()
