"""Data that comes in an order of its own and cannot be indexed: iterable data sets, generators.

Every rank reads the whole stream and keeps the positions of its own micro-batches, so each sample
is used once whatever the number of ranks. All ranks look one batch's end ahead in the same way,
so they agree on which batch is the last and how long it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parti.data.collate import Collate, collate
from parti.data.columns import Columns, columns_of
from parti.data.dealing import Share, Shares
from parti.data.order import Position
from parti.data.randomness import OwnRandomness, generators_kept, seed_generators
from parti.data.samples import collated
from parti.data.seeds import Purpose, derive
from parti.errors import ConfigError, DataError

Open = Callable[[int], Iterator[Any]]
"""Starts reading an epoch."""


@dataclass(frozen=True, slots=True)
class ReadyBatches:
    """Marks an iterable whose items are whole batches already: tensors in tuples or dictionaries.

    `batches` is an iterable, or a function without arguments that returns one. Each item is a
    global batch, equal on every rank; it may hold up to `batch_size` samples, and is cut into
    micro-batches along its first dimension.
    """

    batches: Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStep:
    """A step that has been read, with the data of the rank's own micro-batches."""

    position: Position
    is_last: bool
    share: Share
    parts: Sequence[Any]
    group: Group | None
    """All of the step's samples; None where another process has read them."""


class Group(Protocol):
    """The samples of one global batch, before they are dealt."""

    def __len__(self) -> int: ...

    def part(self, start: int, size: int) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Where a stream comes from, and how its samples become micro-batches."""

    open: Open
    holds_batches: bool
    batch_size: int
    drop_last: bool
    num_epochs: int
    seed: int
    collate: Collate | None

    def steps(self, shares: Shares, start: Position) -> Iterator[StreamStep]:
        """All steps from `start`. What lies before it in its epoch is read and thrown away."""
        for epoch in range(start.epoch, self.num_epochs):
            first = start.step_in_epoch if epoch == start.epoch else 0
            groups = self._batches(epoch) if self.holds_batches else self._gathered(epoch)
            for step, (group, is_last) in enumerate(groups):
                if step < first:
                    continue
                share = shares.of(len(group))
                runs = zip(share.starts, share.sizes, strict=True)
                yield StreamStep(
                    position=Position(epoch=epoch, step_in_epoch=step),
                    is_last=is_last,
                    share=share,
                    parts=[group.part(begin, size) for begin, size in runs],
                    group=group,
                )

    def _gathered(self, epoch: int) -> Iterator[tuple[Group, bool]]:
        pending: deque[Any] = deque()
        reader = _Reader(self, epoch)
        step = 0
        while True:
            ahead = self.batch_size if self.drop_last else 1
            reader.fill(pending, self.batch_size + ahead)
            count = min(self.batch_size, len(pending))
            if count < (self.batch_size if self.drop_last else 1):
                if step == 0:
                    raise DataError(
                        f"the stream ended after {count} samples in epoch {epoch}, with "
                        f"drop_last and batch_size={self.batch_size}: no batch is left."
                    )
                return
            samples = [pending.popleft() for _ in range(count)]
            is_last = reader.ended and len(pending) < ahead
            yield _Gathered(samples, self, epoch, step * self.batch_size), is_last
            step += 1
            if is_last:
                return

    def _batches(self, epoch: int) -> Iterator[tuple[Group, bool]]:
        pending: deque[Any] = deque()
        reader = _Reader(self, epoch)
        step = 0
        while True:
            reader.fill(pending, 2)
            if not pending:
                return
            columns = columns_of(pending.popleft(), f"batch {step} of epoch {epoch}")
            if not 0 < columns.length <= self.batch_size:
                raise DataError(
                    f"batch {step} of epoch {epoch} holds {columns.length} samples; expected 1 to "
                    f"batch_size={self.batch_size}. Pass the size of the largest batch."
                )
            yield _Ready(columns), not pending
            step += 1


class _Reader:
    """Reads one epoch, with the random state of the stream in place of the process's."""

    def __init__(self, stream: Stream, epoch: int) -> None:
        self._epoch = epoch
        self._randomness = OwnRandomness(derive(stream.seed, Purpose.STREAM, epoch))
        self._num_read = 0
        self.ended = False
        with self._randomness.active():
            self._items = self._guarded(lambda: stream.open(epoch))

    def fill(self, pending: deque[Any], count: int) -> None:
        """Read until `pending` holds `count` items or the stream has ended."""
        if self.ended or len(pending) >= count:
            return
        with self._randomness.active():
            while len(pending) < count:
                item = self._guarded(lambda: next(self._items, _END))
                if item is _END:
                    self.ended = True
                    break
                pending.append(item)
                self._num_read += 1
        if self._num_read == 0:
            raise DataError(
                f"the stream gave nothing in epoch {self._epoch}. A generator can be read once: "
                "pass the function that makes it. If it reads files, see that they are found."
            )

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:
            raise DataError(
                f"reading item {self._num_read} of the stream in epoch {self._epoch} failed: "
                f"{type(error).__name__}: {error}"
            ) from error


_END = object()


@dataclass(frozen=True, slots=True)
class _Gathered:
    samples: Sequence[Any]
    stream: Stream
    epoch: int
    position: int

    def __len__(self) -> int:
        return len(self.samples)

    def part(self, start: int, size: int) -> Any:
        first = self.position + start
        with generators_kept():
            seed_generators(derive(self.stream.seed, Purpose.COLLATE, self.epoch, first))
            return collated(
                self.stream.collate or collate,
                self.samples[start : start + size],
                f"samples {first} to {first + size - 1} of the stream",
            )


@dataclass(frozen=True, slots=True)
class _Ready:
    columns: Columns

    def __len__(self) -> int:
        return self.columns.length

    def part(self, start: int, size: int) -> Any:
        return self.columns.run(start, size)


def opener(data: Any, num_epochs: int) -> Open:
    """How to start an epoch of an iterable, or of a function that returns one."""
    if callable(data) and not hasattr(data, "__iter__"):
        return lambda epoch: iter(data())
    if isinstance(data, Iterator) and num_epochs > 1:
        raise ConfigError(
            f"epochs={num_epochs}, but a {type(data).__name__} can be read only once. Pass the "
            "function that makes it, and it is called for each epoch."
        )

    def read(epoch: int) -> Iterator[Any]:
        if callable(getattr(data, "set_epoch", None)):
            data.set_epoch(epoch)
        return iter(data)

    return read
