"""Reads the commits of one process: the file `commits-<member>.bin`, as docs/records.md describes
it. Nothing here is shared with the code that writes it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RECORD_BYTES = 64
OPENED, BEGAN, JOINED, COMMITTED = 1, 2, 3, 4
LAST_OF_EPOCH, FINISHED = 1, 2

_RECORD = struct.Struct("<BBHIqqIIIIIIIIII")
_OPENED = struct.Struct("<BBHIq8s24sqII")
_MAGIC = b"parti/1\n"
_JOB_BYTES = 24
_NOTHING = bytes(RECORD_BYTES)


class Record(NamedTuple):
    """One record of any kind but OPENED, field by field."""

    kind: int
    flags: int
    replica: int
    generation: int
    at_ns: int
    step: int
    epoch: int
    step_in_epoch: int
    num_samples: int
    num_micro_batches: int
    first: int
    end: int
    num_samples_here: int
    giver: int
    unused: int
    mark: int

    @property
    def is_last_of_epoch(self) -> bool:
        return bool(self.flags & LAST_OF_EPOCH)

    @property
    def has_finished(self) -> bool:
        """It has done what a lost rank had left undone."""
        return bool(self.flags & FINISHED)

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.step_in_epoch

    @property
    def shared(self) -> tuple[int, ...]:
        """What is the same for all who have committed a step."""
        return (*self[5:10], self.flags & LAST_OF_EPOCH)

    @property
    def at_s(self) -> float:
        """By the monotonic clock of its host."""
        return self.at_ns / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """What one process has written in one job."""

    member: int
    content: bytes | mmap.mmap = field(repr=False)
    begin: int
    """Of its records, as numbers in the file, from 0."""
    end: int
    is_full: bool = False
    """It ends for want of room, and not with the process."""
    joins: tuple[Record, ...] = ()
    """Those that say by whom the state was given."""
    problems: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Record]:
        return self.between(self.begin, self.end)

    def between(self, begin: int, end: int) -> Iterator[Record]:
        for number in range(begin, end):
            yield _record(self.content, number)

    @property
    def last(self) -> Record | None:
        """The last step committed."""
        return self._commit_before(self.end)

    def around(self, is_after: Callable[[Record], bool]) -> tuple[Record | None, Record | None]:
        """The last step committed before a point, and the first after it. What is after it is told
        by something that grows along a book: times, or generations."""
        number = self._first(is_after)
        return self._commit_before(number), self._commit_from(number)

    def _first(self, is_there: Callable[[Record], bool]) -> int:
        low, high = self.begin, self.end
        while low < high:
            middle = (low + high) // 2
            if is_there(_record(self.content, middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _commit_from(self, number: int) -> Record | None:
        records = self.between(number, self.end)
        return next((record for record in records if record.kind == COMMITTED), None)

    def _commit_before(self, number: int) -> Record | None:
        records = (_record(self.content, each) for each in range(number - 1, self.begin - 1, -1))
        return next((record for record in records if record.kind == COMMITTED), None)


def read_book(path: Path, member: int, job: str | None) -> Book | None:
    """What a file holds of a job (None: of the last in it); None if that is nothing."""
    content = _content(path)
    if len(content) < RECORD_BYTES:
        return None
    whole = _num_whole(content)
    kinds = content[: whole * RECORD_BYTES : RECORD_BYTES]
    openings = [number for number, kind in enumerate(kinds) if kind == OPENED]
    jobs = [_OPENED.unpack_from(content, number * RECORD_BYTES) for number in openings]
    if not openings or openings[0] != 0 or jobs[0][5] != _MAGIC:
        problem = f"{path.name} does not begin as a file of commits does"
        return Book(member=member, content=content, begin=0, end=0, problems=(problem,))
    ours = [i for i, opened in enumerate(jobs) if job is None or opened[6] == _padded(job)]
    if not ours:
        return None
    begin, end = openings[ours[-1]] + 1, [*openings, whole][ours[-1] + 1]
    problems = list(_torn(path, content, whole)) if end == whole else []
    if jobs[ours[-1]][3] != member:
        problems.append(f"{path.name} was written by process {jobs[ours[-1]][3]}")
    joins = [number for number in range(begin, end) if kinds[number] == JOINED]
    return Book(
        member=member,
        content=content,
        begin=begin,
        end=end,
        is_full=end == whole and whole * RECORD_BYTES == len(content),
        joins=tuple(_record(content, number) for number in joins),
        problems=tuple(problems),
    )


def _content(path: Path) -> bytes | mmap.mmap:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        return mmap.mmap(handle, size, access=mmap.ACCESS_READ) if size else b""
    finally:
        os.close(handle)


def _mark(content: bytes | mmap.mmap, number: int) -> int:
    end = (number + 1) * RECORD_BYTES
    return int.from_bytes(content[end - 4 : end], "little")


def _num_whole(content: bytes | mmap.mmap) -> int:
    """How many records from the first on have their mark."""
    number = 0
    while number < len(content) // RECORD_BYTES and _mark(content, number) == number + 1:
        number += 1
    return number


def _torn(path: Path, content: bytes | mmap.mmap, whole: int) -> Iterator[str]:
    """The one after the last may be half written; what follows it has to be empty."""
    for number in range(whole + 1, len(content) // RECORD_BYTES):
        if content[number * RECORD_BYTES : (number + 1) * RECORD_BYTES] != _NOTHING:
            yield (
                f"{path.name}: record {whole} is torn, and record {number} follows it; a process "
                "writes them one after the other"
            )
            return


def _record(content: bytes | mmap.mmap, number: int) -> Record:
    return Record._make(_RECORD.unpack_from(content, number * RECORD_BYTES))


def _padded(job: str) -> bytes:
    return job.encode()[:_JOB_BYTES].ljust(_JOB_BYTES, b"\0")
