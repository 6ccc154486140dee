"""`parti doctor`: from what was typed to the page."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from parti.doctor.check import check
from parti.doctor.page import page
from parti.doctor.run import read_run
from parti.errors import ConfigError

_MARKS = ("run.json", "events.jsonl")


def look(named: str | None, runs_dir: Path, say: Callable[[str], None]) -> int:
    """Print the page of a run. 1 if its history of commits is not as it should be, else 0."""
    run = read_run(find(named, runs_dir))
    problems = check(run)
    say(page(run, problems))
    return 1 if problems else 0


def find(named: str | None, runs_dir: Path) -> Path:
    """The directory of a run: by its path, or by its name; the latest where none is given."""
    if named is None:
        if not (runs_dir / "latest").is_dir():
            raise ConfigError(
                f"there is no latest run in {runs_dir}: start one with `parti run`, or name the "
                "directory of a run"
            )
        return runs_dir / "latest"
    for path in (Path(named), runs_dir / named):
        if path.is_dir():
            if any((path / mark).exists() for mark in _MARKS):
                return path
            raise ConfigError(
                f"{path} is not the directory of a run: it holds neither {' nor '.join(_MARKS)}"
                + _known(named, path if path == runs_dir else runs_dir)
            )
        if path.exists():
            raise ConfigError(f"{path} is a file; name the directory of a run, as {path.parent}")
    raise ConfigError(f"there is no run {named!r}, here or in {runs_dir}" + _known(named, runs_dir))


def _known(named: str, runs_dir: Path) -> str:
    """Runs that may have been meant."""
    try:
        runs = [
            path
            for path in runs_dir.iterdir()
            if not path.is_symlink() and (path / _MARKS[0]).exists()
        ]
    except OSError:
        return ""
    names = [path.name for path in sorted(runs, key=lambda path: path.stat().st_mtime)]
    near = difflib.get_close_matches(named, names, n=3) or names[-3:][::-1]
    return f"; runs there: {', '.join(near)}" if near else ""
