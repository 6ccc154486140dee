"""What a checkpoint says of itself: `manifest.json`, and `SHA256SUMS` over all its files.

`SHA256SUMS` follows from the manifest's bytes alone, so a flipped byte in either shows; and
`sha256sum -c SHA256SUMS` verifies a checkpoint where Parti is not installed. Must not know torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from parti.checkpoint.plain import Json
from parti.errors import CheckpointError

FORMAT = "parti.checkpoint/1"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"

_FINAL = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_FILE = re.compile(r"[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor is. `dtype` is torch's name; safetensors' own lacks some."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A part, and what its content must be."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The part of a manifest that lists show; reading it skips the rest.

    `sequence` grows by one with every checkpoint of a directory: the newest is the one written
    last, also where training went back to an earlier step.
    """

    format: str = FORMAT
    step: int
    sequence: int
    attempt: str
    written_at: str
    num_tensors: int
    facts: dict[str, Json]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Head):
    """All of it: also each tensor's place, further names of tensors, and the state's structure."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    tree: Json = None


def final_name(step: int, rewrite: int = 0) -> str:
    """A checkpoint's directory; a step that is written again has a number of its own."""
    return f"step-{step:010}" + (f".{rewrite}" if rewrite else "")


def parse_final(name: str) -> tuple[int, int] | None:
    """Step and rewrite number, if this is the name of a checkpoint."""
    match = _FINAL.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def part_stem(part: int, num_parts: int) -> str:
    return f"part-{part:05}-of-{num_parts:05}"


def part_file(part: int, num_parts: int) -> str:
    return f"{part_stem(part, num_parts)}.safetensors"


def to_json(value: object) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def sums_of(manifest: bytes, files: Sequence[StoredFile]) -> bytes:
    """The content of `SHA256SUMS`."""
    rows = [(file.sha256, file.name) for file in files]
    rows.append((hashlib.sha256(manifest).hexdigest(), MANIFEST))
    return "".join(f"{digest}  {name}\n" for digest, name in rows).encode()


def read_head(path: Path) -> Head:
    """The head of a checkpoint's manifest; raises CheckpointError that says what is wrong."""
    return _read(path, Head)


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest; raises CheckpointError that says what is wrong."""
    return _read(path, Manifest)


def _read(path: Path, kind: type[T]) -> T:
    content = _content(path / MANIFEST)
    _check_format(content)
    found = _parse(content, kind)
    assert isinstance(found, Head)
    if _content(path / SUMS) != sums_of(content, found.files):
        raise CheckpointError(f"{MANIFEST} and {SUMS} do not agree: one of them is damaged.")
    _check_names(found)
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    format: str


def _check_format(content: bytes) -> None:
    """First of all: of another version nothing else is known."""
    found = _parse(content, _Versioned).format
    if found != FORMAT:
        raise CheckpointError(
            f"{MANIFEST} is of format {found!r}; this version of Parti reads {FORMAT!r}."
        )


def _parse(content: bytes, kind: type[T]) -> T:
    import msgspec

    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}.") from error


def _check_names(head: Head) -> None:
    """A manifest names files beside it, never elsewhere."""
    for file in head.files:
        if not _FILE.fullmatch(file.name) or not _SHA256.fullmatch(file.sha256):
            raise CheckpointError(f"{MANIFEST} names {file.name!r}, which is no part's name.")
