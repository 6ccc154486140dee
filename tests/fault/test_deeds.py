"""Disks that fill and checkpoints that are damaged while a training goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parti.checkpoint.read import list_checkpoints, verify
from parti.comm.deeds import FILLER
from parti.testing import FaultScript

from .conftest import Jobs

EPOCHS = 6
STEPS = 30 * EPOCHS
MOUNT_BYTES = 8 << 20
Undisturbed = Callable[..., str]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def good(directory: Path) -> list[int]:
    return [found.step for found in list_checkpoints(directory) if not verify(found.path)]


def test_a_disk_that_fills_does_not_end_the_training(
    jobs: Jobs, undisturbed: Undisturbed, mount: Path
) -> None:
    directory = mount / "checkpoints"
    script = FaultScript().fill(mount, rank=0, step=70, at="backward")
    ended = jobs.run(2, EPOCHS, faults=script, CHECKPOINTS=str(directory))
    assert ended.exit_code == 0, ended.output
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}
    assert f"{directory} is full" in ended.output
    kept = good(directory)
    assert kept and max(kept) < 70, "one was written before, and none in no room"
    assert not list(directory.glob(".*draft/*.safetensors")), "what could not be written is left"

    # With room again, a new start goes on from there.
    (mount / FILLER).unlink()
    again = jobs.run(3, EPOCHS, CHECKPOINTS=str(directory))
    assert again.exit_code == 0, again.output
    assert set(again.found.values()) == {undisturbed(EPOCHS)}
    assert max(good(directory)) == STEPS
    assert not list(directory.glob(".*draft"))


def test_a_damaged_checkpoint_is_passed_over(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    script = FaultScript().corrupt(directory, rank=0, step=120).kill(rank=0, step=120)
    ended = jobs.run(2, EPOCHS, faults=script.kill(rank=1, step=120), CHECKPOINTS=str(directory))
    assert ended.exit_code != 0, ended.output
    newest, *others = list_checkpoints(directory)
    assert verify(newest.path) and others
    assert not any(verify(each.path) for each in others)

    again = jobs.run(2, EPOCHS, CHECKPOINTS=str(directory))
    assert again.exit_code == 0, again.output
    assert f"{newest.path} is not used" in again.output
    assert set(again.found.values()) == {undisturbed(EPOCHS)}
    assert max(good(directory)) == STEPS
