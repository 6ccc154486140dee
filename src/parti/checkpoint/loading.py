"""Tensors from a checkpoint's files: each byte is read once, hashed, and lands where it is used."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parti.checkpoint.layout import LENGTH_BYTES, header_bytes, read_header
from parti.checkpoint.manifest import Manifest, StoredFile, StoredTensor, read_manifest
from parti.checkpoint.tree import dtype_of, join
from parti.errors import CheckpointError

_CHUNK_BYTES = 4 * 2**20
_MOST_READERS = 4

Wanted = Callable[[str], bool]


def load_tree(path: Path, names: Wanted | None) -> Any:
    """The whole state, or what is chosen of it."""
    try:
        manifest = read_manifest(path)
        tensors = _read_tensors(path, manifest, names)
        return _joined(manifest, tensors)
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _joined(manifest: Manifest, tensors: dict[str, Tensor]) -> Any:
    try:
        return join(manifest.tree, tensors)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"its manifest holds a form that can't be read ({error}).") from error


def _chosen(manifest: Manifest, names: Wanted | None) -> set[str]:
    """Tensors that are wanted under any of the names they have."""
    if names is None:
        return set(manifest.tensors)
    tied = {held for name, held in manifest.ties.items() if names(name)}
    return tied | {name for name in manifest.tensors if names(name)}


def _read_tensors(path: Path, manifest: Manifest, names: Wanted | None) -> dict[str, Tensor]:
    wanted: dict[str, dict[str, StoredTensor]] = {file.name: {} for file in manifest.files}
    chosen = _chosen(manifest, names)
    for name, tensor in manifest.tensors.items():
        if name in chosen:
            if tensor.file not in wanted:
                raise CheckpointError(f"its manifest places {name!r} in {tensor.file!r}.")
            wanted[tensor.file][name] = tensor
    files = [file for file in manifest.files if wanted[file.name] or names is None]
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(max(1, min(_MOST_READERS, len(files), os.cpu_count() or 1))) as pool:
        for found in pool.map(lambda file: _read_file(path, file, wanted[file.name]), files):
            tensors |= found
    return {name: tensors[name] for name in manifest.tensors if name in tensors}


def _read_file(
    path: Path, stored: StoredFile, wanted: dict[str, StoredTensor]
) -> dict[str, Tensor]:
    with (path / stored.name).open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != stored.num_bytes:
            raise CheckpointError(
                f"{stored.name} has {num_bytes} bytes instead of {stored.num_bytes}."
            )
        reader = _Reader(file, stored)
        try:
            tensors = _read_part(reader, num_bytes, wanted)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.name} is damaged: {error}") from error
    return tensors


class _Reader:
    """A file read from its start to its end, and hashed on the way."""

    def __init__(self, file: io.FileIO, stored: StoredFile) -> None:
        self._file = file
        self._stored = stored
        self._digest = hashlib.sha256()
        self.position = 0

    def into(self, target: memoryview) -> None:
        """Fill it."""
        while target:
            count = self._file.readinto(target[:_CHUNK_BYTES])
            if not count:
                raise CheckpointError(f"it ends after {self.position} bytes.")
            self._digest.update(target[:count])
            self.position += count
            target = target[count:]

    def some(self, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        self.into(memoryview(content))
        return content

    def skip_to(self, position: int) -> None:
        """What nobody wants is hashed all the same."""
        scratch = bytearray(min(_CHUNK_BYTES, max(0, position - self.position)))
        while self.position < position:
            self.into(memoryview(scratch)[: position - self.position])

    def check(self) -> None:
        digest, expected = self._digest.hexdigest(), self._stored.sha256
        if digest != expected:
            raise CheckpointError(f"its SHA-256 is {digest} instead of {expected}.")


def _read_part(
    reader: _Reader, num_bytes: int, wanted: dict[str, StoredTensor]
) -> dict[str, Tensor]:
    length = header_bytes(bytes(reader.some(LENGTH_BYTES)), file_bytes=num_bytes)
    places = read_header(bytes(reader.some(length)), file_bytes=num_bytes)
    begin_of_data = reader.position
    tensors = {}
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
        if name in wanted:
            reader.skip_to(begin_of_data + begin)
            tensors[name] = _read_tensor(reader, name, wanted[name], end - begin)
    reader.skip_to(num_bytes)
    reader.check()
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"it lacks {missing[0]!r}, which the manifest places there.")
    return tensors


def _read_tensor(reader: _Reader, name: str, stored: StoredTensor, num_bytes: int) -> Tensor:
    dtype = dtype_of(stored.dtype)
    if math.prod(stored.shape) * dtype.itemsize != num_bytes:
        raise CheckpointError(
            f"it has {num_bytes} bytes of {name!r}, which is {stored.dtype} of shape "
            f"{list(stored.shape)}."
        )
    tensor = torch.empty(stored.shape, dtype=dtype)
    if num_bytes:
        reader.into(tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor
