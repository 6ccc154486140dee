"""Processes that write checkpoints and are killed at any moment: what is on the disk is good."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parti.checkpoint.read import list_checkpoints, load, newest_good

SOURCE = Path(__file__).parents[2] / "src"
NUM_KILLS = 20
LONGEST_LIFE_S = 0.2

# Loads torch once, and forks a writer for each life that is asked for. It has one thread, so
# forking is safe.
NURSERY = textwrap.dedent("""
    import os, sys, torch
    torch.set_num_threads(1)
    from parti.checkpoint.value import Checkpoint
    from parti.checkpoint.writer import Writer

    def state(step):
        generator = torch.Generator().manual_seed(step)
        tensors = {str(i): torch.randn(1 + 997 * i, generator=generator) for i in range(20)}
        return {"model": tensors, "step": step}

    def live(directory, token, part, num_parts, step, num_steps):
        settings = Checkpoint(directory, keep=2)
        writer = Writer(settings, token=token, note=lambda text: os.write(2, text.encode()))
        for step in range(step, step + num_steps):
            writer.begin(
                state(step), step=step, facts={}, part=part, num_parts=num_parts, deadline_s=20.0
            )
            writer.wait(20.0)
        writer.close()

    print("ready", flush=True)
    for line in sys.stdin:
        directory, token, part, num_parts, step, num_steps = line.split()
        child = os.fork()
        if not child:
            try:
                live(directory, token, int(part), int(num_parts), int(step), int(num_steps))
            finally:
                os._exit(0)
        print(child, flush=True)
        if num_parts == "1" or part != "0":  # the last of a world: all of them are waited for
            while True:
                try:
                    os.wait()
                except ChildProcessError:
                    break
            print("over", flush=True)
""")


class Nursery:
    """The process that forks writers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(
        self, directory: Path, token: str, num_parts: int, *, step: int, num_steps: int = 10**6
    ) -> list[int]:
        """Fork the writers of one world; their process ids."""
        pids = []
        assert self._process.stdin is not None
        for part in range(num_parts):
            self._process.stdin.write(
                f"{directory} {token} {part} {num_parts} {step} {num_steps}\n"
            )
            self._process.stdin.flush()
            pids.append(int(self.read()))
        return pids

    def wait(self) -> None:
        """Until all of them have ended."""
        assert self.read() == "over"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(30) == 0


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.close()


def assert_is_whole(directory: Path) -> int:
    """The newest good one's step; nothing damaged stands before it, and its content is its own."""
    found = newest_good(directory, pytest.fail)
    if found is None:
        return 0
    tree = load(found.path)
    assert tree["step"] == found.step
    generator = torch.Generator().manual_seed(found.step)
    for number in range(20):
        expected = torch.randn(1 + 997 * number, generator=generator)
        assert torch.equal(tree["model"][str(number)], expected)
    return found.step


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_kill_at_any_moment_leaves_the_last_good_one(
    nursery: Nursery, tmp_path: Path, num_parts: int
) -> None:
    draw = random.Random(num_parts)
    newest = 0
    for life in range(NUM_KILLS):
        pids = nursery.start(tmp_path, f"life{life}", num_parts, step=newest + 1)
        draw.shuffle(pids)
        for pid in pids:
            time.sleep(draw.uniform(0.0, LONGEST_LIFE_S))
            os.kill(pid, signal.SIGKILL)
        nursery.wait()
        before, newest = newest, assert_is_whole(tmp_path)
        assert newest >= before
    assert newest > NUM_KILLS // 2  # or all died before they had written anything
    nursery.start(tmp_path, "last", num_parts, step=newest + 1, num_steps=2)
    nursery.wait()
    assert [found.step for found in list_checkpoints(tmp_path)] == [newest + 2, newest + 1]
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert left == set(), "what the dead left is swept"
