"""What every rank tells every other at the end of backward, as bytes. Pure.

One exchange carries it all: what was computed, the sums and counts of the losses, which parameters
were reached, the sums of buffers, and what the caller wants counted with the step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

from parti.errors import RankMismatch

_HEAD = struct.Struct("<qqqqqq")
_EVERYTHING_USED = b""


class Wish(IntFlag):
    """What a rank may want to happen at the end of a step. All ranks learn of it in that step, so
    all of them do it there."""

    JOIN = 1
    """Let those in who have come; rank 0 says so."""
    SAVE = 2
    """Write a checkpoint."""
    STOP = 4
    """End the training, as the process is to end."""
    BUSY = 8
    """Write none now: the one before is still being written."""


@dataclass(frozen=True, slots=True)
class Letter:
    step: int
    num_samples: int
    tallies: tuple[tuple[float, float], ...]
    """(sum of losses, count) of each of my micro-batches, in order."""
    used: bytes
    """One byte a parameter, 1 where a gradient was made; empty where all were."""
    buffers: bytes
    carried: bytes = b""
    """What the caller adds; it counts if the step does."""
    wishes: int = 0
    """What this rank wants to follow from the step (`Wish`)."""


def write(letter: Letter) -> bytes:
    numbers = [number for tally in letter.tallies for number in tally]
    return b"".join(
        (
            _HEAD.pack(
                letter.step,
                letter.num_samples,
                len(numbers),
                len(letter.used),
                len(letter.buffers),
                letter.wishes,
            ),
            struct.pack(f"<{len(numbers)}d", *numbers),
            letter.used,
            letter.buffers,
            letter.carried,
        )
    )


def read(data: bytes) -> Letter:
    step, num_samples, num_numbers, num_used, num_buffers, wishes = _HEAD.unpack_from(data)
    numbers = struct.unpack_from(f"<{num_numbers}d", data, _HEAD.size)
    start = _HEAD.size + 8 * num_numbers
    return Letter(
        step,
        num_samples,
        tuple(zip(numbers[::2], numbers[1::2], strict=True)),
        data[start : start + num_used],
        data[start + num_used : start + num_used + num_buffers],
        data[start + num_used + num_buffers :],
        wishes,
    )


def check_agreement(letters: Sequence[Letter]) -> None:
    """All ranks must be at the same step over the same batch."""
    first = letters[0]
    for rank, letter in enumerate(letters):
        if (letter.step, letter.num_samples) != (first.step, first.num_samples):
            raise RankMismatch(
                f"rank 0 is at step {first.step} with a batch of {first.num_samples} samples, rank "
                f"{rank} at step {letter.step} with {letter.num_samples}. Every process must run "
                "the same steps over the same data."
            )


def join_used(letters: Sequence[Letter], num_parameters: int) -> list[bool] | None:
    """Which parameters any micro-batch reached; None for all of them.

    A rank without micro-batches reached none and has no say.
    """
    masks = [letter.used for letter in letters if letter.tallies]
    if not all(masks) or not masks:
        return None
    joined = [any(column) for column in zip(*masks, strict=True)]
    assert len(joined) == num_parameters
    return None if all(joined) else joined
