"""Copied tensors, handed out as the bytes of their file. Runs in the background; no torch.

A tensor was copied as it lay in memory, which is quickest. One that lay otherwise than row by row
(channels last, a transpose) is put in order only here, while training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

_CHUNK_BYTES = 4 * 2**20
_NUMBERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""By width in bytes: whatever the bits mean, they are only moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor's bytes. `strides`, in numbers, where they are not in the order of rows."""

    offset: int
    num_bytes: int
    width: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A block of memory, and the tensors in it, one after the other without gaps."""

    memory: memoryview
    pieces: tuple[Piece, ...]

    def chunks(self) -> Iterator[memoryview]:
        """All bytes in the file's order, some megabytes at a time."""
        for is_in_order, pieces in groupby(self.pieces, lambda piece: piece.strides is None):
            if is_in_order:
                run = list(pieces)
                end = run[-1].offset + run[-1].num_bytes
                yield from _cut(self.memory[run[0].offset : end])
            else:
                for piece in pieces:
                    yield from _cut(self._in_order(piece))

    def _in_order(self, piece: Piece) -> memoryview:
        assert piece.strides is not None
        numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.ndarray(
            piece.shape,
            _NUMBERS[piece.width],
            self.memory,
            piece.offset,
            [stride * piece.width for stride in piece.strides],
        )
        return np.ascontiguousarray(numbers).data.cast("B")


def _cut(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _CHUNK_BYTES):
        yield data[begin : begin + _CHUNK_BYTES]


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the numbers fill their memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
