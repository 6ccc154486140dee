"""Disks that fail: at every single call, for good, for want of room, of permission, of a mount."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parti.checkpoint.disk import RealDisk, explain, why_not_writable
from parti.checkpoint.read import list_checkpoints, load, newest_good, verify
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer
from parti.errors import CheckpointError

PATIENCE_S = 30.0
MOUNT_BYTES = 2**20


class FailingDisk:
    """A disk that fails at one of its calls, or from it on."""

    def __init__(self, fails_at: int, *, for_good: bool = False) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at
        self._for_good = for_good
        self._real = RealDisk()

    def _count(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(name)
        if number == self._fails_at or (self._for_good and number > self._fails_at):
            raise OSError(errno.EIO, f"injected at {name}, call {number}")

    def make_directory(self, path: Path) -> None:
        self._count("make_directory")
        self._real.make_directory(path)

    def create(self, path: Path) -> int:
        self._count("create")
        return self._real.create(path)

    def write(self, handle: int, data: memoryview) -> int:
        self._count("write")
        return self._real.write(handle, data[:1000])  # a write may take less

    def sync(self, handle: int) -> None:
        self._count("sync")
        self._real.sync(handle)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        self._real.rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove")
        self._real.remove(path)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((500,), step), "b": torch.full((300,), -step), "step": step}


def writers(directory: Path, token: str, disks: list[Any], **settings: Any) -> list[Writer]:
    value = Checkpoint(directory, keep=1, **settings)
    return [Writer(value, token=token, note=lambda text: None, disk=disk) for disk in disks]


def begin(writer: Writer, step: int, part: int, deadline_s: float = PATIENCE_S) -> None:
    writer.begin(state(step), step=step, facts={}, part=part, num_parts=2, deadline_s=deadline_s)


def write(every: list[Writer], step: int) -> list[str | None]:
    for part, writer in enumerate(every):
        begin(writer, step, part)
    return [writer.wait(PATIENCE_S) for writer in every]


def write_failing(
    directory: Path, every: list[Writer], failing: int, deadline_s: float
) -> list[str | None]:
    """The one that fails comes second, to a draft that is there."""
    begin(every[1 - failing], 2, 1 - failing, deadline_s)
    while every[1].is_busy if failing == 0 else not list(directory.glob(".step*.draft")):
        time.sleep(0.001)
    begin(every[failing], 2, failing, deadline_s)
    return [writer.wait(PATIENCE_S) for writer in every]


def good_step(directory: Path) -> int:
    """The step of the newest good checkpoint, whose content is that step's."""
    found = newest_good(directory, pytest.fail)  # nothing damaged may stand before it
    assert found is not None
    tree = load(found.path)
    assert tree["step"] == found.step
    assert torch.equal(tree["w"], state(found.step)["w"])
    assert torch.equal(tree["b"], state(found.step)["b"])
    return found.step


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def num_calls(directory: Path, failing: int) -> int:
    disks: list[Any] = [None, None]
    disks[failing] = FailingDisk(-1)
    every = writers(directory, "counting", disks)
    assert write(every, 1) == [None, None]
    disks[failing].calls.clear()
    assert write(every, 2) == [None, None]
    for writer in every:
        writer.close()
    return len(disks[failing].calls)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("failing", [0, 1], ids=["part 0", "part 1"])
def test_whichever_call_fails_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, for_good: bool
) -> None:
    monkeypatch.setattr("parti.checkpoint.attempt._PUBLISHING_S", 0.0)
    before = writers(tmp_path / "before", "before", [None, None])
    assert write(before, 1) == [None, None]
    for writer in before:
        writer.close()
    total = num_calls(tmp_path / "counting", failing)
    assert total > (15 if failing == 0 else 5)
    for number in range(total):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", directory)
        disks: list[Any] = [None, None]
        disks[failing] = FailingDisk(number, for_good=for_good)
        every = writers(directory, "now", disks)
        # A disk that fails for good can't even tell the other part so.
        problems = write_failing(directory, every, failing, 0.05 if for_good else PATIENCE_S)
        assert problems[failing], number
        assert good_step(directory) in (1, 2), number
        if not for_good:
            assert "injected" in (problems[failing] or ""), number
            drafts = [name for name in hidden(directory) if name.endswith(".draft")]
            assert drafts == [], (number, problems)
        for writer in every:
            writer.close()
        after = writers(directory, "after", [None, None])
        assert write(after, 3) == [None, None]
        assert good_step(directory) == 3
        for writer in after:
            writer.close()
        left = {path.name for path in directory.iterdir()}
        assert left == {"step-0000000003"}, (number, left)


