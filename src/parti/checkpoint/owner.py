"""Which of the jobs that write into a directory are still alive.

The processes of a job share a lock on the file `.<token>.owner` for as long as they live; the
kernel drops it however they end. Locks of other hosts may not show on a shared file system, so only
those of this host count. A wrong guess costs a checkpoint and spoils none; so nothing here raises,
and where locks do not work, drafts are swept by their age.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_OWNER = re.compile(r"\.(?P<token>[\w-]+)\.owner")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _path(directory: Path, token: str) -> Path:
    return directory / f".{token}.owner"


def _host() -> bytes:
    """This host since it was started; empty where that can't be told."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}\n".encode()
    except OSError:
        return b""


def own(directory: Path, token: str) -> int | None:
    """Share the lock; None if it can't be had.

    The file is held open for reading: one held for writing would keep its file system from being
    mounted read-only.
    """
    path = _path(directory, token)
    with suppress(OSError), path.open("xb", buffering=0) as file:
        file.write(_host())
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return handle
    return None


def disown(lock: int | None) -> None:
    """Let others see that this process has no part in it any more."""
    if lock is not None:
        with suppress(OSError):
            os.close(lock)


def forget(directory: Path, token: str) -> None:
    """Nothing is left that belonged to the owner."""
    with suppress(OSError):
        _path(directory, token).unlink()


def is_dead(directory: Path, token: str) -> bool:
    """Whether the job was on this host and is known to be gone."""
    host = _host()
    return bool(host) and _is_unheld(directory, token, written=(host,))


def _is_unheld(directory: Path, token: str, *, written: Collection[bytes]) -> bool:
    """Whether a file with one of these contents is there, and nobody on this host holds it."""
    try:
        handle = os.open(_path(directory, token), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.read(handle, 500) not in written:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def forget_dead(directory: Path, *, but: str) -> None:
    """Remove what owners left who are known to be gone.

    Who dies between making its file and writing into it leaves an empty one, of any host. Without
    its file a job that lives has lost nothing: its drafts are swept by their age.
    """
    written = (_host(), b"")
    with suppress(OSError):
        for entry in os.listdir(directory):
            match = _OWNER.fullmatch(entry)
            token = match["token"] if match else but
            if token != but and _is_unheld(directory, token, written=written):
                forget(directory, token)
