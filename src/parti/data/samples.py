"""Data sets that are read sample by sample, or a list of samples at a time.

What a sample looks like must not depend on who reads it, so the random generators are seeded from
(seed, epoch, index of the sample) before each one is read, and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from parti.data.collate import Collate, collate
from parti.data.dealing import Wanted
from parti.data.order import Indices
from parti.data.randomness import generators_kept, seed_generators
from parti.data.seeds import Purpose, derive, extend
from parti.errors import DataError, PartiError


class Source(Protocol):
    """A data set of known length, as the feed sees it."""

    @property
    def length(self) -> int: ...

    def fetch(self, wanted: Wanted) -> Sequence[Any]:
        """The data of each micro-batch, in the order asked for."""
        ...


Read = Callable[[Indices, int], Sequence[Any]]
"""Reads the samples of one micro-batch, given their indices and the epoch."""


class Samples:
    """A data set with `__getitem__`, or with `__getitems__`, which reads many samples at once.

    In bulk the generators are seeded once for a micro-batch. That too is the same for any number
    of processes, since a micro-batch holds the same samples wherever it is computed.
    """

    def __init__(self, data: Any, length: int, seed: int, collate_with: Collate | None) -> None:
        self._data = data
        self._seed = seed
        self._collate = collate_with or collate
        self._read: Read = self._in_bulk if reads_in_bulk(data) else self._one_by_one
        self.length = length

    def fetch(self, wanted: Wanted) -> Sequence[Any]:
        with generators_kept():
            return [self._piece(each) for each in wanted.each()]

    def _piece(self, wanted: Wanted) -> Any:
        samples = self._read(wanted.indices, wanted.epoch)
        position = wanted.position + wanted.starts[0]
        seed_generators(derive(self._seed, Purpose.COLLATE, wanted.epoch, position))
        return collated(self._collate, samples, _listed(wanted.indices))

    def _one_by_one(self, indices: Indices, epoch: int) -> Sequence[Any]:
        samples = []
        of_epoch = derive(self._seed, Purpose.SAMPLE, epoch)
        for index in indices.tolist():
            seed_generators(extend(of_epoch, index))
            try:
                samples.append(self._data[index])
            except Exception as error:
                raise DataError(
                    f"reading sample {index} of epoch {epoch} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return samples

    def _in_bulk(self, indices: Indices, epoch: int) -> Sequence[Any]:
        seed_generators(derive(self._seed, Purpose.SAMPLE, epoch, int(indices[0])))
        samples = read_many(self._data.__getitems__, indices, epoch)
        if len(samples) != len(indices):
            raise DataError(
                f"__getitems__ of {type(self._data).__name__} returned {len(samples)} samples for "
                f"{len(indices)} indices; expected a list with one sample for each."
            )
        return list(samples)


class Table:
    """A data set that gives columns for a list of indices: a Hugging Face `datasets.Dataset`."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data = data
        self._seed = seed
        self.length = len(data)

    def fetch(self, wanted: Wanted) -> Sequence[Any]:
        with generators_kept():
            return [self._piece(each.indices, wanted.epoch) for each in wanted.each()]

    def _piece(self, indices: Indices, epoch: int) -> dict[str, Any]:
        # a transform may draw numbers
        seed_generators(derive(self._seed, Purpose.SAMPLE, epoch, int(indices[0])))
        columns = read_many(self._data.__getitem__, indices, epoch)
        if not isinstance(columns, Mapping):
            raise DataError(
                f"many rows of {type(self._data).__name__} come as a {type(columns).__name__}; "
                "expected a dictionary of columns. Choose such a format, as "
                '`data.with_format("torch")`.'
            )
        return {name: _column(values, name) for name, values in columns.items()}


def reads_in_bulk(data: Any) -> bool:
    """Whether `__getitems__` does more than call `__getitem__` for each, as torch's wrappers do."""
    if isinstance(data, Subset):
        return reads_in_bulk(data.dataset)
    return callable(getattr(data, "__getitems__", None)) and not isinstance(data, ConcatDataset)


def collated(collate_with: Collate, samples: Sequence[Any], where: str) -> Any:
    """Call a collate function; say which samples it failed on."""
    try:
        return collate_with(samples)
    except PartiError as error:
        raise DataError(f"{error} ({where})") from error
    except Exception as error:
        raise DataError(
            f"putting {where} together failed: {type(error).__name__}: {error}"
        ) from error


def read_many(read: Callable[[list[int]], Any], indices: Indices, epoch: int) -> Any:
    try:
        return read(indices.tolist())
    except Exception as error:
        raise DataError(
            f"reading {_listed(indices)} of epoch {epoch} failed: {type(error).__name__}: {error}"
        ) from error


def _listed(indices: Indices) -> str:
    shown = ", ".join(str(index) for index in indices[:8].tolist())
    return f"samples {shown}{' …' if len(indices) > 8 else ''}"


def _column(values: Any, name: str) -> Any:
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    values = values.tolist() if isinstance(values, np.ndarray) else list(values)
    innermost = values[0]
    while isinstance(innermost, list) and innermost:
        innermost = innermost[0]
    if isinstance(innermost, (bool, int, float)):
        try:
            numbers = torch.from_numpy(np.array(values))  # some times as fast as torch.tensor
        except (ValueError, TypeError) as error:
            raise DataError(
                f"column {name!r} holds rows of different lengths ({error}). Pad them in the data "
                "set, or pass `collate=`, which takes the list of samples."
            ) from error
        return numbers.to(torch.get_default_dtype()) if numbers.is_floating_point() else numbers
    try:
        return collate(values)
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from error
