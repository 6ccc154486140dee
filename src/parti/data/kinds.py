"""Tells the kinds of data apart. The one place that looks at what a user has passed.

- tensors, arrays, tuples, lists, dictionaries or data classes of them; TensorDataset: `Columns`
- a Hugging Face `Dataset`: `Table`
- anything else with `__getitem__` and `__len__`: `Samples`
- an IterableDataset, a generator function, any other iterable; ReadyBatches: a stream
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Subset, TensorDataset

from parti.data.collate import Collate
from parti.data.columns import Columns, columns_of, is_array
from parti.data.pictures import Pictures
from parti.data.samples import Samples, Source, Table
from parti.data.streams import ReadyBatches
from parti.errors import DataError


def is_stream(data: Any) -> bool:
    """Whether the data can only be read from its start on."""
    if isinstance(data, (IterableDataset, ReadyBatches)):
        return True
    if isinstance(data, (str, bytes, type, Mapping, Set, Pictures)):
        return False
    if hasattr(data, "__getitem__") or hasattr(data, "tensors"):
        return False
    return callable(data) or hasattr(data, "__iter__")


def source_of(data: Any, *, seed: int, collate: Collate | None) -> Source:
    """The source for data of known length."""
    columns = _columns(data, collate is not None)
    if columns is not None:
        _check_length(data, columns.length)
        if collate is None:
            return columns
        return Samples(_Rows(columns), columns.length, seed, collate)
    _refuse_what_is_no_data_set(data)
    length = len(data)
    _check_length(data, length)
    if _is_table(data):
        return Table(data, seed) if collate is None else Samples(data, length, seed, collate)
    return Samples(data, length, seed, collate)


def _columns(data: Any, has_collate: bool) -> Columns | None:
    """The data as columns, where it is held in memory and nothing has to be run to read it."""
    if isinstance(data, Pictures):
        raise DataError("this holds the splits 'train' and 'test'; pass one of them: `data.train`.")
    if is_array(data) or isinstance(data, tuple):
        return columns_of(data)
    if isinstance(data, Mapping):
        _refuse_splits(data)
        return columns_of(data)
    if isinstance(data, list):
        return _columns_of_list(data, has_collate)
    if type(data) is Subset:
        whole = _columns(data.dataset, has_collate)
        if whole is None or isinstance(data.dataset, list):
            return None
        return whole.picked(np.asarray(data.indices, dtype=np.int64))
    if isinstance(data, TensorDataset):
        # a subclass that reads samples its own way, to augment them say, must be asked for them
        reads_plainly = type(data).__getitem__ is TensorDataset.__getitem__
        return columns_of(data.tensors) if reads_plainly and len(data.tensors) else None
    if hasattr(data, "__getitem__") or isinstance(data, type):
        return None
    if isinstance(getattr(data, "tensors", None), tuple):
        return columns_of(data.tensors)
    return columns_of(data) if dataclasses.is_dataclass(data) else None


def _columns_of_list(data: list[Any], has_collate: bool) -> Columns | None:
    """A list is a list of samples, except where it can only be a list of columns."""
    if has_collate or not data or not all(is_array(item) and item.ndim for item in data):
        return None
    lengths = {len(item) for item in data}
    if len(lengths) > 1:
        raise DataError(
            f"a list of {len(data)} arrays with {min(lengths)} to {max(lengths)} rows is no data "
            "set: as columns they must be of one length; if each is a sample, pass `collate=` to "
            "pad them."
        )
    if len({(tuple(item.shape), str(item.dtype)) for item in data}) > 1:
        return columns_of(data)
    raise DataError(
        f"a list of {len(data)} arrays of one shape, {tuple(data[0].shape)}, may be {len(data)} "
        f"samples or {len(data)} columns. Pass `torch.stack(list)` for samples, `tuple(list)` "
        "for columns."
    )


def _is_sized_and_indexed(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_table(data: Any) -> bool:
    """A `datasets.Dataset`, told by what it offers: the package need not be installed."""
    return all(hasattr(data, name) for name in ("with_format", "column_names", "__getitems__"))


def _refuse_splits(data: Mapping[Any, Any]) -> None:
    if data and all(_is_table(value) for value in data.values()):
        names = ", ".join(repr(name) for name in data)
        raise DataError(f"this holds the splits {names}; pass one of them.")


def _refuse_what_is_no_data_set(data: Any) -> None:
    if isinstance(data, type):
        raise DataError(
            f"the class {data.__name__} is no data set; make one of it: {data.__name__}(…)."
        )
    kind = type(data).__name__
    if isinstance(data, Set):
        raise DataError(f"a {kind} has no order, and each process would see another: pass a list.")
    if hasattr(data, "iloc"):
        raise DataError(
            f"a {kind} is no data set of samples; pass its numbers: `(frame[inputs].to_numpy(), "
            "frame[target].to_numpy())`."
        )
    if isinstance(data, (str, bytes)) or not _is_sized_and_indexed(data):
        raise DataError(
            f"data of type {kind} is not a data set. Expected tensors or arrays, an object with "
            "__getitem__ and __len__, an iterable, or a function that returns one."
        )


def _check_length(data: Any, length: int) -> None:
    if length == 0:
        raise DataError(f"the data set is empty: its {type(data).__name__} has 0 samples.")


class _Rows:
    """Columns seen as samples."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __getitem__(self, index: int) -> Any:
        return self._columns.sample(index)
