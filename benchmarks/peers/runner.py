"""What every contender's script shares: its command line, the meeting point, and the clock.

Owns how a step is timed; must not know torch, TensorFlow or Parti, so that each is measured by
the same few lines.

A contender is started once a round and then waits, blocked on a FIFO and using no processor time,
until the harness gives it a turn: `window_s settle_s`. It runs for `settle_s` to warm its caches,
meets its other processes, runs as many steps as fit in `window_s`, meets them again, and reports.
The meeting point is a page of shared memory of our own, so that no contender pays for its library's
barrier and the twin, which does not communicate, is held to the same start and end.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SLOT_BYTES = 64
"""One cache line for each rank: what it counts, what it measured."""

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The command line of a contender. Rank and world size come from the launcher's variables."""

    contender: str
    model: str
    processes: int
    threads: int
    tuning: str
    batch_size: int
    micro_batches: int | None
    exact: bool
    recovery: bool
    precision: str
    feed: str
    parts: tuple[str, ...] | None
    lockstep: bool
    warmup: int
    directory: Path

    @property
    def tuned(self) -> bool:
        """Whether the model's layout and products are made equal to Parti's."""
        return self.tuning == "same"

    @property
    def global_batch(self) -> int:
        """Samples of one step over all processes."""
        return self.batch_size * self.processes


def parse_arguments() -> Arguments:
    """Read the command line that the harness gives to all contenders alike."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tuning", choices=("same", "users"), default="users")
    parser.add_argument("--batch-size", type=int, required=True, help="samples a process and step")
    parser.add_argument("--micro-batches", type=int, default=None)
    parser.add_argument("--exact", type=int, choices=(0, 1), default=1)
    parser.add_argument("--recovery", type=int, choices=(0, 1), default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--feed", choices=("fixed", "memory"), default="fixed")
    parser.add_argument("--parts", nargs="*", help="of Parti's tuning; all where not given")
    parser.add_argument("--lockstep", action="store_true", help="meet at every step")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--directory", type=Path, required=True)
    given = vars(parser.parse_args())
    given["exact"] = bool(given["exact"])
    given["recovery"] = bool(given["recovery"])
    given["parts"] = None if given["parts"] is None else tuple(given["parts"])
    return Arguments(**given)


class Meeting:
    """A barrier of `world_size` processes on one page of a file they all map."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.count = rank, world_size, 0
        # The harness made the file, full of zeros: nobody can arrive before it exists.
        with path.open("r+b") as file:
            self.page = mmap.mmap(file.fileno(), SLOT_BYTES * world_size)

    def wait(self) -> None:
        """Return when every rank has come; spins, as the processes arrive close together."""
        self.count += 1
        struct.pack_into("<Q", self.page, SLOT_BYTES * self.rank, self.count)
        deadline = time.monotonic() + DEADLINE_S
        for other in range(self.world_size):
            spins = 0
            while struct.unpack_from("<Q", self.page, SLOT_BYTES * other)[0] < self.count:
                os.sched_yield()
                spins += 1
                if spins % 4096 == 0 and time.monotonic() > deadline:
                    raise TimeoutError(f"rank {other} did not reach meeting {self.count}")

    def tell(self, *values: float) -> None:
        """Leave this rank's numbers for the others to read after the next `wait`."""
        struct.pack_into(f"<{len(values)}d", self.page, SLOT_BYTES * self.rank + 8, *values)

    def heard(self, num_values: int) -> list[tuple[float, ...]]:
        """What each rank left, in rank order."""
        return [
            struct.unpack_from(f"<{num_values}d", self.page, SLOT_BYTES * rank + 8)
            for rank in range(self.world_size)
        ]


def busy_s() -> float:
    """Processor time that the whole machine has used up."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def serve(
    arguments: Arguments,
    run_steps: Callable[[int], object],
    *,
    rank: int,
    meet: int | None = None,
    versions: dict[str, str] | None = None,
) -> None:
    """Take turns until the harness closes the FIFO. `meet` is the number of processes."""
    num_processes = arguments.processes if meet is None else meet
    meeting = Meeting(arguments.directory / "meeting", rank, num_processes)
    run_steps(arguments.warmup)
    step_s = rough_step_s(meeting, run_steps)
    # Opening for reading blocks until the harness writes; reading blocks until our turn.
    with (arguments.directory / f"turns-{rank}").open() as turns:
        report(arguments, rank, {"ready": True, "versions": versions or {}})
        for line in turns:
            window_s, settle_s = (float(word) for word in line.split())
            run_steps(max(1, round(settle_s / step_s)))
            turn = timed(meeting, run_steps, max(3, round(window_s / step_s)))
            step_s = turn.elapsed_s / turn.steps
            report(arguments, rank, describe(arguments, turn))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One timed window, over all ranks; the same value on each."""

    steps: int
    elapsed_s: float
    own_s: float
    busy_s: float


def rough_step_s(meeting: Meeting, run_steps: Callable[[int], object]) -> float:
    """What a step takes, from ever longer runs; every rank arrives at the same number."""
    steps = 1
    while True:
        turn = timed(meeting, run_steps, steps)
        if turn.elapsed_s > 0.03:
            return turn.elapsed_s / steps
        steps *= 4


def timed(meeting: Meeting, run_steps: Callable[[int], object], steps: int) -> Turn:
    """Time `steps` steps between two meetings; the slowest rank's clock counts."""
    meeting.wait()
    busy, own, start = busy_s(), time.process_time(), time.perf_counter()
    run_steps(steps)
    meeting.wait()
    elapsed = time.perf_counter() - start
    meeting.tell(elapsed, time.process_time() - own, busy_s() - busy)
    meeting.wait()
    heard = meeting.heard(3)
    # Nobody may overwrite the slots before all have read them.
    meeting.wait()
    return Turn(
        steps=steps,
        elapsed_s=max(e for e, _, _ in heard),
        own_s=sum(o for _, o, _ in heard),
        busy_s=max(b for _, _, b in heard),
    )


def describe(arguments: Arguments, turn: Turn) -> dict[str, object]:
    """One line of the report."""
    cores = os.cpu_count() or 1
    return {
        "contender": arguments.contender,
        "model": arguments.model,
        "processes": arguments.processes,
        "threads": arguments.threads,
        "steps": turn.steps,
        "step_s": turn.elapsed_s / turn.steps,
        "samples_per_s": arguments.global_batch * turn.steps / turn.elapsed_s,
        # What others used of the machine meanwhile: a disturbed turn shows itself.
        "foreign_share": max(0.0, turn.busy_s - turn.own_s) / (turn.elapsed_s * cores),
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def report(arguments: Arguments, rank: int, what: dict[str, object]) -> None:
    """Send one line to the harness; rank 0 speaks, except that every rank says it is ready."""
    if rank == 0 or "ready" in what:
        # One write of less than a page is atomic on a FIFO: the lines of ranks do not mix.
        with (arguments.directory / "reports").open("w") as reports:
            reports.write(json.dumps(what) + "\n")


def rank_and_world() -> tuple[int, int]:
    """The place the harness gave this process, in torchrun's words."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as missing:
        sys.exit(f"{missing.args[0]} is not set: contenders are started by the harness")
