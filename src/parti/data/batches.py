"""The feed: an iterable of global batches, of which it holds the micro-batches of one rank.

Ties together what the other files do: `settings` (what is asked), `kinds` (what the data is),
`dealing` (which samples), a source or a stream (reading them), `workers` (in which process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from parti.data.columns import Columns
from parti.data.dealing import Dealer, Owned, Share, Shares, cut
from parti.data.kinds import is_stream, source_of
from parti.data.order import Position
from parti.data.samples import Source
from parti.data.settings import Asked, FeedSettings, settle, unwrap
from parti.data.streams import ReadyBatches, Stream, StreamStep, opener
from parti.data.workers import ReadAhead, stream_ahead
from parti.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A fixed slice of a global batch, with its data."""

    number: int
    num_samples: int
    data: Any


Read = Callable[[tuple[int, ...]], tuple[MicroBatch, ...]]
"""From numbers, ascending, to the micro-batches."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch, as one rank sees it: all of its numbers, its own part of the data."""

    step_in_epoch: int
    epoch: int
    num_samples: int
    """Over all ranks."""
    num_micro_batches: int
    """Over all ranks; none is empty."""
    micro_batches: tuple[MicroBatch, ...]
    """Of this rank, in ascending order; a spare rank has none."""
    is_last_of_epoch: bool
    read: Read = field(repr=False, compare=False)
    """Reads other micro-batches of this batch."""

    @property
    def after(self) -> Position:
        """Of the batch that follows."""
        if self.is_last_of_epoch:
            return Position(epoch=self.epoch + 1)
        return Position(epoch=self.epoch, step_in_epoch=self.step_in_epoch + 1)

    def pieces(self, numbers: tuple[int, ...]) -> tuple[MicroBatch, ...]:
        """These micro-batches, in ascending order. What was dealt to another rank when the batch
        was made is read now."""
        if numbers == tuple([piece.number for piece in self.micro_batches]):
            return self.micro_batches
        held = {piece.number: piece for piece in self.micro_batches}
        missing = tuple([number for number in numbers if number not in held])
        if missing:
            held |= {piece.number: piece for piece in self.read(missing)}
        return tuple([held[number] for number in numbers])


class Gate(Protocol):
    """Stands before every batch of a feed."""

    def begin(self, start: Position) -> Position | None:
        """Where to begin; None where this feed is over already, for a rank that came later."""
        ...

    def reads(self, is_reading: bool) -> None:
        """The next batch is waited for, or has come."""
        ...

    def between(self, last: Batch) -> None:
        """After a batch, before the next is dealt."""
        ...

    def end(self, is_through: bool) -> None:
        """The loop has come to its end, or is left."""
        ...


class OpenGate:
    """Begins where it is told, and stops nobody."""

    def begin(self, start: Position) -> Position | None:
        return start

    def reads(self, is_reading: bool) -> None:
        return None

    def between(self, last: Batch) -> None:
        return None

    def end(self, is_through: bool) -> None:
        return None