def test_part_0_tells_what_ailed_another_part(tmp_path: Path) -> None:
    every = writers(tmp_path, "job", [None, FailingDisk(3)])
    problems = write_failing(tmp_path, every, 1, PATIENCE_S)
    assert "part 1 was not written" in (problems[0] or "")
    assert "injected at" in (problems[0] or "")
    for writer in every:
        writer.close()


class OrderedDisk(RealDisk):
    """Notes what a loss of power would take at the moment of each rename and removal."""

    def __init__(self) -> None:
        self._unsafe: set[Path] = set()
        self.named: list[tuple[Path, frozenset[Path]]] = []
        self.removed_after: list[frozenset[Path]] = []

    def create(self, path: Path) -> int:
        self._unsafe |= {path, path.parent}
        return super().create(path)

    def write(self, handle: int, data: memoryview) -> int:
        self._unsafe.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self._unsafe.discard(Path(os.readlink(f"/proc/self/fd/{handle}")))

    def rename(self, source: Path, target: Path) -> None:
        if target.name.startswith("step-"):
            inside = {path for path in self._unsafe if path == source or source in path.parents}
            self.named.append((target, frozenset(inside)))
        if source.name.startswith("step-"):
            self.removed_after.append(frozenset(self._unsafe & {source.parent}))
        super().rename(source, target)
        moved = {target} if source in self._unsafe else set()
        self._unsafe = (self._unsafe - {source}) | moved | {target.parent}

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._unsafe = {one for one in self._unsafe if one != path and path not in one.parents} | {
            path.parent
        }


def test_all_is_on_the_disk_before_it_is_named_and_before_an_older_one_goes(tmp_path: Path) -> None:
    disk = OrderedDisk()
    (writer,) = writers(tmp_path, "job", [disk])
    for step in (1, 2, 3):
        assert write_large(writer, step, 10_000) is None
    writer.close()
    names = [path.name for path, _ in disk.named]
    assert names == ["step-0000000001", "step-0000000002", "step-0000000003"]
    assert [unsafe for _, unsafe in disk.named] == [frozenset()] * 3
    assert disk.removed_after == [frozenset()] * 2


def test_raising_waits_for_the_next_call(tmp_path: Path) -> None:
    (writer,) = writers(tmp_path, "job", [FailingDisk(4)], on_error="raise")
    arguments: dict[str, Any] = {"facts": {}, "part": 0, "num_parts": 1, "deadline_s": 5.0}
    writer.begin(state(1), step=1, **arguments)
    with pytest.raises(CheckpointError, match="step 1: the checkpoint was not written"):
        writer.wait(PATIENCE_S)
    writer.begin(state(2), step=2, **arguments)  # raised once
    assert writer.wait(PATIENCE_S) is None
    writer.close()


def test_an_error_in_the_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(RealDisk, "create", broken)
    (writer,) = writers(tmp_path, "job", [None])
    assert "ZeroDivisionError: a mistake of ours" in (write_large(writer, 1, 10) or "")
    writer.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here; the same is tested with injected errors")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def large(num_bytes: int) -> dict[str, Any]:
    return {"w": torch.ones(num_bytes, dtype=torch.uint8)}


def write_large(writer: Writer, step: int, num_bytes: int) -> str | None:
    writer.begin(large(num_bytes), step=step, facts={}, part=0, num_parts=1, deadline_s=PATIENCE_S)
    return writer.wait(PATIENCE_S)


