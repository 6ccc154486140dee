"""How long training stands still for a checkpoint: Parti beside torch.save and DCP's async_save.

    python benchmarks/checkpoint.py [--megabytes 400] [--rounds 5] [--directory DIR]

A state of a model and Adam's moments is written by one process, and by two that hold the same
state. A turn is the time from a common start to the moment at which the slowest process may go on
training: the whole of torch.save (rank 0 writes, and brings the file to the disk), or until
async_save or `begin` returns. Only then is it waited for until the checkpoint is on the disk, which
is shown beside. Turns are interleaved; a ratio is taken within a round, and the median over rounds
is shown. Also shown: the first checkpoint. Parti is told of the state before, and has its memory
ready; the others touch theirs then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import say, wait_until_idle
from results import ROOT, machine, markdown, median, save, times
from torch import multiprocessing
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

sys.path.insert(0, str(ROOT / "src"))

from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer

NUM_LAYERS = 50
PATIENCE_S = 600.0
GOALS = {"torch.save + fsync": 0.1, "dcp.async_save": 1.0}
"""The largest share of the other's standstill that ours may be."""

Turn = tuple[float, float]
"""Seconds until training goes on, and until the checkpoint is on the disk."""
Turns = dict[str, list[Turn]]


class Contender(Protocol):
    def begin(self, state: dict[str, Any], place: Path, step: int) -> None:
        """Until training may go on."""

    def wait(self) -> None:
        """Until it is on the disk."""


class TorchSave:
    """Rank 0 writes one file."""

    def begin(self, state: dict[str, Any], place: Path, step: int) -> None:
        if rank() == 0:
            place.mkdir(parents=True)
            with (place / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        barrier()

    def wait(self) -> None:
        return None


class AsyncSave:
    """DCP's, as it comes or with a stager that keeps its memory."""

    def __init__(self, stager: DefaultStager | None) -> None:
        self._stager = stager
        self._future: Any = None

    def begin(self, state: dict[str, Any], place: Path, step: int) -> None:
        self._future = dcp.async_save(
            state, checkpoint_id=place, async_stager=self._stager, no_dist=not dist.is_initialized()
        )

    def wait(self) -> None:
        self._future.result()


class Parti:
    """Every process writes a part."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self._writer = Writer(Checkpoint(directory, keep=1), token="benchmark", note=say)
        self._num_parts = dist.get_world_size() if dist.is_initialized() else 1
        self._writer.reserve(state, part=rank(), num_parts=self._num_parts)

    def begin(self, state: dict[str, Any], place: Path, step: int) -> None:
        self._writer.begin(
            state,
            step=step,
            facts={},
            part=rank(),
            num_parts=self._num_parts,
            deadline_s=PATIENCE_S,
        )

    def wait(self) -> None:
        problem = self._writer.wait(PATIENCE_S)
        assert problem is None, problem


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def new_state(megabytes: int) -> dict[str, Any]:
    """A third of it weights, two thirds moments."""
    size = megabytes * 1_000_000 // (3 * 4 * NUM_LAYERS)
    make: Callable[[], torch.Tensor] = lambda: torch.randn(size)  # noqa: E731
    return {
        "model": {f"layer{i}.weight": make() for i in range(NUM_LAYERS)},
        "optimizer": {
            "state": {
                str(i): {"step": torch.tensor(1.0), "exp_avg": make(), "exp_avg_sq": make()}
                for i in range(NUM_LAYERS)
            }
        },
    }


def work(
    process: int,
    processes: int,
    directory: Path,
    given: argparse.Namespace,
    answers: SimpleQueue[Turns],
) -> None:
    """One process of the measurement."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    if processes > 1:
        store = dist.FileStore(str(directory / "store"), processes)
        limit = timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "gloo", store=store, rank=process, world_size=processes, timeout=limit
        )
    state = new_state(given.megabytes)
    kept = DefaultStager(StagingOptions(False, False, False, False))
    contenders: dict[str, Contender] = {
        "torch.save + fsync": TorchSave(),
        "dcp.async_save": AsyncSave(None),
        "dcp.async_save, memory kept": AsyncSave(kept),
        "Parti": Parti(directory / "Parti", state),
    }
    turns: Turns = {name: [] for name in contenders}
    for number in range(given.rounds + 1):
        if not given.no_wait and process == 0:
            wait_until_idle()
        for name, contender in contenders.items():
            place = directory / "others" / name.replace(" ", "-") / str(number)
            turns[name].append(turn(contender, state, place, number))
            if process == 0:
                shutil.rmtree(place, ignore_errors=True)
    answers.put(turns)


def turn(contender: Contender, state: dict[str, Any], place: Path, number: int) -> Turn:
    """One checkpoint, from a quiet disk and a common start to a quiet disk."""
    for tensor in state["model"].values():
        tensor.add_(1.0)
    os.sync()
    barrier()
    start = time.perf_counter()
    contender.begin(state, place, number + 1)
    stood_still_s = time.perf_counter() - start
    contender.wait()
    done_s = time.perf_counter() - start
    barrier()
    return stood_still_s, done_s


def measure(processes: int, given: argparse.Namespace) -> Turns:
    """The slowest process's times, round by round; the first round is the first checkpoint."""
    directory = Path(tempfile.mkdtemp(prefix="parti-checkpoint-", dir=given.directory))
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        running = multiprocessing.spawn(
            work, (processes, directory, given, answers), processes, join=False
        )
        every = [answers.get() for _ in range(processes)]
        while not running.join():
            pass
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        name: [
            (max(one[0] for one in both), max(one[1] for one in both))
            for both in zip(*(turns[name] for turns in every), strict=True)
        ]
        for name in every[0]
    }


def ratio(turns: Turns, to: str) -> float | None:
    pairs = zip(turns["Parti"][1:], turns[to][1:], strict=True)
    return median(ours[0] / theirs[0] for ours, theirs in pairs)


def table(turns: Turns) -> str:
    rows = []
    for name, every in turns.items():
        others = name != "Parti"
        rows.append(
            (
                name,
                f"{(median(one[0] for one in every[1:]) or 0) * 1e3:.1f}",
                f"{every[0][0] * 1e3:.1f}",
                f"{(median(one[1] for one in every[1:]) or 0) * 1e3:.0f}",
                times(ratio(turns, name), GOALS.get(name), at_most=True) if others else "",
            )
        )
    columns = ("", "stands still, ms", "the first, ms", "on the disk, ms", "Parti's share")
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--directory", type=Path, help="where to write; default: for temporary files"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    given = parser.parse_args()
    print(machine())
    data: dict[str, Any] = {"megabytes": given.megabytes, "goals": GOALS, "processes": {}}
    for processes in given.processes:
        turns = measure(processes, given)
        print(f"\n{given.megabytes} MB, {processes} process{'es' if processes > 1 else ''}")
        print(table(turns))
        data["processes"][str(processes)] = {
            name: {"turns_s": every, "share": ratio(turns, name)} for name, every in turns.items()
        }
    print(f"\nwritten to {save('checkpoint', data, given.output)}")


if __name__ == "__main__":
    main()
