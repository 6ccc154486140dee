"""The order of samples as arithmetic: pure functions of (seed, epoch, position), no state.

Knows nothing of data, ranks or torch. A shuffled epoch is a keyed bijection on [0, n), evaluated
only at the positions that are asked for, so its memory does not grow with the data set, and
resuming or resizing needs no replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parti.data.seeds import Purpose, derive, mix
from parti.errors import ConfigError

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

MAX_SAMPLES = 1 << 62
_SMALL_DOMAIN_BITS = 12
_ROUNDS, _ROUNDS_SMALL = 8, 24
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF_WORD = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the training program: the next step is `step_in_epoch` of `epoch`."""

    epoch: int = 0
    step_in_epoch: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step_in_epoch < 0:
            raise ConfigError(
                f"Position(epoch={self.epoch}, step_in_epoch={self.step_in_epoch}) lies before "
                "the start; both count from 0."
            )

    @classmethod
    def at(cls, global_step: int, steps_per_epoch: int) -> Position:
        """The position after `global_step` steps."""
        epoch, step = divmod(global_step, steps_per_epoch)
        return cls(epoch=epoch, step_in_epoch=step)

    def global_step(self, steps_per_epoch: int) -> int:
        """How many steps lie before this position."""
        return self.epoch * steps_per_epoch + self.step_in_epoch


def num_steps(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Steps in one epoch. The last batch may be short, or is left out with `drop_last`."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


@lru_cache(maxsize=256)
def split(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most, the larger first; never more parts than samples."""
    active = min(num_parts, num_samples)
    if active <= 0:
        return ()
    size, larger = divmod(num_samples, active)
    return (size + 1,) * larger + (size,) * (active - larger)


def default_micro_batches(batch_size: int) -> int:
    """The largest power of two up to batch_size / 32, from 2 to 8; 1 for less than 4 samples.

    A function of the batch size alone: the number of processes must not change the program. Two at
    least, so that a second process has work also where a few samples are a lot of it.
    """
    least = 2 if batch_size >= 4 else 1
    return min(8, max(least, 1 << max(0, (batch_size // 32).bit_length() - 1)))


def permute(indices: NDArray[np.integer], n: int, seed: int, epoch: int) -> Indices:
    """Which sample stands at each position of a shuffled epoch: a keyed bijection on [0, n).

    A Feistel network over the next power of two. A value that lands outside [0, n) is sent
    through again until it lands inside (cycle walking), which keeps the map a bijection.
    """
    if not 0 < n <= MAX_SAMPLES:
        raise ConfigError(f"an order of {n} samples was asked for; expected 1 to 2^62.")
    bits = max(2, (n - 1).bit_length())
    keys = _round_keys(seed, epoch, _ROUNDS_SMALL if bits <= _SMALL_DOMAIN_BITS else _ROUNDS)
    values = _encrypt(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        again = _encrypt(values[outside], bits, keys)
        values[outside] = again
        outside = outside[again >= n]
    return values.view(np.int64)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int, rounds: int) -> tuple[tuple[np.uint64, np.uint64], ...]:
    first = derive(seed, Purpose.ORDER, epoch)
    words = [mix(first ^ number) for number in range(2 * rounds)]
    return tuple(
        (np.uint64(factor | 1), np.uint64(term))
        for factor, term in zip(words[::2], words[1::2], strict=True)
    )


def _encrypt(values: _Words, bits: int, keys: tuple[tuple[np.uint64, np.uint64], ...]) -> _Words:
    """One pass of the network over [0, 2^bits), in place.

    The halves take turns: each is xored with the top bits of a keyed multiplicative hash of the
    other. Eight rounds pass the tests that numpy's shuffle passes; in domains under 4,096 the
    hashes have few bits to work with, and it takes 24 until all orders come equally often.
    """
    low_bits = np.uint64(bits // 2)
    high_shift, low_shift = np.uint64(64 - (bits - bits // 2)), np.uint64(64 - bits // 2)
    high = values >> low_bits
    low = values & np.uint64((1 << (bits // 2)) - 1)
    for number, (factor, term) in enumerate(keys):
        hashed = (low if number % 2 == 0 else high) * factor
        hashed += term
        hashed ^= hashed >> _HALF_WORD
        hashed *= _MULTIPLIER
        if number % 2 == 0:
            hashed >>= high_shift
            high ^= hashed
        else:
            hashed >>= low_shift
            low ^= hashed
    high <<= low_bits
    high |= low
    return high