@pytest.mark.parametrize("is_told", [True, False], ids=["found before", "found while writing"])
def test_a_full_disk(mount: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    if not is_told:  # as where a quota, or somebody else, takes the room
        monkeypatch.setattr("parti.checkpoint.attempt.check_room", lambda *_: None)
    (writer,) = writers(mount, "job", [None])
    assert write_large(writer, 1, 400_000) is None
    problem = write_large(writer, 2, 900_000)
    assert problem is not None
    assert f"{mount} is full" in problem
    assert "Make room there" in problem
    assert {path.name for path in mount.iterdir()} == {"step-0000000001", ".job.owner"}
    assert verify(mount / "step-0000000001") == ()
    assert write_large(writer, 3, 400_000) is None  # and training goes on
    writer.close()


def test_a_directory_mounted_read_only(mount: Path) -> None:
    (writer,) = writers(mount, "job", [None])
    assert write_large(writer, 1, 1000) is None
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    problem = write_large(writer, 2, 1000)
    assert problem is not None
    assert f"{mount} is mounted read-only" in problem
    assert f"{mount} is mounted read-only" in (why_not_writable(mount) or "")
    assert good(mount) == [1]
    writer.close()


def good(directory: Path) -> list[int]:
    return [found.step for found in list_checkpoints(directory) if not verify(found.path)]


@pytest.mark.parametrize("below", ["", "checkpoints"], ids=["the mount", "a directory in it"])
def test_a_lost_mount(mount: Path, below: str) -> None:
    """The empty directory under it must not be filled instead."""
    directory = mount / below
    (writer,) = writers(directory, "job", [None])
    assert write_large(writer, 1, 1000) is None
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
    problem = write_large(writer, 2, 1000)
    assert problem is not None
    assert f"{directory} is gone or does not answer" in problem
    assert "still mounted" in problem
    assert list(mount.iterdir()) == []
    writer.close()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """A real refusal of the kernel in the middle of a file, where nothing can be mounted."""
    (writer,) = writers(tmp_path, "job", [None])
    assert write_large(writer, 1, 1000) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        problem = write_large(writer, 2, 5_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert problem is not None
    assert "does not take files of this size" in problem
    assert good(tmp_path) == [1]
    assert hidden(tmp_path) == [".job.owner"]
    writer.close()


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    directory.chmod(0o555)
    if os.access(directory, os.W_OK):  # root may write anywhere, but not below a file
        (tmp_path / "file").write_text("")
        directory = tmp_path / "file" / "checkpoints"
    (writer,) = writers(directory, "job", [None])
    problem = write_large(writer, 1, 1000)
    assert problem is not None
    assert str(directory) in problem
    assert "choose another" in problem.lower()
    assert str(directory) in (why_not_writable(directory) or "")
    writer.close()


def test_a_directory_is_tried_before_training(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path / "new" / "place") is None
    assert list((tmp_path / "new" / "place").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "fact", "remedy"),
    [
        (errno.ENOSPC, "is full", "Make room there"),
        (errno.EDQUOT, "is full", "Make room there"),
        (errno.EROFS, "is mounted read-only", "that can be written"),
        (errno.EACCES, f"may not be written by user {os.getuid()}", "permissions"),
        (errno.ENOENT, "is gone", "still mounted"),
        (errno.ESTALE, "is gone", "still mounted"),
        (errno.EIO, "is gone or does not answer", "still mounted"),
        (errno.EFBIG, "does not take files of this size", "ulimit -f"),
        (errno.ENAMETOOLONG, "cannot be written", "choose another"),
    ],
)
def test_every_failure_has_a_place_a_reason_and_a_remedy(code: int, fact: str, remedy: str) -> None:
    text = explain(OSError(code, os.strerror(code)), Path("/there"), "writing part 1")
    assert text.startswith(f"/there {fact}")
    assert f"(writing part 1 failed: {os.strerror(code)})" in text
    assert remedy in text
