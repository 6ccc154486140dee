"""What a fault does to a link or to a disk, for real.

Each refuses what a test cannot mean, and shares no code with what is to survive it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
from pathlib import Path

from parti.errors import ConfigError

MOST_FREE_BYTES = 256 << 20
"""A file system with more room than that is not one that a test has made to be filled."""
FILLER = "filled-by-a-fault"
_PIECES_BYTES = (1 << 20, 1 << 12, 1)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cut(interface: str) -> None:
    """Set a link of this network namespace down; all but `lo`, if it has no name."""
    if not interface and _is_the_machines():
        raise ConfigError(
            "cut: this is the network namespace of whatever started the test, and all of its links "
            "would be set down. Expected one that the test has made (`ip netns add`), or the name "
            "of an interface."
        )
    every = [name for _, name in socket.if_nameindex() if name != "lo"]
    for name in [interface] if interface else every:
        command = ["ip", "link", "set", name, "down"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            why = f"{error.strerror}; install iproute2"
        else:
            if done.returncode == 0:
                continue
            why = done.stderr.strip() or f"exit code {done.returncode}"
        raise ConfigError(
            f"cut: `{' '.join(command)}` failed ({why}). It needs CAP_NET_ADMIN, as root has it; "
            f"interfaces here: {', '.join(every) or 'none but lo'}."
        )


def _is_the_machines() -> bool:
    """Whether all that have started this process, as far as can be seen, have its namespace."""
    mine, pid = os.readlink("/proc/self/ns/net"), os.getppid()
    while pid:
        with contextlib.suppress(PermissionError):
            if os.readlink(f"/proc/{pid}/ns/net") != mine:
                return False
        words = Path(f"/proc/{pid}/status").read_text().split()
        pid = int(words[words.index("PPid:") + 1])
    return True


def fill(directory: str) -> None:
    """Write a file of that directory until not a byte more fits; a small file system only."""
    try:
        found = os.statvfs(directory)
        # What is reserved for root counts: root it may be that writes.
        free_bytes = found.f_bfree * found.f_frsize
        if not found.f_blocks or free_bytes > MOST_FREE_BYTES:
            raise ConfigError(
                f"fill: {directory} has {free_bytes >> 20} MiB free; expected "
                f"{MOST_FREE_BYTES >> 20} MiB at most, so that nobody's disk is filled by mistake. "
                "Mount a small one for the test (`mount -t tmpfs -o size=8m tmpfs DIRECTORY`)."
            )
        with open(Path(directory, FILLER), "ab", buffering=0) as file:
            _fill_up(file.fileno())
    except OSError as error:
        raise ConfigError(f"fill: {directory} cannot be filled: {error.strerror}.") from error


def _fill_up(handle: int) -> None:
    left_bytes = MOST_FREE_BYTES
    for size in _PIECES_BYTES:
        with contextlib.suppress(_Full):
            while left_bytes > 0:
                left_bytes -= _write(handle, min(size, left_bytes))
    if left_bytes <= 0:
        raise OSError(errno.EFBIG, "more fits than it said was free")


class _Full(Exception):
    """Pieces of this size do not fit."""


def _write(handle: int, num_bytes: int) -> int:
    try:
        return os.write(handle, bytes(num_bytes))
    except OSError as error:
        if error.errno in _FULL:
            raise _Full from error
        raise


def corrupt(directory: str) -> None:
    """Flip the bits of one byte in the middle of the largest file of the newest checkpoint."""
    try:
        checkpoints = [path for path in Path(directory).glob("step-*") if path.is_dir()]
        # The last file was made in it when it was written; its name says nothing of that.
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is None:
            raise ConfigError(
                f"corrupt: there is no checkpoint in {directory}; expected one that was written "
                "before this point. Choose a later one."
            )
        largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        with open(largest, "r+b", buffering=0) as file:
            middle = os.fstat(file.fileno()).st_size // 2
            (byte,) = os.pread(file.fileno(), 1, middle)
            os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), middle)
    except OSError as error:
        raise ConfigError(
            f"corrupt: the newest checkpoint of {directory} cannot be changed: {error.strerror}."
        ) from error
