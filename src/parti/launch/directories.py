"""The two directories of a job on this host: its scratch, and its record under `runs/`.

The scratch (`<tmp>/parti-<uid>/<name>`, mode 0700) is where workers of one host meet and where
failures are reported. It is gone when the job is. A supervisor holds a lock on its `owner` file
for as long as it lives; the kernel drops the lock however the supervisor ends, so the next start
knows which directories nobody owns, and sweeps them. (A pid could have been given to another
process since, or belong to another container.)
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parti.errors import ConfigError

_UNFINISHED = ".new-"
_UNFINISHED_IS_STALE_AFTER_S = 60.0


def scratch_root() -> Path:
    """The directory of all scratch of this user; made if it is not there, and checked."""
    path = Path(tempfile.gettempdir()) / f"parti-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make the scratch directory {path}: {error.strerror}; "
            "set TMPDIR to a directory that can be written"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is not a directory that only this user can enter (mode 0700, owner "
            f"{os.getuid()}): remove it, or set TMPDIR to another directory"
        )
    return path


@dataclass(slots=True)
class Scratch:
    """The scratch directory of a living supervisor."""

    path: Path
    _lock: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def create_scratch(name: str) -> Scratch:
    """Sweep what dead supervisors left, then make the directory `name`."""
    root = scratch_root()
    sweep(root)
    # It gets its name only when it is locked: a sweeper never sees it unowned.
    unfinished = root / f"{_UNFINISHED}{name}"
    unfinished.mkdir(mode=0o700)
    lock = os.open(unfinished / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"{os.getpid()}\n".encode())
    (unfinished / "failures").mkdir(mode=0o700)
    path = root / name
    unfinished.rename(path)
    return Scratch(path, lock)


def sweep(root: Path) -> list[str]:
    """Remove the directories under `root` whose supervisor is gone; say which."""
    swept: list[str] = []
    for path in root.iterdir():
        if path.name.startswith(_UNFINISHED) and not _is_older(path, _UNFINISHED_IS_STALE_AFTER_S):
            continue
        if path.is_dir() and not path.is_symlink() and not _is_owned(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path.name)
    return swept


def _is_owned(path: Path) -> bool:
    try:
        handle = os.open(path / "owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)


def _is_older(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > age_s
    except OSError:
        return False


def create_run_directory(runs_dir: Path, name: str, *, chosen_by_user: bool) -> Path:
    """`runs_dir/name`, absolute, with a `latest` link to it.

    A name that a user chose is used again, and logs grow; a name made up here gets a number where
    it is taken, so that no run writes into another's.
    """
    if name in ("", ".", "..", "latest") or "/" in name or name.startswith("-"):
        raise ConfigError(f"the run's name is {name!r}; it has to be a plain directory name")
    try:
        path = _make(runs_dir.absolute(), name, chosen_by_user)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write the run's logs to {runs_dir.absolute() / name}: {error.strerror}; "
            "start in a directory that can be written to, or choose another place with "
            "`parti run --runs-dir DIR` (or launch(..., runs_dir=DIR))"
        ) from error
    _point_latest_to(path)
    return path


def _make(runs_dir: Path, name: str, chosen_by_user: bool) -> Path:
    runs_dir.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(exist_ok=chosen_by_user)
        except FileExistsError:
            if chosen_by_user:  # a file is in the way
                raise
            number += 1
        else:
            return path


def _point_latest_to(path: Path) -> None:
    """A convenience: a file system without links, or something in the way, is no reason to stop."""
    fresh = path.parent / f".latest-{os.getpid()}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(path.parent / "latest")
    except OSError:
        fresh.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` in one step: a reader finds the old file or the new one, whole."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
