"""Puts samples together into a micro-batch: what `torch.utils.data.default_collate` does, with
tuples that stay tuples, data classes, and errors that name the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parti.errors import DataError

_NUMBER = (bool, int, float, complex, np.generic)
Collate = Callable[[Sequence[Any]], Any]


def collate(samples: Sequence[Any]) -> Any:
    """Stack tensors, arrays and numbers; keep strings as lists; go into structures."""
    return _collate(samples, "")


def _collate(values: Sequence[Any], field: str) -> Any:
    first = values[0]
    _check_one_kind(values, field)
    if isinstance(first, torch.Tensor):
        return _stack(values, field)
    if isinstance(first, np.ndarray):
        return _stack([_tensor(value, field) for value in values], field)
    if isinstance(first, np.generic):
        return _tensor(np.asarray(values), field)
    if isinstance(first, float):
        return torch.tensor(values, dtype=torch.float64)
    if isinstance(first, (bool, int, complex)):
        return torch.tensor(values)
    if isinstance(first, (str, bytes)):
        return list(values)
    if isinstance(first, Mapping):
        return _collate_mappings(values, field)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.init]
        columns = {name: [getattr(value, name) for value in values] for name in names}
        kind: Any = type(first)
        return kind(**{name: _collate(columns[name], f"{field}.{name}") for name in names})
    if isinstance(first, (tuple, list)):
        return _collate_sequences(values, field)
    raise DataError(
        f"{_called(field)} is a {type(first).__module__}.{type(first).__qualname__}, which cannot "
        "be put into a batch. Turn it into a tensor, an array or a number in the data set, or "
        "pass `collate=`, which takes the list of samples."
    )


def _check_one_kind(values: Sequence[Any], field: str) -> None:
    """The first value decides how all are read, so a stray None or array must not slip by."""
    first = values[0]
    for value in values:
        if type(value) is type(first):
            continue
        if not any(isinstance(value, k) and isinstance(first, k) for k in (_NUMBER, torch.Tensor)):
            raise DataError(
                f"{_called(field)} is a {type(first).__name__} in one sample and a "
                f"{type(value).__name__} in another; all samples must have one form."
            )


def _collate_mappings(values: Sequence[Any], field: str) -> Any:
    keys = list(values[0])
    for value in values:
        if value.keys() != values[0].keys():
            raise DataError(
                f"{_called(field)} has the keys {keys} in one sample and {list(value)} in "
                "another; all samples must have the same."
            )
    joined = {key: _collate([value[key] for value in values], f"{field}[{key!r}]") for key in keys}
    kind = type(values[0])
    if kind is dict:
        return joined
    try:
        return kind(joined)
    except TypeError:  # a mapping with a constructor of its own
        return joined


def _collate_sequences(values: Sequence[Any], field: str) -> Any:
    lengths = {len(value) for value in values}
    if len(lengths) > 1:
        raise DataError(
            f"{_called(field)} has from {min(lengths)} to {max(lengths)} items; all samples must "
            "have equally many. Pass `collate=` to pad them."
        )
    parts = [
        _collate(column, f"{field}[{i}]") for i, column in enumerate(zip(*values, strict=True))
    ]
    kind = type(values[0])
    if hasattr(values[0], "_fields"):
        return kind(*parts)
    return tuple(parts) if isinstance(values[0], tuple) else parts


def _tensor(value: NDArray[Any], field: str) -> torch.Tensor:
    try:
        # torch warns of arrays that must not be written to, though the stack only reads them
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    except TypeError as error:
        raise DataError(
            f"{_called(field)} is an array of type {value.dtype}, which torch does not hold."
        ) from error


def _stack(tensors: Sequence[Any], field: str) -> torch.Tensor:
    try:
        return torch.stack(list(tensors))
    except RuntimeError as error:
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) == 1:
            raise
        raise DataError(
            f"{_called(field)} has {len(shapes)} shapes in one micro-batch, among them {shapes[0]} "
            f"and {shapes[-1]}; tensors of one shape can be stacked. Resize or pad them in the "
            "data set, or pass `collate=`."
        ) from error


def _called(field: str) -> str:
    return f"field {field} of a sample" if field else "a sample"
