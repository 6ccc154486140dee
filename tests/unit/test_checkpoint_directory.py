"""The directory of checkpoints: what stays in it, what goes, and what is swept after the dead."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parti.checkpoint.drafts import STALE_AFTER_S
from parti.checkpoint.manifest import read_manifest
from parti.checkpoint.owner import own
from parti.checkpoint.read import list_checkpoints, load, newest_good
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer

PATIENCE_S = 30.0

Make = Callable[..., Writer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes writers that are closed when the test is over."""
    writers = []

    def make_one(token: str = "job", **settings: Any) -> Writer:
        value = Checkpoint(**{"directory": tmp_path, **settings})
        writers.append(Writer(value, token=token, note=pytest.fail))
        return writers[-1]

    yield make_one
    for writer in writers:
        writer.close()


def write(writer: Writer, step: int) -> None:
    tree = {"w": torch.full((9,), step), "step": step}
    writer.begin(tree, step=step, facts={}, part=0, num_parts=1, deadline_s=PATIENCE_S)
    assert writer.wait(PATIENCE_S) is None


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_sha256sum_verifies_it(make: Make, tmp_path: Path) -> None:
    write(make(), 3)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    path = tmp_path / "step-0000000003"
    assert subprocess.run(command, cwd=path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_stay(make: Make, tmp_path: Path, keep: int) -> None:
    writer = make(keep=keep)
    for step in range(1, 6):
        write(writer, step)
    assert [found.step for found in list_checkpoints(tmp_path)] == [5, 4, 3, 2, 1][:keep]
    writer.close()
    assert names(tmp_path) == {f"step-{step:010}" for step in range(6 - keep, 6)}


def test_damaged_ones_do_not_count(make: Make, tmp_path: Path) -> None:
    writer = make(keep=2)
    for step in (1, 2):
        write(writer, step)
    next((tmp_path / "step-0000000002").glob("part*")).unlink()
    write(writer, 3)
    assert [found.step for found in list_checkpoints(tmp_path)] == [3, 2, 1]
    write(writer, 4)
    assert [found.step for found in list_checkpoints(tmp_path)] == [4, 3]


def test_the_one_written_last_is_the_newest(make: Make, tmp_path: Path) -> None:
    """Also after training went back: a damaged later step must not push out the only good one."""
    write(make(keep=1), 300)
    next((tmp_path / "step-0000000300").glob("part*")).unlink()
    writer = make(token="again", keep=1)
    write(writer, 250)
    newest = newest_good(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.step == 250


def test_a_step_may_be_written_again(make: Make, tmp_path: Path) -> None:
    writer = make(keep=3)
    write(writer, 5)
    first = read_manifest(tmp_path / "step-0000000005")
    write(writer, 5)
    (found,) = list_checkpoints(tmp_path)
    assert found.path.name == "step-0000000005.1"
    assert found.head is not None
    assert found.head.sequence == first.sequence + 1
    assert load(found.path)["step"] == 5


def draft(directory: Path, token: str, age_s: float = 0.0) -> Path:
    """What a job of that token left behind."""
    path = directory / f".step-0000000099.{token}-4.draft"
    path.mkdir(parents=True)
    (path / "part-00000-of-00001.safetensors").write_bytes(b"half")
    then = time.time() - age_s
    for one in (path / "part-00000-of-00001.safetensors", path):
        os.utime(one, (then, then))
    return path


def test_drafts_of_the_dead_are_swept(make: Make, tmp_path: Path) -> None:
    lock = own(tmp_path, "dead")
    assert lock is not None
    os.close(lock)  # as the kernel does when a process ends
    dead, old = draft(tmp_path, "dead"), draft(tmp_path, "old", age_s=STALE_AFTER_S + 60)
    half_removed = old.rename(tmp_path / ".step-0000000098.older-2.removed")
    alive, unknown = draft(tmp_path, "alive"), draft(tmp_path, "unknown")
    lock = own(tmp_path, "alive")
    assert lock is not None
    (tmp_path / ".unborn.owner").touch()  # killed before it had written a word
    write(make(), 1)
    os.close(lock)
    assert not dead.exists()
    assert not half_removed.exists()
    assert alive.exists()
    assert unknown.exists()  # perhaps of another host
    assert ".dead.owner" not in names(tmp_path)
    assert ".unborn.owner" not in names(tmp_path)
    assert ".alive.owner" in names(tmp_path)


def test_foreign_files_stay(make: Make, tmp_path: Path) -> None:
    mine = {"notes.txt", ".hidden", "step-1", "step-0000000001-best"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    writer = make(keep=1)
    for step in (1, 2, 3):
        write(writer, step)
    writer.close()
    assert names(tmp_path) == {*mine, "step-0000000003"}


def test_directories_are_made(make: Make, tmp_path: Path) -> None:
    write(make(directory=tmp_path / "a" / "b"), 1)
    assert names(tmp_path / "a" / "b") >= {"step-0000000001"}
