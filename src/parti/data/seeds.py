"""One way to turn (seed, purpose, numbers) into a random seed. Pure integers: no generator here.

Every random state of a training program is derived, none is carried on, so that any rank can
compute any part of any step.
"""

from __future__ import annotations

from enum import IntEnum

MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """The first word of a derivation in this package.

    Fixed for ever, as they are part of the numbers a seed gives; and far above any count, so that
    they meet no derivation that starts with the number of a step.
    """

    ORDER = (1 << 48) + 1
    """The order of samples in an epoch."""
    SAMPLE = (1 << 48) + 2
    """Reading one sample: augmentation."""
    COLLATE = (1 << 48) + 3
    """Putting the samples of one micro-batch together."""
    STREAM = (1 << 48) + 4
    """Reading one epoch of a stream."""


def mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64 bits that flips half of them on average."""
    value = (value + _GOLDEN) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def derive(seed: int, *words: int) -> int:
    """A seed in [0, 2^64) for what `words` name. Any integers do; their order counts.

    For equal `seed` and leading words, different last words never collide: each round is a
    bijection of the word.
    """
    state = mix(seed & MASK_64)
    for word in words:
        state = extend(state, word)
    return state


def extend(derived: int, word: int) -> int:
    """`derive` with one word more than what gave `derived`."""
    return mix(derived ^ (word & MASK_64))
