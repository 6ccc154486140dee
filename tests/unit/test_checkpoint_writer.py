"""Writing: in the background, in parts, one at a time; what stays and what goes."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parti.checkpoint.disk import RealDisk
from parti.checkpoint.manifest import read_manifest
from parti.checkpoint.read import facts, list_checkpoints, load, verify
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer
from parti.errors import CheckpointError, ConfigError

PATIENCE_S = 30.0


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.randn(40, 30, generator=generator), "b": torch.full((7,), step)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(50, generator=generator)}}},
        "step": step,
        "nan": float("nan"),
    }


def assert_is_state(found: Any, step: int) -> None:
    expected = state(step)
    assert found["step"] == step
    assert torch.equal(found["model"]["w"], expected["model"]["w"])
    assert torch.equal(found["model"]["b"], expected["model"]["b"])
    moment = found["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(moment, expected["optimizer"]["state"][0]["exp_avg"])


class SlowDisk(RealDisk):
    """Stands still at the first write until it is told to go on."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.may_go_on = threading.Event()

    def write(self, handle: int, data: memoryview) -> int:
        self.has_come.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().write(handle, data)


Make = Callable[..., Writer]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, notes: list[str]) -> Iterator[Make]:
    """Makes writers that are closed when the test is over."""
    writers = []

    def make_one(token: str = "job", disk: RealDisk | None = None, **settings: Any) -> Writer:
        settings = {"directory": tmp_path, **settings}
        writers.append(Writer(Checkpoint(**settings), token=token, note=notes.append, disk=disk))
        return writers[-1]

    yield make_one
    for writer in writers:
        writer.abandon()
        writer.close()


def begin(writer: Writer, step: int, part: int = 0, num_parts: int = 1, **other: Any) -> None:
    settings = {"facts": {"epoch": step // 10}, "deadline_s": PATIENCE_S, **other}
    writer.begin(state(step), step=step, part=part, num_parts=num_parts, **settings)


def write(writer: Writer, step: int) -> None:
    begin(writer, step)
    assert writer.wait(PATIENCE_S) is None


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_was_handed_in_comes_back(make: Make, tmp_path: Path) -> None:
    writer = make()
    write(writer, 117)
    path = tmp_path / "step-0000000117"
    assert names(path) == {"part-00000-of-00001.safetensors", "manifest.json", "SHA256SUMS"}
    assert verify(path) == ()
    assert_is_state(load(path), 117)
    assert facts(path) == {"epoch": 11}
    assert writer.last_step == 117


def test_the_state_may_change_as_soon_as_begin_returns(make: Make, tmp_path: Path) -> None:
    disk = SlowDisk()
    writer, tree = make(disk=disk), state(1)
    writer.begin(tree, step=1, facts={}, part=0, num_parts=1, deadline_s=PATIENCE_S)
    tree["model"]["w"].zero_()
    tree["optimizer"]["state"].clear()
    disk.may_go_on.set()
    assert writer.wait(PATIENCE_S) is None
    assert_is_state(load(tmp_path / "step-0000000001"), 1)


def test_begin_touches_no_disk(make: Make, tmp_path: Path) -> None:
    """A disk that hangs must not make training hang."""
    disk = SlowDisk()
    writer = make(disk=disk)
    begin(writer, 1)
    assert writer.is_busy
    assert "within 0.01 s" in (writer.wait(0.01) or "")
    disk.may_go_on.set()
    assert writer.wait(PATIENCE_S) is None


def test_memory_is_used_again_only_when_it_is_free(
    make: Make, tmp_path: Path, notes: list[str]
) -> None:
    disk = SlowDisk()
    writer = make(disk=disk)
    for step in (1, 2, 3):
        begin(writer, step)
    disk.may_go_on.set()
    assert writer.wait(PATIENCE_S) is None
    assert len(notes) == 1  # said once
    assert "step 2: no checkpoint, as that of step 1 is still being written" in notes[0]
    write(writer, 4)
    assert [found.step for found in list_checkpoints(tmp_path)] == [4, 1]
    assert_is_state(load(tmp_path / "step-0000000001"), 1)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 9])
def test_processes_write_in_parts(make: Make, tmp_path: Path, num_parts: int) -> None:
    writers = [make() for _ in range(num_parts)]
    for step in (10, 20):
        for part in reversed(range(num_parts)):
            begin(writers[part], step, part, num_parts)
        assert [writer.wait(PATIENCE_S) for writer in writers] == [None] * num_parts
        assert [writer.last_step for writer in writers] == [step] * num_parts
        path = tmp_path / f"step-{step:010}"
        assert verify(path) == ()
        assert_is_state(load(path), step)
        assert len(list(path.glob("*.safetensors"))) == num_parts


