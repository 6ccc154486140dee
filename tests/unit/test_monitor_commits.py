"""Records of commits: what is written by one program and read by another that knows only their
description."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from parti.data.batches import Batch
from parti.data.order import Position
from parti.doctor.book import BEGAN, COMMITTED, JOINED, Book, read_book
from parti.monitor import commits
from parti.monitor.commits import CHUNK_BYTES, RECORD_BYTES, CommitFile, open_commits

RECORDS_A_CHUNK = CHUNK_BYTES // RECORD_BYTES


def _batch(number: int = 0, *, is_last: bool = False) -> Batch:
    return Batch(
        step_in_epoch=number,
        epoch=2,
        num_samples=48,
        num_micro_batches=6,
        micro_batches=(),
        is_last_of_epoch=is_last,
        read=lambda numbers: (),
    )


def _commit(file: CommitFile, step: int, replica: int = 0) -> None:
    file.log(replica).committed(
        3, step, _batch(step), first=2, end=4, num_samples=16, has_finished=False
    )


def _open(tmp_path: Path, job: str = "job") -> CommitFile:
    return CommitFile(tmp_path / "commits-5.bin", job=job, member=5)


def _end(file: CommitFile) -> None:
    """As with its process."""
    file._memory.close()  # type: ignore[union-attr]
    os.close(file._fd)


def _read(tmp_path: Path, job: str = "job") -> Book:
    book = read_book(tmp_path / "commits-5.bin", 5, job)
    assert book is not None
    return book


def _steps(book: Book) -> list[int]:
    return [record.step for record in book]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = _open(tmp_path).log(1)
    log.joined(3, 117, 4)
    log.began(3, 117, Position(epoch=2, step_in_epoch=9))
    log.committed(
        3, 117, _batch(9, is_last=True), first=2, end=4, num_samples=16, has_finished=True
    )
    book = _read(tmp_path)
    joined, began, committed = book
    assert (joined.kind, joined.step, joined.giver, joined.generation) == (JOINED, 117, 4, 3)
    assert (began.kind, began.step, began.place) == (BEGAN, 117, (2, 9))
    assert {record.replica for record in book} == {1}
    assert (committed.kind, committed.step, committed.place) == (COMMITTED, 117, (2, 9))
    assert (committed.num_samples, committed.num_micro_batches) == (48, 6)
    assert (committed.first, committed.end, committed.num_samples_here) == (2, 4, 16)
    assert committed.is_last_of_epoch and committed.has_finished
    assert 0 < joined.at_ns <= began.at_ns <= committed.at_ns
    assert book.joins == (joined,)
    assert book.problems == ()


def test_the_description_holds_to_the_byte(tmp_path: Path) -> None:
    """docs/records.md, for who reads it in another language."""
    _commit(_open(tmp_path), 117)
    raw = (tmp_path / "commits-5.bin").read_bytes()
    assert (raw[0], raw[1], raw[16:24]) == (1, 0, b"parti/1\n")
    assert struct.unpack_from("<I", raw, 4) == (5,)
    assert raw[24:48] == b"job".ljust(24, b"\0")
    assert struct.unpack_from("<q", raw, 48) == (os.getpid(),)
    assert struct.unpack_from("<I", raw, 60) == (1,)
    record = raw[64:128]
    assert struct.unpack_from("<BBHI", record) == (4, 0, 0, 3)
    assert struct.unpack_from("<q10I", record, 16) == (117, 2, 117, 48, 6, 2, 4, 16, 0, 0, 2)
    assert raw[128:] == bytes(CHUNK_BYTES - 128)


def test_a_file_grows_and_is_read_whole(tmp_path: Path) -> None:
    file = _open(tmp_path)
    count = 2 * RECORDS_A_CHUNK + 7
    for step in range(count):
        _commit(file, step)
    assert _steps(_read(tmp_path)) == list(range(count))
    assert (tmp_path / "commits-5.bin").stat().st_size == 3 * CHUNK_BYTES
    assert not _read(tmp_path).is_full


@pytest.mark.parametrize("count", [0, 5, RECORDS_A_CHUNK - 1, RECORDS_A_CHUNK])
def test_a_run_of_the_same_name_writes_behind_it(tmp_path: Path, count: int) -> None:
    first = _open(tmp_path, "first")
    for step in range(count):
        _commit(first, step)
    _end(first)
    second = _open(tmp_path, "second")
    for step in range(3):
        _commit(second, 100 + step)
    assert _steps(_read(tmp_path, "first")) == list(range(count))
    assert _steps(_read(tmp_path, "second")) == [100, 101, 102]
    book = read_book(tmp_path / "commits-5.bin", 5, None)
    assert book is not None
    assert _steps(book) == [100, 101, 102]
    assert read_book(tmp_path / "commits-5.bin", 5, "third") is None


def test_a_torn_record_is_none(tmp_path: Path) -> None:
    """Its mark is written last: whatever is there without it does not count."""
    file = _open(tmp_path)
    for step in range(4):
        _commit(file, step)
    path = tmp_path / "commits-5.bin"
    with path.open("r+b") as raw:
        raw.seek(5 * RECORD_BYTES - 4)
        raw.write(bytes(4))
    book = _read(tmp_path)
    assert _steps(book) == [0, 1, 2]
    assert book.problems == ()
    # Another run overwrites it.
    _end(file)
    _commit(_open(tmp_path, "again"), 50)
    assert _steps(_read(tmp_path)) == [0, 1, 2]
    assert _steps(_read(tmp_path, "again")) == [50]
    assert path.read_bytes()[6 * RECORD_BYTES :] == bytes(CHUNK_BYTES - 6 * RECORD_BYTES)


def test_a_torn_record_before_others_is_told(tmp_path: Path) -> None:
    file = _open(tmp_path)
    for step in range(4):
        _commit(file, step)
    with (tmp_path / "commits-5.bin").open("r+b") as raw:
        raw.seek(3 * RECORD_BYTES - 4)
        raw.write(bytes(4))
    book = _read(tmp_path)
    assert _steps(book) == [0]
    assert book.problems == (
        "commits-5.bin: record 2 is torn, and record 3 follows it; a process writes them one after "
        "the other",
    )


def test_records_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from parti.data.order import Position\n"
        "from parti.monitor.commits import CommitFile\n"
        "log = CommitFile(Path(sys.argv[1]) / 'commits-5.bin', job='job', member=5).log(0)\n"
        "for step in range(2000): log.began(1, step, Position())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert _steps(_read(tmp_path)) == list(range(2000))


def test_a_disk_that_fills_up_ends_the_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _open(tmp_path)
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        return pwrite(fd, data[:100], offset)

    monkeypatch.setattr(commits.os, "pwrite", full)

    def fill() -> None:
        for step in range(3 * RECORDS_A_CHUNK):
            _commit(file, step)

    with pytest.warns(RuntimeWarning, match="commits-5.bin cannot be written") as told:
        fill()
    assert len(told) == 1
    book = _read(tmp_path)
    assert _steps(book) == list(range(RECORDS_A_CHUNK - 1))
    assert book.is_full
    assert (tmp_path / "commits-5.bin").stat().st_size == CHUNK_BYTES


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="training goes on, and its steps are not recorded"):
        assert open_commits(tmp_path / "nowhere", job="job", member=0) is None


def test_two_jobs_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = _open(tmp_path)
    _commit(first, 0)
    with pytest.warns(RuntimeWarning, match="Resource temporarily unavailable"):
        assert open_commits(tmp_path, job="other", member=5) is None
    _commit(first, 1)
    assert _steps(_read(tmp_path)) == [0, 1]


def test_what_is_no_file_of_commits_is_told(tmp_path: Path) -> None:
    (tmp_path / "commits-5.bin").write_bytes(
        b"something else, and long enough to hold a record" * 9
    )
    book = _read(tmp_path)
    assert book.problems == ("commits-5.bin does not begin as a file of commits does",)
    (tmp_path / "commits-5.bin").write_bytes(b"")
    assert read_book(tmp_path / "commits-5.bin", 5, "job") is None
