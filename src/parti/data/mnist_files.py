"""The four files of MNIST: what they must hold, and how they are read from a local copy.

Whatever a copy looks like, its content is compared with the SHA-256 of the original file.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parti.errors import DataError

Bytes = NDArray[np.uint8]
_UNSIGNED_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file: unsigned bytes in the idx format, compressed with gzip where it is published."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    keras_name: str
    archive_bytes: int
    archive_sha256: str

    @property
    def header(self) -> bytes:
        dims = len(self.shape)
        return struct.pack(f">HBB{dims}I", 0, _UNSIGNED_BYTES, dims, *self.shape)


FILES = (
    File(
        name="train-images-idx3-ubyte",
        shape=(60_000, 28, 28),
        sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        keras_name="x_train",
        archive_bytes=9_912_422,
        archive_sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    File(
        name="train-labels-idx1-ubyte",
        shape=(60_000,),
        sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        keras_name="y_train",
        archive_bytes=28_881,
        archive_sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    File(
        name="t10k-images-idx3-ubyte",
        shape=(10_000, 28, 28),
        sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        keras_name="x_test",
        archive_bytes=1_648_877,
        archive_sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    File(
        name="t10k-labels-idx1-ubyte",
        shape=(10_000,),
        sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        keras_name="y_test",
        archive_bytes=4_542,
        archive_sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)


def decoded(file: File, content: bytes, where: str) -> Bytes:
    """The array in an uncompressed file, once its content is known to be the original's."""
    _compare(f"{where} ({len(content)} bytes)", hashlib.sha256(content).hexdigest(), file.sha256)
    return np.frombuffer(content, np.uint8, offset=len(file.header)).reshape(file.shape)


def unpacked(file: File, archive: bytes, where: str) -> Bytes:
    """The array in a published archive, which is checked before it is unpacked."""
    if len(archive) != file.archive_bytes:
        raise DataError(f"{where} holds {len(archive)} bytes; expected {file.archive_bytes}.")
    _compare(where, hashlib.sha256(archive).hexdigest(), file.archive_sha256)
    return decoded(file, gzip.decompress(archive), where)


def read_folder(folder: Path) -> tuple[Bytes, ...] | None:
    """The four arrays from a folder, compressed or not; None where the folder has none of them."""
    found = [_find(folder, file) for file in FILES]
    if not any(found):
        return None
    arrays = []
    for file, path in zip(FILES, found, strict=True):
        if path is None:
            raise DataError(f"{folder} lacks {file.name}.")
        try:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        arrays.append(decoded(file, content, str(path)))
    return tuple(arrays)


def read_keras(path: Path) -> tuple[Bytes, ...] | None:
    """The four arrays from the one file that Keras keeps."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [np.ascontiguousarray(archive[file.keras_name]) for file in FILES]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return tuple(
        decoded(file, file.header + array.tobytes(), f"{path}, {file.keras_name}")
        for file, array in zip(FILES, arrays, strict=True)
    )


def _find(folder: Path, file: File) -> Path | None:
    """Both spellings are about: with `-idx` as published, with `.idx` by some unpackers."""
    for name in (file.name, file.name.replace("-idx", ".idx")):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def _compare(what: str, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise DataError(f"{what} is not MNIST's: its SHA-256 is {sha256}; expected {expected}.")
