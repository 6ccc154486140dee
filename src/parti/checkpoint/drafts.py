"""The directory of checkpoints as its writers see it: drafts, publishing, sweeping, pruning.

A draft is hidden beside the checkpoints until one rename gives it its name. What goes away is
renamed first and emptied afterwards, so no half of it is ever seen under a checkpoint's name, and
a draft that is being published can't lose a file to somebody who sweeps: one of two renames fails.
Must not know tensors.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from parti.checkpoint import owner
from parti.checkpoint.disk import Disk, make_directories, sync_directory
from parti.checkpoint.listing import is_whole, list_checkpoints, look_at
from parti.checkpoint.manifest import final_name, parse_final
from parti.errors import ConfigError

STALE_AFTER_S = 3600.0
"""Nobody writes for an hour without leaving a trace: the draft of a job on another host is dead."""

_COARSE_S = 1.0
"""Some file systems' times are no finer."""
_HIDDEN = re.compile(
    r"\.step-\d{10,}(?:\.\d+)?\.(?P<token>[\w-]+)-(?P<count>\d+)\.(?P<kind>draft|removed)"
)
_STEP = re.compile(r"\.?(step-\d{10,})")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Drafts:
    """One job's drafts. Every process of it counts its checkpoints alike; so all name them alike.

    `token` is new with every start of the job and every change of its world. Where it is not all
    the same, what an earlier start left in a draft is older than this object, and not taken.
    """

    def __init__(self, directory: Path, token: str, disk: Disk) -> None:
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"token={token!r}; expected 1 to 100 letters, digits, '_' and '-', as it becomes "
                f"part of a file's name."
            )
        self.directory = directory
        self.token = token
        self._disk = disk
        self._since_s = time.monotonic()
        self._device: int | None = None
        self._lock: int | None = None
        self._locks_before: list[int | None] = []
        self._last: Path | None = None

    def succeed(self, token: str) -> Drafts:
        """Those of the next world, in the same place; these are dead once it writes."""
        drafts = Drafts(self.directory, token, self._disk)
        drafts._device, drafts._last = self._device, self._last
        drafts._locks_before, self._lock = [*self._locks_before, self._lock], None
        return drafts

    def attempt(self, count: int) -> str:
        """The name of the job's checkpoint number `count`, equal on all its processes."""
        return f"{self.token}-{count}"

    def draft(self, step: int, count: int) -> Path:
        """The directory of a draft."""
        return self._hidden(final_name(step), count, "draft")

    def open(self, draft: Path) -> None:
        """Make a draft, if nobody has yet; others can tell for as long as this process lives."""
        self._find_directory()
        while self._locks_before:
            owner.disown(self._locks_before.pop())
        if self._lock is None:
            self._lock = owner.own(self.directory, self.token)
        self._disk.make_directory(draft)

    def is_of_now(self, path: Path, now_s: float) -> bool:
        """Whether a file was written since these drafts began; `now_s` as for `sweep`."""
        age_s = time.monotonic() - self._since_s + _COARSE_S
        return path.stat().st_mtime >= now_s - age_s

    def _find_directory(self) -> None:
        if self._device is None:
            make_directories(self._disk, self.directory)
        device = self.directory.stat().st_dev
        # A lost mount leaves the empty directory that it was mounted on.
        is_other = self._device is not None and device != self._device
        if is_other and not (self._last is not None and self._last.exists()):
            raise OSError(errno.ENODEV, "it is not the file system of the checkpoints before")
        self._device = device

    def _hidden(self, name: str, count: int, kind: str) -> Path:
        return self.directory / f".{name}.{self.attempt(count)}.{kind}"

    def disown(self) -> None:
        """No more drafts. Where some could not be removed, the next start finds them ownerless."""
        if self._device is not None and not self._left():
            owner.forget(self.directory, self.token)
        for lock in (*self._locks_before, self._lock):
            owner.disown(lock)
        self._locks_before, self._lock = [], None

    def _left(self) -> list[str]:
        try:
            matches = [_HIDDEN.fullmatch(entry) for entry in os.listdir(self.directory)]
        except OSError:
            return []
        return [match[0] for match in matches if match and match["token"] == self.token]

    def publish(self, draft: Path, step: int) -> Path:
        """Give a finished draft its name. Returns once that is on the disk."""
        sync_directory(self._disk, draft)
        rewrite = 0
        while True:
            path = self.directory / final_name(step, rewrite)
            try:
                if not path.exists():  # an empty directory would be replaced
                    self._disk.rename(draft, path)
                    break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            rewrite += 1
        self._last = path
        sync_directory(self._disk, self.directory)
        return path

    def find(self, step: int, count: int) -> Path | None:
        """The checkpoint that a draft has become, if it has."""
        for name in os.listdir(self.directory):
            final = parse_final(name)
            if final is not None and final[0] == step:
                found = look_at(self.directory / name)
                if found.head is not None and found.head.attempt == self.attempt(count):
                    self._last = found.path
                    return found.path
        return None

    def discard(self, path: Path, count: int, *, is_forced: bool = False) -> None:
        """Remove a draft or a checkpoint.

        `is_forced`: even if it can't be renamed before. Only its publisher may do so: from under
        anybody else a draft would lose files while it gets its name.
        """
        step = _STEP.match(path.name)
        assert step is not None
        removed = self._hidden(step[1], count, "removed")
        try:
            self._disk.rename(path, removed)
        except FileNotFoundError:
            return
        except OSError:
            if not is_forced:
                raise
            removed = path
        self._disk.remove(removed)

    def sweep(self, count: int, now_s: float) -> None:
        """Remove what is left of earlier drafts: of this job, of the dead, and of the old.

        `now_s` is the file system's own time; a host's clock may differ.
        """
        for entry in sorted(os.listdir(self.directory)):
            match = _HIDDEN.fullmatch(entry)
            if match is None:
                continue
            path = self.directory / entry
            with suppress(OSError):
                if match["token"] == self.token:
                    is_over = int(match["count"]) < count
                else:
                    is_over = _last_touched_s(path) < now_s - STALE_AFTER_S or owner.is_dead(
                        self.directory, match["token"]
                    )
                if is_over and match["kind"] == "draft":
                    self.discard(path, count)
                elif is_over:
                    self._disk.remove(path)
        owner.forget_dead(self.directory, but=self.token)

    def prune(self, keep: int, count: int) -> None:
        """Remove checkpoints older than the newest `keep` whole ones, and rewritten steps.

        Damaged ones do not count; those among the newest stay for somebody to look at.
        """
        kept: set[int] = set()
        for found in list_checkpoints(self.directory):
            if len(kept) == keep or found.step in kept:
                self.discard(found.path, count)
            elif is_whole(found):
                kept.add(found.step)


def _last_touched_s(path: Path) -> float:
    return max(entry.stat().st_mtime for entry in (path, *path.iterdir()))


def next_sequence(directory: Path) -> int:
    """The number of the checkpoint to be written now."""
    every = list_checkpoints(directory)
    return 1 + max((found.head.sequence for found in every if found.head), default=0)
