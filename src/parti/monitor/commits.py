"""The history of commits: which process has committed which step, in a file of its own.

Records of 64 bytes in mapped memory, described in docs/records.md; what is there survives the
process, however it ends. A record counts when its last word, the mark, is written. The room for the
next ones is always taken from the disk before: a disk that is full is an error when the file grows,
which ends the records and not the training, and no bus error in the middle of a step.

What is written here is read by `parti.doctor`, which knows the description and not this file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
import warnings
from enum import IntEnum
from pathlib import Path

from parti.data.batches import Batch
from parti.data.order import Position
from parti.engine.commit_log import CommitLog

RECORD_BYTES = 64
CHUNK_BYTES = 64 * 1024
"""By so much the file grows: a multiple of a page and of a record."""
MAX_BYTES = RECORD_BYTES << 32
"""Marks have 32 bits."""
MAGIC = b"parti/1\n"

_BODY = struct.Struct("<BBHIqqIIIIIIII4x")
_OPENED = struct.Struct("<BBHIq8s24sq4x")
_MARK = struct.Struct("<I")
assert _BODY.size == _OPENED.size == RECORD_BYTES - _MARK.size

# A step has half a microsecond for its record, of which looking these up would take a tenth.
_set_body, _set_mark, _now_ns = _BODY.pack_into, _MARK.pack_into, time.monotonic_ns


class Kind(IntEnum):
    OPENED = 1
    BEGAN = 2
    JOINED = 3
    COMMITTED = 4


_COMMITTED = int(Kind.COMMITTED)


def open_commits(directory: Path, *, job: str, member: int) -> CommitFile | None:
    """The file of this process; None, with a warning, where it cannot be written."""
    path = directory / f"commits-{member}.bin"
    try:
        return CommitFile(path, job=job, member=member)
    except OSError as error:
        _warn(path, error, "its steps are")
        return None


class CommitFile:
    """One file of records. More are written behind those that are there."""

    def __init__(self, path: Path, *, job: str, member: int) -> None:
        self._path = path
        self._is_given_up = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a job of this name may be there
            self._number = _num_records(self._fd)
            begin, self._at = self._place()
            self._memory: mmap.mmap | bytearray = self._map(begin, self._at)
        except OSError:
            os.close(self._fd)
            raise
        opened = (Kind.OPENED, 0, 0, member, _now_ns(), MAGIC, job.encode(), os.getpid())
        _OPENED.pack_into(self._memory, self._at, *opened)
        self.finish_record()

    def log(self, replica: int) -> CommitLog:
        """For the replica that is bound as the how-manieth in this process, from 0."""
        return _ReplicasLog(self, replica)

    @property
    def room(self) -> tuple[mmap.mmap | bytearray, int]:
        """Where the body of the next record goes."""
        return self._memory, self._at

    def finish_record(self) -> None:
        """Its body is there: from now on it counts."""
        number = self._number = self._number + 1
        at = self._at = self._at + RECORD_BYTES
        _set_mark(self._memory, at - _MARK.size, number)
        if at == CHUNK_BYTES:
            self._grow()

    def _grow(self) -> None:
        begin, self._at = self._place()
        if self._is_given_up:
            return
        try:
            self._memory = self._map(begin, 0)
        except OSError as error:
            # A file that is full to its last byte says that there was more.
            self._is_given_up = True
            self._memory = bytearray(CHUNK_BYTES)  # nobody reads what comes there
            with contextlib.suppress(OSError):
                os.truncate(self._fd, begin)
            _warn(self._path, error, "steps from here on are")

    def _place(self) -> tuple[int, int]:
        """Where the next record goes: the beginning of its chunk in the file, and how far in."""
        offset = self._number * RECORD_BYTES
        return offset - offset % CHUNK_BYTES, offset % CHUNK_BYTES

    def _map(self, begin: int, used: int) -> mmap.mmap:
        """The memory of a chunk. All of it behind what is used becomes zeros that have their place
        on the disk."""
        wanted = CHUNK_BYTES - used
        if begin + CHUNK_BYTES >= MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if os.pwrite(self._fd, bytes(wanted), begin + used) < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(self._fd, begin + CHUNK_BYTES)
        return mmap.mmap(self._fd, CHUNK_BYTES, offset=begin)


class _ReplicasLog:
    """What one replica has to tell, as records of a file."""

    def __init__(self, file: CommitFile, replica: int) -> None:
        self._file = file
        self._replica = replica

    def began(self, generation: int, step: int, at: Position) -> None:
        self._tell(Kind.BEGAN, generation, step, at, 0)

    def joined(self, generation: int, step: int, giver: int) -> None:
        self._tell(Kind.JOINED, generation, step, Position(), giver)

    def _tell(self, kind: Kind, generation: int, step: int, at: Position, giver: int) -> None:
        head = (kind, 0, self._replica, generation, _now_ns(), step)
        place = (at.epoch, at.step_in_epoch)
        _set_body(*self._file.room, *head, *place, 0, 0, 0, 0, 0, giver)
        self._file.finish_record()

    def committed(
        self,
        generation: int,
        step: int,
        batch: Batch,
        *,
        first: int,
        end: int,
        num_samples: int,
        has_finished: bool,
    ) -> None:
        file = self._file
        memory, at = file.room
        _set_body(
            memory,
            at,
            _COMMITTED,
            batch.is_last_of_epoch | has_finished << 1,
            self._replica,
            generation,
            _now_ns(),
            step,
            batch.epoch,
            batch.step_in_epoch,
            batch.num_samples,
            batch.num_micro_batches,
            first,
            end,
            num_samples,
            0,
        )
        file.finish_record()


def _num_records(fd: int) -> int:
    """How many whole records there are. They come first, so their end is found by halving."""
    low, high = 0, os.fstat(fd).st_size // RECORD_BYTES
    while low < high:
        middle = (low + high) // 2
        mark = os.pread(fd, _MARK.size, (middle + 1) * RECORD_BYTES - _MARK.size)
        if mark == _MARK.pack(middle + 1):
            low = middle + 1
        else:
            high = middle
    return low


def _warn(path: Path, error: OSError, what: str) -> None:
    warnings.warn(
        f"{path} cannot be written ({error.strerror}): training goes on, and {what} not recorded.",
        RuntimeWarning,
        stacklevel=3,
    )
