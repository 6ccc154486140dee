"""The checkpoints of a directory, newest first, as their names and manifests tell. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parti.checkpoint.manifest import Head, parse_final, read_head
from parti.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint on disk. Its files have not been looked at.

    `head` is what its manifest says; None where that can't be trusted, and `problem` says why.
    """

    path: Path
    step: int
    rewrite: int
    head: Head | None
    problem: str | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(file.num_bytes for file in self.head.files) if self.head else 0


def look_at(path: Path) -> Found:
    """One checkpoint, by its directory; any name will do, as it may have been moved."""
    name = parse_final(path.name)
    try:
        head, problem = read_head(path), None
    except CheckpointError as error:
        head, problem = None, str(error)
    step, rewrite = name or (0, 0)
    return Found(
        path=path, step=head.step if head else step, rewrite=rewrite, head=head, problem=problem
    )


def list_checkpoints(directory: Path) -> tuple[Found, ...]:
    """All checkpoints, newest first. A directory that is not there holds none."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read: {error.strerror}. Expected a directory of checkpoints."
        ) from error
    found = [look_at(directory / name) for name in names if parse_final(name)]
    return tuple(sorted(found, key=lambda one: _place(one, found), reverse=True))


def _place(one: Found, every: list[Found]) -> tuple[float, int, int]:
    """By the order of writing; without a manifest, after those of earlier steps."""
    if one.head is not None:
        return one.head.sequence, one.step, one.rewrite
    before = [other.head.sequence for other in every if other.head and other.step <= one.step]
    return max(before, default=0) + 0.5, one.step, one.rewrite


def wrong_sizes(found: Found) -> tuple[str, ...]:
    """Files that are missing, or longer or shorter than they must be. Reads no file."""
    problems = []
    for file in found.head.files if found.head else ():
        try:
            num_bytes = (found.path / file.name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{file.name} is missing.")
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}.")
        else:
            if num_bytes != file.num_bytes:
                problems.append(f"{file.name} has {num_bytes} bytes instead of {file.num_bytes}.")
    return tuple(problems)


def is_whole(found: Found) -> bool:
    """Whether all files are there in full size; a flipped byte needs `verify`."""
    return found.head is not None and not wrong_sizes(found)
