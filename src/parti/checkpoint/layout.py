"""Which process writes which tensors, and how a part lies in its safetensors file. Pure; no torch.

A safetensors file is 8 bytes (length of the header), the header (JSON: dtype, shape and place of
each tensor), and the bytes of all tensors without gaps.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parti.errors import CheckpointError

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_ALIGNMENT = 8
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its values. `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """A part as it lies in its file: the header, then each tensor at its offset from there."""

    header: bytes
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def assign(
    names_and_bytes: Iterable[tuple[str, int]], num_parts: int
) -> tuple[tuple[str, ...], ...]:
    """Deal whole tensors to parts of about equal size: the largest first, to the emptiest part.

    The same names and sizes are dealt alike on every process.
    """
    loads = [(0, part) for part in range(num_parts)]
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    for name, num_bytes in sorted(names_and_bytes, key=lambda pair: (-pair[1], pair[0])):
        load, part = heapq.heappop(loads)
        parts[part].append(name)
        heapq.heappush(loads, (load + num_bytes, part))
    return tuple(map(tuple, parts))


def lay_out(specs: Iterable[TensorSpec]) -> PartLayout:
    """Place tensors one after the other, those of the widest numbers first.

    So each begins at a multiple of its own width without a gap, which safetensors forbids.
    """
    ordered = tuple(sorted(specs, key=lambda spec: (-_width(spec), spec.name)))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = [], 0
    for spec in ordered:
        offsets.append(end)
        code, shape = _stored_as(spec)
        entries[spec.name] = {
            "dtype": code, "shape": shape, "data_offsets": [end, end + spec.num_bytes],
        }  # fmt: skip
        end += spec.num_bytes
    return PartLayout(
        header=_header(entries), specs=ordered, offsets=tuple(offsets), data_bytes=end
    )


def _header(entries: Mapping[str, Any]) -> bytes:
    import msgspec

    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _width(spec: TensorSpec) -> int:
    """Bytes of one number; of an empty tensor it does not matter."""
    count = _count(spec.shape)
    return spec.num_bytes // count if count else 1


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _stored_as(spec: TensorSpec) -> tuple[str, list[int]]:
    """safetensors' code and shape. A dtype that it lacks is stored as bytes, in one more dim."""
    code = _CODES.get(spec.dtype)
    if code is not None:
        return code, list(spec.shape)
    return "U8", [*spec.shape, _width(spec)]


def read_header(text: bytes, *, file_bytes: int) -> dict[str, tuple[int, int]]:
    """For each tensor its begin and end, counted from the header's end."""
    import msgspec

    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        entries.pop("__metadata__", None)
        places = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CheckpointError(f"its header is no safetensors header ({error}).") from error
    data_bytes = file_bytes - LENGTH_BYTES - len(text)
    for name, (begin, end) in places.items():
        if not 0 <= begin <= end <= data_bytes:
            raise CheckpointError(
                f"its header places {name!r} at bytes {begin} to {end} of {data_bytes}."
            )
    return places


def header_bytes(length: bytes, *, file_bytes: int) -> int:
    """How long the header is, from a file's first 8 bytes."""
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > file_bytes - LENGTH_BYTES:
        raise CheckpointError(f"its header is said to be {num_bytes} bytes of {file_bytes}.")
    return int(num_bytes)
