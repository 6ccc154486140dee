"""The few operations that change the disk, and what their failures mean in words.

One seam: tests put in a disk that fails at a chosen call. Must not know what a checkpoint is.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path
from typing import Protocol

_GONE = (
    errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ENODEV, errno.ENXIO,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ESHUTDOWN,
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_MB = 1_000_000


class Disk(Protocol):
    """All that changes anything on the disk."""

    def make_directory(self, path: Path) -> None: ...

    def create(self, path: Path) -> int:
        """A new file's descriptor, to write to."""
        ...

    def write(self, handle: int, data: memoryview) -> int: ...

    def sync(self, handle: int) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it."""
        ...


class RealDisk:
    """The operating system's."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_all(disk: Disk, handle: int, data: memoryview) -> None:
    """Write may take less than it is given."""
    while data:
        data = data[disk.write(handle, data) :]


def write_file(disk: Disk, path: Path, content: bytes, *, is_synced: bool) -> None:
    """A small new file."""
    handle = disk.create(path)
    try:
        write_all(disk, handle, memoryview(content))
        if is_synced:
            disk.sync(handle)
    finally:
        os.close(handle)


def sync_directory(disk: Disk, path: Path) -> None:
    """Bring names, not contents, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(handle)


def make_directories(disk: Disk, path: Path) -> None:
    """A directory and those above it, each with its name on the disk."""
    if path.is_dir():
        return
    make_directories(disk, path.parent)
    disk.make_directory(path)
    sync_directory(disk, path.parent)


def why_not_writable(directory: Path) -> str | None:
    """Try it before there is anything to lose: make the directory and a file, leave no file."""
    trial = directory / f".trial-{os.getpid()}"
    try:
        make_directories(RealDisk(), directory)
        write_file(RealDisk(), trial, b"trial", is_synced=False)
        trial.unlink()
    except OSError as error:
        return explain(error, directory, "writing a file")
    return None


def check_room(path: Path, num_bytes: int) -> None:
    """Find a full disk before it is full: others write there too."""
    found = os.statvfs(path)
    free_bytes = found.f_bavail * found.f_frsize
    if found.f_blocks and free_bytes < num_bytes:  # some file systems do not tell
        raise OSError(errno.ENOSPC, f"{_mb(num_bytes)} are needed and {_mb(free_bytes)} are free")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / _MB:,.1f} MB"


def explain(error: OSError, directory: Path, doing: str) -> str:
    """What went wrong, where, and what helps."""
    said = error.strerror or type(error).__name__
    fact = f"{doing} failed: {said}"
    if error.errno in _FULL:
        return (
            f"{directory} is full ({fact}). Make room there, keep fewer checkpoints (keep=), or "
            f"choose another directory."
        )
    if error.errno == errno.EROFS:
        return f"{directory} is mounted read-only ({fact}). Choose a directory that can be written."
    if error.errno in _FORBIDDEN:
        return (
            f"{directory} may not be written by user {os.getuid()} ({fact}). Change its "
            f"permissions, or choose another directory."
        )
    if error.errno == errno.EFBIG:
        return (
            f"{directory} does not take files of this size ({fact}). Raise the limit "
            f"(`ulimit -f`), or write in more parts."
        )
    if error.errno in _GONE:
        return (
            f"{directory} is gone or does not answer ({fact}). Look whether its file system is "
            f"still mounted on {socket.gethostname()}."
        )
    return f"{directory} cannot be written ({fact}). Look at the file system, or choose another."
