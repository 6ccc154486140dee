"""Which samples a rank reads for a step: arithmetic on positions, no data.

A step's global batch is a run of consecutive positions of the epoch. It is cut into micro-batches,
the rank owns some of them, and the order says which sample stands at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parti.data.order import Indices, Position, num_steps, permute, split
from parti.errors import DataError

Owned = Callable[[int], Sequence[int]]
"""Given how many micro-batches a step has, the numbers of those that this rank computes."""

_BLOCK = 16_384
_MAX_SHARES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of a global batch."""

    num_samples: int
    """Of the global batch."""
    num_micro_batches: int
    """Of the global batch; none is empty."""
    numbers: tuple[int, ...]
    """The micro-batches of this rank, ascending; the next two go with them."""
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    """Where each begins in the global batch."""
    offsets: Indices
    """Where each of the rank's samples lies in the global batch."""
    is_one_run: bool
    """The rank's micro-batches are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request to a source: samples of one step, to be put together into micro-batches."""

    epoch: int
    position: int
    """Where the global batch begins in the order of the epoch."""
    starts: tuple[int, ...]
    """Where each micro-batch begins in the global batch."""
    sizes: tuple[int, ...]
    indices: Indices
    """The samples of all micro-batches, one after the other."""
    is_one_run: bool
    """The micro-batches are neighbours in the global batch."""
    is_in_order: bool
    """Index and position in the epoch are the same."""

    def each(self) -> Iterator[Wanted]:
        """The same, one micro-batch at a time."""
        first = 0
        for start, size in zip(self.starts, self.sizes, strict=True):
            yield Wanted(
                epoch=self.epoch,
                position=self.position,
                starts=(start,),
                sizes=(size,),
                indices=self.indices[first : first + size],
                is_one_run=True,
                is_in_order=self.is_in_order,
            )
            first += size


class Shares:
    """Cuts batches into micro-batches and picks the rank's own. Asks who owns what every time."""

    def __init__(self, num_micro_batches: int, owned: Owned) -> None:
        self.num_micro_batches = num_micro_batches
        self._owned = owned
        self._known: dict[tuple[int, tuple[int, ...]], Share] = {}

    def of(self, num_samples: int) -> Share:
        active = min(self.num_micro_batches, num_samples)
        key = num_samples, tuple(self._owned(active))
        share = self._known.get(key)
        if share is None:
            if len(self._known) >= _MAX_SHARES:
                self._known.clear()
            share = self._known[key] = cut(num_samples, active, key[1])
        return share

    def frozen(self) -> Shares:
        """As it is now, for another process: who owns what is a table there."""
        numbers = range(1, self.num_micro_batches + 1)
        table = {active: tuple(self._owned(active)) for active in numbers}
        return Shares(self.num_micro_batches, table.__getitem__)


class Dealer:
    """Deals the steps of a data set of known length."""

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        shares: Shares,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._shares = shares
        self.num_micro_batches = shares.num_micro_batches
        self._seed = seed
        self._shuffle = shuffle
        self.steps_per_epoch = num_steps(num_samples, batch_size, drop_last=drop_last)
        self._block: Indices = np.empty((0, 0), np.int64)
        self._block_key: tuple[int, tuple[int, ...]] | None = None
        self._block_start = 0

    def positions(self, start: Position, num_epochs: int) -> Iterator[Position]:
        """Every step from `start` to the end."""
        for epoch in range(start.epoch, num_epochs):
            first = start.step_in_epoch if epoch == start.epoch else 0
            for step in range(first, self.steps_per_epoch):
                yield Position(epoch=epoch, step_in_epoch=step)

    def share(self, step: int) -> Share:
        return self._shares.of(min(self._batch_size, self._num_samples - step * self._batch_size))

    def wanted(self, epoch: int, step: int, share: Share) -> Wanted:
        return Wanted(
            epoch=epoch,
            position=step * self._batch_size,
            starts=share.starts,
            sizes=share.sizes,
            indices=self._indices(epoch, step, share),
            is_one_run=share.is_one_run,
            is_in_order=not self._shuffle,
        )

    def _indices(self, epoch: int, step: int, share: Share) -> Indices:
        first = step * self._batch_size
        if not self._shuffle:
            return share.offsets + first
        if share.num_samples < self._batch_size:
            return permute(share.offsets + first, self._num_samples, self._seed, epoch)
        row = step - self._block_start
        if self._block_key != (epoch, share.numbers) or not 0 <= row < len(self._block):
            self._order_block(epoch, step, share)
            row = 0
        chosen: Indices = self._block[row]
        return chosen

    def _order_block(self, epoch: int, step: int, share: Share) -> None:
        """Compute the order for some steps ahead: small arrays cost numpy more than they hold."""
        num_full = self._num_samples // self._batch_size
        count = min(num_full - step, max(1, _BLOCK // max(1, share.offsets.size)))
        firsts = np.arange(step, step + count, dtype=np.int64) * self._batch_size
        places = (firsts[:, None] + share.offsets).reshape(-1)
        order = permute(places, self._num_samples, self._seed, epoch)
        self._block = order.reshape(count, share.offsets.size)
        self._block_key = epoch, share.numbers
        self._block_start = step


def cut(num_samples: int, active: int, numbers: tuple[int, ...]) -> Share:
    if list(numbers) != sorted(set(numbers)) or not all(0 <= n < active for n in numbers):
        raise DataError(
            f"a rank was given the micro-batches {numbers} of {active}; expected ascending "
            f"numbers from 0 to {active - 1}."
        )
    sizes = split(num_samples, active)
    ends = np.cumsum((0, *sizes))
    runs = [np.arange(ends[n], ends[n + 1], dtype=np.int64) for n in numbers]
    return Share(
        num_samples=num_samples,
        num_micro_batches=active,
        numbers=numbers,
        sizes=tuple(sizes[n] for n in numbers),
        starts=tuple(int(ends[n]) for n in numbers),
        offsets=np.concatenate(runs) if runs else np.empty(0, np.int64),
        is_one_run=not numbers or numbers[-1] - numbers[0] == len(numbers) - 1,
    )
