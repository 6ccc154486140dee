"""How the parameters of one optimizer lie in one flat block of bytes. Pure; touches no memory.

Parameters lie in reverse order of registration, because backward finishes the last layers first
and a prefix of the block is then ready early. Each starts on a cache line. A *chunk* is a piece of
one parameter of at most `CHUNK_BYTES` (`ACCELERATOR_CHUNK_BYTES` on accelerators); it is the unit
of ownership: which elements an optimizer call sees together depends on the layout only, never on
how many ranks share the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

LINE_BYTES = 64
CHUNK_BYTES = 1 << 20
ACCELERATOR_CHUNK_BYTES = 1 << 24
PIECE_BYTES = 1 << 20
"""Fits the last cache, which the processes of a host share, with the weights, the optimizer's state
and the journal of as many elements."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its name, what it is, and where it lies."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The parameter's own shape over its bytes in a flat block."""
        flat = block[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one parameter, as bytes of the block."""

    entry: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every parameter lies; equal on all ranks of a job."""

    entries: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]
    num_bytes: int
    piece_bytes: int
    """How much is added up and updated at a time."""

    def fingerprint(self) -> bytes:
        text = "\n".join(f"{entry} {entry.stride}" for entry in self.entries)
        return hashlib.sha256(text.encode()).digest()

    def own(self, num_owners: int) -> tuple[range, ...]:
        """Deal the chunks in runs of about equal bytes; run k belongs to owner k."""
        cuts = [0]
        done = 0
        for i, chunk in enumerate(self.chunks):
            middle = done + (chunk.high - chunk.low) / 2
            while len(cuts) < num_owners and middle >= self._payload * len(cuts) / num_owners:
                cuts.append(i)
            done += chunk.high - chunk.low
        cuts += [len(self.chunks)] * (num_owners + 1 - len(cuts))
        return tuple(range(low, high) for low, high in pairwise(cuts))

    @property
    def _payload(self) -> int:
        return sum(chunk.high - chunk.low for chunk in self.chunks)


def lay_out(named: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """Place the parameters, last registered first."""
    # On an accelerator what a call costs is what counts, not which cache is warm.
    is_on_cpu = all(tensor.device.type in ("cpu", "meta") for _, tensor in named)
    chunk_bytes = CHUNK_BYTES if is_on_cpu else ACCELERATOR_CHUNK_BYTES
    entries: list[Entry] = []
    chunks: list[Chunk] = []
    offset = 0
    for name, tensor in reversed(named):
        num_bytes = tensor.numel() * tensor.element_size()
        entry = Entry(
            name, tuple(tensor.shape), dense_stride(tensor), tensor.dtype, offset, num_bytes
        )
        chunks += [
            Chunk(len(entries), low, min(low + chunk_bytes, offset + num_bytes))
            for low in range(offset, offset + num_bytes, chunk_bytes)
        ]
        entries.append(entry)
        offset += -(-num_bytes // LINE_BYTES) * LINE_BYTES
    piece_bytes = PIECE_BYTES if is_on_cpu else max(offset, 1)
    return Layout(tuple(entries), tuple(chunks), offset, piece_bytes)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own stride where it fills its memory without gaps, else the default one."""
    return torch.empty_like(tensor, device="meta").stride()


def difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """The first place where two layouts, as lines of text, part ways."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a!r} here, {b!r} there"
    longer, where = (mine, "here") if len(mine) > len(theirs) else (theirs, "there")
    extra = longer[min(len(mine), len(theirs))] if len(mine) != len(theirs) else "nothing"
    return f"{extra!r} only {where}"
