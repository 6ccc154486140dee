"""What a caller asks of a feed, checked before anything is read."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from parti.data.collate import Collate
from parti.data.order import Position, default_micro_batches
from parti.data.workers import WorkerSettings
from parti.errors import ConfigError

_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """All choices made; nothing is left to be told from the data but its length."""

    batch_size: int
    num_micro_batches: int
    num_epochs: int
    seed: int
    shuffle: bool
    drop_last: bool
    collate: Collate | None
    start: Position
    workers: WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the caller said; None where it said nothing."""

    batch_size: int | None
    shuffle: bool | None
    drop_last: bool | None
    workers: int | None
    collate: Collate | None


def settle(
    asked: Asked,
    *,
    micro_batches: int | None,
    epochs: int,
    seed: int,
    start: Position | None,
    workers: WorkerSettings,
) -> FeedSettings:
    if asked.batch_size is None:
        raise ConfigError(
            "batch_size is missing: the number of samples in one step, over all processes."
        )
    batch_size = _count("batch_size", asked.batch_size, at_least=1)
    if micro_batches is None:
        num_micro_batches = default_micro_batches(batch_size)
    else:
        num_micro_batches = _count("micro_batches", micro_batches, at_least=1)
    if num_micro_batches > batch_size:
        raise ConfigError(
            f"micro_batches={num_micro_batches} is more than batch_size={batch_size}, the number "
            "of samples in one step over all processes; a micro-batch needs one sample at least."
        )
    num_epochs = _count("epochs", epochs, at_least=1)
    start = start or Position()
    if start.epoch > num_epochs or (start.epoch == num_epochs and start.step_in_epoch > 0):
        raise ConfigError(
            f"start={start} lies behind the end of epochs={num_epochs}, which counts from the "
            "beginning of the training, not from where it is resumed."
        )
    return FeedSettings(
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        num_epochs=num_epochs,
        seed=_count("seed", seed, at_least=None),
        shuffle=asked.shuffle is not False,
        drop_last=bool(asked.drop_last),
        collate=asked.collate,
        start=start,
        workers=replace(workers, num_workers=_count("workers", asked.workers or 0, at_least=0)),
    )


def unwrap(data: Any, asked: Asked) -> tuple[Any, Asked, WorkerSettings]:
    """Look through a torch DataLoader: take its data set and its settings, which must agree with
    what is asked. Its own order is not used: Parti deals the samples."""
    if not isinstance(data, DataLoader):
        return data, asked, WorkerSettings()
    _check_samplers(data)
    shuffle = {SequentialSampler: False, RandomSampler: True}.get(type(data.sampler))
    own_collate: Any = data.collate_fn
    if own_collate in (default_collate, default_convert):
        own_collate = None
    settled = Asked(
        batch_size=_agreed("batch_size", asked.batch_size, data.batch_size),
        shuffle=_agreed("shuffle", asked.shuffle, shuffle),
        drop_last=_agreed("drop_last", asked.drop_last, data.drop_last or None),
        workers=_agreed("workers", asked.workers, data.num_workers or None),
        collate=_agreed("collate", asked.collate, own_collate),
    )
    workers = WorkerSettings(
        init=data.worker_init_fn, context=data.multiprocessing_context, timeout_s=data.timeout
    )
    return data.dataset, settled, workers


def _check_samplers(loader: DataLoader[Any]) -> None:
    if loader.batch_size is None:
        raise ConfigError(
            "the DataLoader has a batch_sampler of its own, or none; Parti deals the samples to "
            "processes itself. Pass its data set instead, with batch_size; or, where its items "
            "are batches already, `parti.ReadyBatches(loader)`."
        )
    sampler = loader.sampler
    name = type(sampler).__name__
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    ):
        raise ConfigError(
            "the DataLoader's RandomSampler draws with replacement or a part of the samples; Parti "
            "uses each sample once an epoch. Pass the data set instead."
        )
    known = (SequentialSampler, RandomSampler)
    if type(sampler) not in known and name != "_InfiniteConstantSampler":
        raise ConfigError(
            f"the DataLoader deals with a {name}, but Parti deals the samples to processes "
            "itself, in an order that follows from the seed. Pass the data set instead: "
            "`loader.dataset`."
        )


def _agreed(name: str, asked: _Said, of_loader: _Said) -> _Said:
    """What one of the two has said. None is silence."""
    if asked is None or of_loader is None:
        return of_loader if asked is None else asked
    if asked != of_loader:
        raise ConfigError(
            f"{name}={asked} is asked for, but the DataLoader has {name}={of_loader}. Leave one of "
            "them out, or pass the data set itself: `loader.dataset`."
        )
    return asked


def _count(name: str, value: Any, *, at_least: int | None) -> int:
    expected = "a whole number" if at_least is None else f"a whole number from {at_least} on"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (at_least is not None and number < at_least):
        raise ConfigError(f"{name}={value!r}; expected {expected}.")
    return number
