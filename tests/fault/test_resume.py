"""Everything is killed, and a new start goes on at the very step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parti.checkpoint.read import newest_good
from parti.testing import FaultScript

from .conftest import DEADLINE_S, Jobs

EPOCHS = 40
Undisturbed = Callable[..., str]


def newest(directory: Path) -> int:
    found = newest_good(directory, lambda text: None)
    return -1 if found is None else found.step


@pytest.mark.parametrize(
    ("how", "before", "after", "until"),
    [("trainer", 3, 2, 325), ("trainer", 1, 2, 325), ("loop", 2, 3, 325), ("loop", 2, 1, 850)],
)
def test_a_new_start_goes_on_in_the_middle_of_an_epoch(
    jobs: Jobs,
    undisturbed: Undisturbed,
    tmp_path: Path,
    how: str,
    before: int,
    after: int,
    until: int,
) -> None:
    directory = tmp_path / "checkpoints"
    process, _ = jobs.start(before, EPOCHS, how=how, CHECKPOINTS=str(directory))
    deadline = time.monotonic() + DEADLINE_S
    while newest(directory) < until:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # its workers end with it
    process.communicate(timeout=DEADLINE_S)
    ended = jobs.run(after, EPOCHS, how=how, CHECKPOINTS=str(directory))
    assert ended.exit_code == 0, ended.output
    assert set(ended.found.values()) == {undisturbed(EPOCHS, how)}
    assert newest(directory) == 30 * EPOCHS, "the last state is on the disk"
    assert not list(directory.glob(".*draft")), "drafts are left"


def test_ranks_are_lost_while_checkpoints_are_written(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    script = FaultScript().kill(rank=0, step=51, at="forward").kill(rank=1, step=201, at="update")
    ended = jobs.run(3, EPOCHS, faults=script, CHECKPOINTS=str(directory))
    assert ended.exit_code == 0, ended.output
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}
    assert newest(directory) == 30 * EPOCHS
