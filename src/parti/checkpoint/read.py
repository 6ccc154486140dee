"""Checkpoints from disk: which is the newest good one, and what it holds.

Nothing is unpickled. Every byte is compared with the hash that was written with it before anything
is handed out. Does not import torch, but to load tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parti.checkpoint import plain
from parti.checkpoint.listing import Found, list_checkpoints, look_at, wrong_sizes
from parti.checkpoint.manifest import read_head
from parti.errors import CheckpointError

__all__ = ["Found", "facts", "list_checkpoints", "load", "newest_good", "verify"]


def verify(path: str | Path) -> tuple[str, ...]:
    """Everything that is wrong with a checkpoint, by file; reads all of it."""
    path = Path(path)
    if not path.is_dir():
        return ("the checkpoint is missing.",)
    found = look_at(path)
    if found.head is None:
        return (found.problem or "",)
    problems = list(wrong_sizes(found))
    suspects = {problem.split(" ")[0] for problem in problems}
    for file in found.head.files:
        if file.name not in suspects:
            problem = _wrong_hash(path / file.name, file.sha256)
            if problem is not None:
                problems.append(problem)
    return tuple(problems)


def _wrong_hash(path: Path, expected: str) -> str | None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}."
    if digest == expected:
        return None
    return f"{path.name} is damaged: its SHA-256 is {digest} instead of {expected}."


def newest_good(directory: str | Path, note: Callable[[str], None]) -> Found | None:
    """The newest checkpoint without a fault; `note` is told what is wrong with newer ones."""
    for found in list_checkpoints(Path(directory)):
        problems = verify(found.path)
        if not problems:
            return found
        note(f"{found.path} is not used: {' '.join(problems)}")
    return None


def facts(path: str | Path) -> dict[str, Any]:
    """What the writer told of the state beside it."""
    path = Path(path)
    try:
        found = read_head(path).facts
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return {name: plain.decode(form) for name, form in found.items()}


def load(path: str | Path, *, names: Callable[[str], bool] | None = None) -> Any:
    """The state as it was handed to `Writer.begin`; raises if a byte of what is read differs.

    `names` chooses tensors by their dotted names; entries whose tensor is not chosen are left out,
    and files without a chosen one are not read.
    """
    from parti.checkpoint.loading import load_tree

    return load_tree(Path(path), names)