class Feed:
    """The batches of a data set, in one order for any number of ranks.

    Iterating starts at `start` each time. The same settings and the same data give the same
    batches; `owned` decides which part of each this rank holds, and may change between steps.

    Data in memory is read in this process. With `workers`, other data is read ahead by that many
    processes; a stream can only be read by one.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        owned: Owned,
        micro_batches: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        workers: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        start: Position | None = None,
        gate: Gate | None = None,
    ) -> None:
        asked = Asked(
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
        )
        data, asked, loader_workers = unwrap(data, asked)
        self._settings = settle(
            asked,
            micro_batches=micro_batches,
            epochs=epochs,
            seed=seed,
            start=start,
            workers=loader_workers,
        )
        self._shares = Shares(self._settings.num_micro_batches, owned)
        self._gate: Gate = gate or OpenGate()
        self._reader: _Indexed | _Streamed
        if is_stream(data):
            self._reader = _Streamed(_stream(data, self._settings), self._shares, self._settings)
        else:
            source = source_of(data, seed=self._settings.seed, collate=self._settings.collate)
            self._reader = _Indexed(source, self._shares, self._settings)

    @property
    def batch_size(self) -> int:
        return self._settings.batch_size

    @property
    def num_micro_batches(self) -> int:
        return self._settings.num_micro_batches

    @property
    def num_epochs(self) -> int:
        return self._settings.num_epochs

    @property
    def start(self) -> Position:
        return self._settings.start

    @property
    def num_samples(self) -> int | None:
        """In the data set; None for a stream."""
        return self._reader.num_samples

    def fingerprint(self) -> str | None:
        """Of the data, where they are in memory."""
        return self._reader.fingerprint()

    @property
    def steps_per_epoch(self) -> int | None:
        """None for a stream."""
        return self._reader.steps_per_epoch

    @property
    def num_steps(self) -> int | None:
        """In all epochs, also those before `start`; None for a stream."""
        steps = self._reader.steps_per_epoch
        return None if steps is None else steps * self._settings.num_epochs

    def __len__(self) -> int:
        """How many batches iterating gives."""
        steps = self._reader.steps_per_epoch
        if steps is None:
            raise TypeError("the length of a stream is not known before it has been read.")
        done = self._settings.start.global_step(steps)
        return steps * self._settings.num_epochs - done

    def __iter__(self) -> Iterator[Batch]:
        start = self._gate.begin(self._settings.start)
        if start is None:
            return
        is_through = False
        try:
            batches = self._reader.batches(start)
            while True:
                self._gate.reads(True)
                batch = next(batches, None)
                self._gate.reads(False)
                if batch is None:
                    break
                yield batch
                self._gate.between(batch)
            is_through = True
        finally:
            self._gate.end(is_through)


class _Indexed:
    """Feeds from a source of known length."""

    def __init__(self, source: Source, shares: Shares, settings: FeedSettings) -> None:
        self._source = source
        self._settings = settings
        self._dealer = Dealer(
            num_samples=source.length,
            batch_size=settings.batch_size,
            shares=shares,
            seed=settings.seed,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
        )
        self.num_samples: int | None = source.length
        self.steps_per_epoch: int | None = self._dealer.steps_per_epoch
        if self._dealer.steps_per_epoch == 0:
            raise ConfigError(
                f"batch_size={settings.batch_size} with drop_last leaves no batch of a data set of "
                f"{source.length} samples. Take a smaller batch_size, or drop_last=False."
            )
        if settings.start.step_in_epoch > self._dealer.steps_per_epoch:
            raise ConfigError(
                f"start={settings.start} lies behind the end of the epoch, which has "
                f"{self._dealer.steps_per_epoch} steps. Are batch_size={settings.batch_size} and "
                "the data the same as before?"
            )

    def fingerprint(self) -> str | None:
        return self._source.fingerprint() if isinstance(self._source, Columns) else None

    def batches(self, start: Position) -> Iterator[Batch]:
        ahead: ReadAhead | None = None
        dealer, settings = self._dealer, self._settings
        # in memory there is nothing to wait for, and sending data on costs more than reading it
        if settings.workers.num_workers and not isinstance(self._source, Columns):
            ahead = ReadAhead(self._source, dealer, settings.num_epochs, settings.workers)
        try:
            for position in dealer.positions(start, settings.num_epochs):
                epoch, step = position.epoch, position.step_in_epoch
                share = dealer.share(step)
                if ahead is not None:
                    parts: Sequence[Any] = ahead.parts(position, share)
                else:
                    parts = self._source.fetch(dealer.wanted(epoch, step, share))
                is_last = step == dealer.steps_per_epoch - 1
                yield _batch(position, share, parts, is_last, self._reader(position, share))
        finally:
            if ahead is not None:
                ahead.close()

    def _reader(self, position: Position, share: Share) -> Read:
        def read(numbers: tuple[int, ...]) -> tuple[MicroBatch, ...]:
            others = cut(share.num_samples, share.num_micro_batches, numbers)
            wanted = self._dealer.wanted(position.epoch, position.step_in_epoch, others)
            return _pieces(others, self._source.fetch(wanted))

        return read


class _Streamed:
    """Feeds from a stream."""

    num_samples: int | None = None
    steps_per_epoch: int | None = None

    def __init__(self, stream: Stream, shares: Shares, settings: FeedSettings) -> None:
        self._stream = stream
        self._shares = shares
        self._settings = settings
        if settings.workers.num_workers > 1:
            raise ConfigError(
                f"workers={settings.workers.num_workers}, but a stream has to be read in order, by "
                "one process. Take workers=1 to have it read ahead, or a data set that can be "
                "indexed."
            )

    def fingerprint(self) -> str | None:
        return None

    def batches(self, start: Position) -> Iterator[Batch]:
        if self._settings.workers.num_workers:
            steps = stream_ahead(self._stream, self._shares, start, self._settings.workers)
        else:
            steps = self._stream.steps(self._shares, start)
        for step in steps:
            yield _batch(step.position, step.share, step.parts, step.is_last, self._reader(step))

    def _reader(self, step: StreamStep) -> Read:
        def read(numbers: tuple[int, ...]) -> tuple[MicroBatch, ...]:
            others = cut(step.share.num_samples, step.share.num_micro_batches, numbers)
            if step.group is not None:
                runs = zip(others.starts, others.sizes, strict=True)
                return _pieces(others, [step.group.part(begin, size) for begin, size in runs])
            # A worker process has read it, and kept what was this rank's: once more from the start.
            shares = Shares(self._shares.num_micro_batches, lambda active: numbers)
            again = next(self._stream.steps(shares, step.position))
            return _pieces(again.share, again.parts)

        return read


def _pieces(share: Share, parts: Iterable[Any]) -> tuple[MicroBatch, ...]:
    return tuple(map(MicroBatch, share.numbers, share.sizes, parts))


def _batch(
    position: Position, share: Share, parts: Iterable[Any], is_last: bool, read: Read
) -> Batch:
    return Batch(
        step_in_epoch=position.step_in_epoch,
        epoch=position.epoch,
        num_samples=share.num_samples,
        num_micro_batches=share.num_micro_batches,
        micro_batches=_pieces(share, parts),
        is_last_of_epoch=is_last,
        read=read,
    )


def _stream(data: Any, settings: FeedSettings) -> Stream:
    holds_batches = isinstance(data, ReadyBatches)
    if holds_batches and settings.collate is not None:
        raise ConfigError("collate= puts samples together, but ReadyBatches are batches already.")
    return Stream(
        open=opener(data.batches if holds_batches else data, settings.num_epochs),
        holds_batches=holds_batches,
        batch_size=settings.batch_size,
        drop_last=settings.drop_last,
        num_epochs=settings.num_epochs,
        seed=settings.seed,
        collate=settings.collate,
    )
