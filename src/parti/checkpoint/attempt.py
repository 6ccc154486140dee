"""One process's share of one checkpoint, from copied bytes to a published directory.

Runs in the background. Processes meet in the draft's directory alone: each leaves its part and a
record of it; part 0 gathers the records, writes the manifest, and gives the draft its name.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from parti.checkpoint.disk import Disk, check_room, explain, write_all, write_file
from parti.checkpoint.drafts import Drafts, next_sequence
from parti.checkpoint.layout import PartLayout
from parti.checkpoint.manifest import (
    MANIFEST,
    SUMS,
    Manifest,
    StoredFile,
    StoredTensor,
    part_file,
    part_stem,
    sums_of,
    to_json,
)
from parti.checkpoint.plain import Json
from parti.checkpoint.staged import Staged
from parti.errors import CheckpointError

_SHORTEST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.1
_PUBLISHING_S = 10.0
"""How long after the deadline for parts the others still wait for part 0."""
_NOT_OURS = "part 0 has given it up, and says why."


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a process has to write of a checkpoint, and what it knows of the rest."""

    step: int
    count: int
    part: int
    names: tuple[str, ...]
    """Of all tensors, in the state's order."""
    layouts: tuple[PartLayout, ...]
    staged: Staged
    facts: dict[str, Json]
    structure: Json
    ties: Mapping[str, str]
    deadline_s: float

    @property
    def num_parts(self) -> int:
        return len(self.layouts)

    @property
    def file(self) -> str:
        return part_file(self.part, self.num_parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What a process leaves beside its part: that it is whole, or why it is not."""

    num_bytes: int = 0
    sha256: str = ""
    header_sha256: str = ""
    """Of the names, types and shapes: processes that hold different states differ here."""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it ended. A checkpoint may be there although something went wrong after it."""

    path: Path | None = None
    problem: str | None = None


class _Stopped(Exception):
    """The caller does not want it any more."""


class _GivenUp(Exception):
    """It can't be finished; the message says why."""


class Attempt:
    """The work of one share. `run` is called once, in a thread of its own."""

    def __init__(self, share: Share, drafts: Drafts, *, keep: int, disk: Disk) -> None:
        self._share = share
        self._drafts = drafts
        self._keep = keep
        self._disk = disk
        self._deadline = time.monotonic() + share.deadline_s
        self._stop = threading.Event()
        self._doing = "making a directory"
        self._written = threading.Event()

    @property
    def step(self) -> int:
        return self._share.step

    @property
    def is_written(self) -> bool:
        """Whether this process's part is on the disk; the memory it was copied to is free then."""
        return self._written.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether there is work to do, and not only part 0's outcome to learn."""
        return self._share.part == 0 or not self.is_written

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Forget it: `run` ends as soon as the disk lets it."""
        self._stop.set()

    def run(self) -> Outcome:
        is_first = self._share.part == 0
        draft = self._drafts.draft(self._share.step, self._share.count)
        try:
            self._drafts.open(draft)
            if is_first:
                self._drafts.sweep(self._share.count, draft.stat().st_mtime)
            self._write_part(draft)
            return self._finish(draft) if is_first else self._await_outcome(draft)
        except _Stopped:
            self._clean_up(draft, None)
            return Outcome()
        except (OSError, _GivenUp, CheckpointError) as error:
            problem = self._in_words(error, draft)
            self._clean_up(draft, problem)
            return Outcome(problem=f"the checkpoint was not written: {problem}")

    def _in_words(self, error: Exception, draft: Path) -> str:
        if not isinstance(error, OSError):
            return str(error)
        is_lost = isinstance(error, FileNotFoundError) and not draft.exists()
        if is_lost and self._drafts.directory.exists():
            if self._share.part:
                return _NOT_OURS
            return f"its draft was removed from {draft.parent}. Let one job at a time write there."
        return explain(error, self._drafts.directory, self._doing)

    def _clean_up(self, draft: Path, problem: str | None) -> None:
        """Leave nothing behind, where the disk still allows it."""
        with suppress(OSError):
            if self._share.part == 0:
                self._drafts.discard(draft, self._share.count, is_forced=True)
            elif not self._written.is_set():  # after that part 0 counts on it
                with suppress(OSError):
                    self._disk.remove(draft / self._share.file)
                if problem is not None:
                    self._leave_record(draft, PartRecord(problem=problem))

    # The part

    def _write_part(self, draft: Path) -> None:
        share = self._share
        layout = share.layouts[share.part]
        self._doing = f"writing {share.file}"
        check_room(draft, layout.file_bytes)
        digest = hashlib.sha256()
        with suppress(FileNotFoundError):  # of an earlier start under the same token
            (draft / share.file).stat()
            self._disk.remove(draft / share.file)
        handle = self._disk.create(draft / share.file)
        try:
            self._write_chunk(handle, memoryview(layout.header), digest)
            for chunk in share.staged.chunks():
                self._write_chunk(handle, chunk, digest)
            self._disk.sync(handle)
        finally:
            os.close(handle)
        if self._stop.is_set():  # the memory may hold something else by now
            raise _Stopped
        record = PartRecord(
            num_bytes=layout.file_bytes,
            sha256=digest.hexdigest(),
            header_sha256=_header_sha256(layout),
        )
        self._leave_record(draft, record)
        self._written.set()

    def _write_chunk(self, handle: int, chunk: memoryview, digest: hashlib._Hash) -> None:
        if self._stop.is_set():
            raise _Stopped
        digest.update(chunk)
        write_all(self._disk, handle, chunk)

    def _leave_record(self, draft: Path, record: PartRecord) -> None:
        """Under its name only once it is whole: part 0 may be looking."""
        stem = part_stem(self._share.part, self._share.num_parts)
        new = draft / f"{stem}.{'good' if record.problem is None else 'bad'}"
        write_file(self._disk, new, to_json(record), is_synced=False)
        self._disk.rename(new, draft / f"{stem}.json")

    # Part 0: all of it

    def _finish(self, draft: Path) -> Outcome:
        share = self._share
        self._doing = "gathering the parts"
        files = self._gather(draft)
        self._doing = f"writing {MANIFEST}"
        manifest = to_json(self._manifest(files))
        write_file(self._disk, draft / MANIFEST, manifest, is_synced=True)
        write_file(self._disk, draft / SUMS, sums_of(manifest, files), is_synced=True)
        for part in range(share.num_parts):
            self._disk.remove(draft / f"{part_stem(part, share.num_parts)}.json")
        if self._stop.is_set():
            raise _Stopped
        self._doing = "naming the checkpoint"
        path = self._drafts.publish(draft, share.step)
        try:
            self._drafts.prune(self._keep, share.count)
        except (OSError, CheckpointError) as error:
            self._doing = "removing older checkpoints"
            words = self._in_words(error, path)
            return Outcome(path=path, problem=f"the checkpoint is written, but {words}")
        return Outcome(path=path)

    def _gather(self, draft: Path) -> tuple[StoredFile, ...]:
        """Wait for everybody's record."""
        num_parts = self._share.num_parts
        mine = draft / f"{part_stem(self._share.part, num_parts)}.json"
        now_s = mine.stat().st_mtime
        found: dict[int, StoredFile] = {}
        for _ in self._looks(self._deadline):
            # Listing a directory asks the server; looking for one name may ask a cache.
            names = set(os.listdir(draft))
            for part in range(num_parts):
                name = f"{part_stem(part, num_parts)}.json"
                if part in found or name not in names:
                    continue
                if self._drafts.is_of_now(draft / name, now_s):
                    found[part] = self._accept(draft, part, (draft / name).read_bytes())
            if len(found) == num_parts:
                return tuple(found[part] for part in range(num_parts))
        missing = ", ".join(str(part) for part in range(num_parts) if part not in found)
        raise _GivenUp(
            f"of {num_parts} parts, part {missing} did not come within "
            f"{self._share.deadline_s:g} s. Expected every process to write to {draft.parent}: "
            f"look whether all hosts see the same file system there."
        )

    def _accept(self, draft: Path, part: int, content: bytes) -> StoredFile:
        """What a process says of its part, compared with what is there."""
        import msgspec

        record = msgspec.json.decode(content, type=PartRecord)
        if record.problem is not None:
            raise _GivenUp(f"part {part} was not written: {record.problem}")
        if record.header_sha256 != _header_sha256(self._share.layouts[part]):
            raise _GivenUp(
                f"part {part} holds other tensors than part 0 expects. Every process must hand in "
                f"a state with the same names, types and shapes."
            )
        name = part_file(part, self._share.num_parts)
        num_bytes = (draft / name).stat().st_size
        if num_bytes != record.num_bytes:
            raise _GivenUp(f"{name} has {num_bytes} bytes instead of {record.num_bytes}.")
        return StoredFile(name=name, num_bytes=record.num_bytes, sha256=record.sha256)

    def _manifest(self, files: tuple[StoredFile, ...]) -> Manifest:
        share = self._share
        found = {
            spec.name: StoredTensor(file=file.name, dtype=spec.dtype, shape=spec.shape)
            for file, layout in zip(files, share.layouts, strict=True)
            for spec in layout.specs
        }
        tensors = {name: found[name] for name in share.names}
        return Manifest(
            step=share.step,
            sequence=next_sequence(self._drafts.directory),
            attempt=self._drafts.attempt(share.count),
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            num_tensors=len(tensors),
            facts=share.facts,
            files=files,
            tensors=tensors,
            ties=dict(share.ties),
            tree=share.structure,
        )

    # The other parts

    def _await_outcome(self, draft: Path) -> Outcome:
        self._doing = "waiting for part 0"
        for _ in self._looks(self._deadline + _PUBLISHING_S):
            if not draft.exists():
                path = self._drafts.find(self._share.step, self._share.count)
                if path is None:
                    raise _GivenUp(_NOT_OURS)
                return Outcome(path=path)
        with suppress(OSError):
            self._drafts.discard(draft, self._share.count)
        raise _GivenUp(
            f"part 0 did not finish within {self._share.deadline_s + _PUBLISHING_S:g} s."
        )

    def _looks(self, deadline: float) -> Iterator[None]:
        """Moments at which to look, further and further apart, until the deadline or the stop."""
        pause_s = _SHORTEST_LOOK_S
        while True:
            yield
            if time.monotonic() > deadline:
                return
            if self._stop.wait(pause_s):
                raise _Stopped
            pause_s = min(_LONGEST_LOOK_S, 1.5 * pause_s)


def _header_sha256(layout: PartLayout) -> str:
    return hashlib.sha256(layout.header).hexdigest()