def test_what_an_earlier_start_left_under_the_same_token_is_not_taken(
    make: Make, tmp_path: Path
) -> None:
    """Tokens shall be new; a scheduler that starts a job again may give it its old name."""
    draft = tmp_path / ".step-0000000001.job-1.draft"
    abandoned = make(token="job")
    begin(abandoned, 1, 1, 2, deadline_s=0.0)
    while abandoned.is_busy:
        time.sleep(0.001)
    for path in draft.iterdir():
        os.utime(path, (0, 0))
    writers = [make(), make()]
    begin(writers[0], 1, 0, 2)
    assert "not finished" in (writers[0].wait(0.05) or "")
    begin(writers[1], 1, 1, 2)
    assert [writer.wait(PATIENCE_S) for writer in writers] == [None, None]
    assert all(writer.is_settled for writer in writers)
    assert verify(tmp_path / "step-0000000001") == ()
    assert_is_state(load(tmp_path / "step-0000000001"), 1)


def test_tensors_are_written_once(make: Make, tmp_path: Path) -> None:
    writers = [make(), make()]
    for part, writer in enumerate(writers):
        begin(writer, 1, part, 2)
    assert writers[0].wait(PATIENCE_S) is None
    files = [load_file(path) for path in sorted((tmp_path / "step-0000000001").glob("part*"))]
    assert sorted([*files[0], *files[1]]) == [
        "model.b", "model.w", "optimizer.state.0.exp_avg",
    ]  # fmt: skip


def test_plain_safetensors_reads_it(make: Make, tmp_path: Path) -> None:
    write(make(), 3)
    tensors: dict[str, torch.Tensor] = {}
    for part in (tmp_path / "step-0000000003").glob("*.safetensors"):
        tensors |= load_file(part)
    assert torch.equal(tensors["model.w"], state(3)["model"]["w"])


def test_the_manifest_lists_tensors_in_the_states_order(make: Make, tmp_path: Path) -> None:
    write(make(), 3)
    manifest = read_manifest(tmp_path / "step-0000000003")
    assert list(manifest.tensors) == ["model.w", "model.b", "optimizer.state.0.exp_avg"]


def test_missing_parts_are_named(make: Make, tmp_path: Path, notes: list[str]) -> None:
    writer = make()
    begin(writer, 7, 0, 3, deadline_s=0.05)
    problem = writer.wait(PATIENCE_S)
    assert problem is not None
    assert "of 3 parts, part 1, 2 did not come within 0.05 s" in problem
    assert notes == [problem]
    assert [name for name in names(tmp_path) if "draft" in name] == []
    assert writer.wait(0) is None  # said once


def test_states_that_differ_are_found(make: Make, tmp_path: Path) -> None:
    writers = [make(), make()]
    begin(writers[0], 7, 0, 2)
    other = {"model": {"w": torch.ones(40, 31)}, "rest": torch.ones(9)}
    writers[1].begin(other, step=7, facts={}, part=1, num_parts=2, deadline_s=PATIENCE_S)
    assert "part 1 holds other tensors than part 0 expects" in (writers[0].wait(PATIENCE_S) or "")
    assert "part 0 has given it up" in (writers[1].wait(PATIENCE_S) or "")


def test_a_new_checkpoint_ends_the_wait_for_part_0(make: Make, tmp_path: Path) -> None:
    """Part 0 skipped one: the others must not be a checkpoint behind ever after."""
    disk = SlowDisk()
    writers = [make(disk=disk), make()]
    for step in (1, 2):
        for part in (0, 1):
            begin(writers[part], step, part, 2)
        while writers[1].is_busy:
            time.sleep(0.001)
    disk.may_go_on.set()
    assert writers[0].wait(PATIENCE_S) is None
    for part in (0, 1):
        begin(writers[part], 3, part, 2)
    assert [writer.wait(PATIENCE_S) for writer in writers] == [None, None]
    writers[0].close()
    assert names(tmp_path) == {"step-0000000001", "step-0000000003"}


def test_abandoning_removes_the_draft(make: Make, tmp_path: Path, notes: list[str]) -> None:
    writer = make()
    begin(writer, 7, 0, 2)
    writer.abandon(token="next-world")
    write(writer, 7)
    assert_is_state(load(tmp_path / "step-0000000007"), 7)
    writer.close()
    assert names(tmp_path) == {"step-0000000007"}
    assert notes == []


