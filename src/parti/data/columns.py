"""Data in memory: tensors and arrays of equal length, read many rows at a time.

Rows of a shuffled step are gathered once for the whole step and handed out as views, one for each
micro-batch. Rows in order are views of the data itself: nothing is copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from parti.data.dealing import Wanted
from parti.data.order import Indices
from parti.errors import DataError

Rebuild = Callable[[Iterator[Any]], Any]
"""Puts one value for each column into the structure that the columns came in."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that torch holds but does not gather, and those of the same bits that it does."""

_MAX_NAMED = 12


class Column(Protocol):
    """One value for each sample."""

    def __len__(self) -> int: ...

    def take(self, rows: torch.Tensor) -> torch.Tensor: ...

    def run(self, start: int, stop: int) -> torch.Tensor: ...


class TensorColumn:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.detach()
        self._as_gathered = self._values.view(_SIGNED.get(values.dtype, values.dtype))
        self._has_stand_in = values.dtype in _SIGNED
        self._is_elsewhere = values.device.type != "cpu"

    def __len__(self) -> int:
        return len(self._values)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        if self._is_elsewhere:
            rows = rows.to(self._values.device)
        taken = self._as_gathered.index_select(0, rows)
        return taken.view(self._values.dtype) if self._has_stand_in else taken

    def run(self, start: int, stop: int) -> torch.Tensor:
        return self._values[start:stop]


class ArrayColumn:
    """An array that torch cannot share: read-only (a file mapped into memory), or laid out
    in an order or with strides of its own. Rows are always copied."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values
        self._native = values.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return len(self._values)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        taken = np.take(self._values, rows.numpy(), axis=0)
        return torch.from_numpy(taken.astype(self._native, copy=False))

    def run(self, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._values[start:stop], self._native, order="C"))


class Columns:
    """A source of whole micro-batches from columns held in memory."""

    def __init__(
        self,
        columns: Sequence[Column],
        rebuild: Rebuild,
        rows: Indices | None = None,
    ) -> None:
        """`rows` picks the samples: sample i is row `rows[i]` of the columns."""
        self._columns = columns
        self._rebuild = rebuild
        self._rows = rows
        self.length = len(columns[0]) if rows is None else len(rows)

    def fetch(self, wanted: Wanted) -> Sequence[Any]:
        indices = wanted.indices
        if not indices.size:
            return ()
        if self._rows is None and wanted.is_in_order and wanted.is_one_run:
            first = int(indices[0])
            whole = [column.run(first, first + indices.size) for column in self._columns]
        else:
            rows = torch.from_numpy(indices if self._rows is None else self._rows[indices])
            whole = [column.take(rows) for column in self._columns]
        # "Unsafe" splits are no views in autograd's eyes: where a model works on its input in
        # place, that must not tie the micro-batches' graphs together, let alone the data set.
        pieces = zip(*[torch.unsafe_split_with_sizes(w, wanted.sizes) for w in whole], strict=True)
        return [self._rebuild(iter(piece)) for piece in pieces]

    def run(self, start: int, size: int) -> Any:
        """Consecutive rows, without a copy where the column allows."""
        return self._rebuild(column.run(start, start + size).detach() for column in self._columns)

    def sample(self, index: int) -> Any:
        """One sample, for a collate function that wants samples."""
        row = index if self._rows is None else int(self._rows[index])
        return self._rebuild(column.run(row, row + 1)[0] for column in self._columns)

    def fingerprint(self) -> str:
        """Of types, shapes, and some of the rows: to tell data apart, quickly."""
        rows = np.unique(np.linspace(0, self.length - 1, min(self.length, 64)).astype(np.int64))
        digest = hashlib.sha256(str(self.length).encode())
        chosen = torch.from_numpy(rows if self._rows is None else self._rows[rows])
        for column in self._columns:
            taken = column.take(chosen).cpu().contiguous()
            digest.update(f"{taken.dtype}{tuple(taken.shape)}".encode())
            digest.update(taken.view(torch.uint8).numpy().tobytes() if taken.numel() else b"")
        return digest.hexdigest()[:16]

    def picked(self, rows: Indices) -> Columns:
        """Some of the samples, as a source of its own."""
        return Columns(
            self._columns, self._rebuild, rows if self._rows is None else self._rows[rows]
        )


def columns_of(data: Any, what: str = "the data") -> Columns:
    """Read a tensor, an array, or any nesting of them in tuples, lists and dictionaries."""
    columns: list[tuple[str, Column]] = []
    rebuild = _flatten(data, "", columns)
    if not columns:
        raise DataError(f"{what} is an empty {type(data).__name__}; expected tensors or arrays.")
    if len({len(column) for _, column in columns}) > 1:
        lengths = ", ".join(f"{name} has {len(column)}" for name, column in columns[:_MAX_NAMED])
        raise DataError(
            f"the arrays of {what} differ in length: {lengths}. All must hold one row a sample."
        )
    return Columns([column for _, column in columns], rebuild)


def is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _flatten(value: Any, name: str, found: list[tuple[str, Column]]) -> Rebuild:
    """Append the columns in `value` to `found`; return what rebuilds the structure."""
    if isinstance(value, Mapping):
        keys = list(value)
        inner = [_flatten(value[key], f"{name}[{key!r}]", found) for key in keys]
        if not name and all(_is_leaf(item) for item in value.values()):
            return lambda leaves: dict(zip(keys, leaves, strict=True))
        return lambda leaves: {k: make(leaves) for k, make in zip(keys, inner, strict=True)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        inner = [_flatten(getattr(value, field), f"{name}.{field}", found) for field in fields]
        return lambda leaves: kind(
            **{field: make(leaves) for field, make in zip(fields, inner, strict=True)}
        )
    if isinstance(value, (tuple, list)) and not _is_list_of_numbers(value):
        inner = [_flatten(item, f"{name}[{i}]", found) for i, item in enumerate(value)]
        if hasattr(value, "_fields"):
            named = type(value)
            return lambda leaves: named(*[make(leaves) for make in inner])
        if isinstance(value, list):
            return lambda leaves: [make(leaves) for make in inner]
        if not name and all(_is_leaf(item) for item in value):  # flat, as most are
            return tuple
        return lambda leaves: tuple([make(leaves) for make in inner])
    found.append((name, _column(value, name)))
    return next


def _is_list_of_numbers(value: Sequence[Any]) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (bool, int, float))


def _is_leaf(value: Any) -> bool:
    return is_array(value) or (isinstance(value, list) and _is_list_of_numbers(value))


def _column(value: Any, name: str) -> Column:
    called = f"array {name}" if name else "the array"
    if isinstance(value, list):
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise DataError(f"{called} is a single number; expected one row a sample.")
        if value.layout is not torch.strided:
            raise DataError(f"{called} is {value.layout}; expected a dense tensor: `.to_dense()`.")
        return TensorColumn(value)
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"{called} is a {type(value).__name__}; expected a tensor, an array or a list of "
            "numbers with one row a sample. Samples of other kinds go into a list of samples, or "
            "an object with __getitem__ and __len__."
        )
    if value.ndim == 0:
        raise DataError(f"{called} is a single number; expected one row a sample.")
    if value.dtype.kind not in "biufc":
        raise DataError(
            f"{called} has the type {value.dtype}, which torch does not hold; turn it into numbers."
        )
    plain = np.asarray(value)
    if plain.flags.writeable:
        try:
            return TensorColumn(torch.from_numpy(plain))
        except (TypeError, ValueError):  # a foreign byte order, negative strides
            pass
    return ArrayColumn(plain)