def test_abandoning_does_not_wait_for_a_disk_that_hangs(make: Make, tmp_path: Path) -> None:
    disk = SlowDisk()
    writer = make(disk=disk)
    begin(writer, 1)
    assert disk.has_come.wait(PATIENCE_S)
    hanging = threading.enumerate()[-1]
    writer.abandon(token="next-world")
    assert not writer.is_busy
    begin(writer, 2)  # to memory of its own: the other thread still reads the old one
    disk.may_go_on.set()
    assert writer.wait(PATIENCE_S) is None
    hanging.join(PATIENCE_S)
    assert_is_state(load(tmp_path / "step-0000000002"), 2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


class WatchedDisk(SlowDisk):
    """Stands still in the middle of the tensors, and looks whether they change meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.has_changed = False

    def write(self, handle: int, data: memoryview) -> int:
        self.num_writes += 1
        if self.num_writes != 2:
            return RealDisk.write(self, handle, data)
        before = bytes(data)
        written = super().write(handle, data)
        self.has_changed = bytes(data) != before
        return written


def test_a_disk_that_hangs_keeps_the_memory_it_reads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parti.checkpoint.staged._CHUNK_BYTES", 500)
    disk = WatchedDisk()
    writer = make(disk=disk)
    begin(writer, 1)
    assert disk.has_come.wait(PATIENCE_S)
    hanging = next(one for one in threading.enumerate() if one.name == "parti-checkpoint")
    writer.abandon(token="next-world")
    begin(writer, 2)
    assert writer.wait(PATIENCE_S) is None
    num_writes = disk.num_writes
    disk.may_go_on.set()
    hanging.join(PATIENCE_S)
    assert not disk.has_changed
    assert disk.num_writes == num_writes  # it stopped where it was
    assert_is_state(load(tmp_path / "step-0000000002"), 2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


def test_an_abandoned_part_is_not_handed_in(make: Make, tmp_path: Path) -> None:
    """Its memory may hold something else by the time that it is written."""
    disk = WatchedDisk()
    writers = [make(), make(disk=disk)]
    for part in (0, 1):
        begin(writers[part], 1, part, 2, deadline_s=0.3)
    assert disk.has_come.wait(PATIENCE_S)
    writers[1].abandon()
    disk.may_go_on.set()
    assert "part 1 did not come" in (writers[0].wait(PATIENCE_S) or "")


def test_what_cannot_be_stored_is_told_at_once(make: Make, tmp_path: Path) -> None:
    writer = make()
    with pytest.raises(CheckpointError, match=r"callbacks\.0 is a builtins\.object"):
        writer.begin(
            {"callbacks": [object()]}, step=1, facts={}, part=0, num_parts=1, deadline_s=1.0
        )
    with pytest.raises(CheckpointError, match=r"best is a torch\.Tensor"):
        begin(writer, 1, facts={"best": torch.ones(1)})
    with pytest.raises(ConfigError, match="part=2 of num_parts=2"):
        begin(writer, 1, part=2, num_parts=2)
    with pytest.raises(ConfigError, match="token='a/b'"):
        make(token="a/b")


def test_memory_may_be_reserved(make: Make, tmp_path: Path) -> None:
    writer = make()
    for step in (1, 2):
        writer.reserve(state(step), part=0, num_parts=1)
        write(writer, step)
    assert_is_state(load(tmp_path / "step-0000000002"), 2)


def test_a_checkpoint_waits_for_memory_that_is_being_prepared(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come, may_go_on, is_cleared = threading.Event(), threading.Event(), threading.Event()
    clear = ctypes.memset

    def slow(*arguments: int) -> None:
        has_come.set()
        assert may_go_on.wait(PATIENCE_S)
        clear(*arguments)
        is_cleared.set()

    monkeypatch.setattr("ctypes.memset", slow)
    disk = SlowDisk()
    writer = make(disk=disk)
    writer.reserve(state(1), part=0, num_parts=1)
    assert has_come.wait(PATIENCE_S)
    threading.Timer(0.05, may_go_on.set).start()
    begin(writer, 1)
    assert is_cleared.wait(PATIENCE_S)
    disk.may_go_on.set()
    assert writer.wait(PATIENCE_S) is None
    assert_is_state(load(tmp_path / "step-0000000001"), 1)


def test_nothing_is_left_open(make: Make, tmp_path: Path) -> None:
    writer = make()
    write(writer, 1)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(2, 6):
        write(writer, step)
    assert len(os.listdir("/proc/self/fd")) == before
