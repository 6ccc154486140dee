"""Exchanges between hosts that all of those who are left have been through, or none.

Within a host an exchange is complete for all or for nobody: everyone reads the same counters. Over
connections it is not: when a host vanishes, some have all letters and go on, others miss one. So
who is left compares notes in the next world, before anything else: whoever misses the last exchange
gets its letters from one who has them, and goes on as if it had never failed. At most one exchange
is open, as nobody begins the next before all have sent their letter of this one.

The exchange before a step counts, its *commit*, asks for more: one who is gone may have been
through it, and have counted the step. It can only have been if all had come to it. So if all who
are left wait in a commit, they take it as passed: then a step is counted by the world it was
computed in, or by nobody before the next world computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from parti.errors import PeerLost


class Transport(Protocol):
    """What ranks exchange letters through."""

    def exchange(self, payload: bytes) -> tuple[bytes, ...]: ...


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What a process tells of itself in a new world."""

    number: int
    """How many exchanges it has been through."""
    waits_to_commit: bool


_encode = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(Note).decode
_decode_letters = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


class Ledger:
    """What one process has exchanged, over all its worlds."""

    def __init__(self) -> None:
        self._number = 0
        self._letters: tuple[bytes, ...] = ()
        """Of the last exchange."""
        self._waits_to_commit = False
        self._has_been_through = False
        """The exchange that failed last, as the notes tell."""

    def exchange(
        self,
        through: Transport,
        payload: bytes,
        *,
        commits: bool,
        go_on: Callable[[PeerLost], object],
    ) -> tuple[bytes, ...]:
        """Everyone's letters. `go_on` forms the next world, and compares notes there."""
        self._waits_to_commit = commits
        try:
            letters = through.exchange(payload)
        except PeerLost as lost:
            self._has_been_through = False
            go_on(lost)
            if not self._has_been_through:
                raise
        else:
            self._number, self._letters = self._number + 1, letters
        finally:
            self._waits_to_commit = False
        return self._letters

    def compare(self, through: Transport, is_new: tuple[bool, ...], rank: int) -> None:
        """The first thing in every world. `is_new` tells, for each rank, who has just come."""
        mine = Note(self._number, self._waits_to_commit)
        notes = [_decode_note(each) for each in through.exchange(_encode(mine))]
        old = [note for note, new in zip(notes, is_new, strict=True) if not new]
        last = max(note.number for note in old)
        if all(note.number == last and note.waits_to_commit for note in old):
            last += 1
            self._letters = ()
        elif any(note.number < last for note in old):
            giver = next(
                other
                for other, note in enumerate(notes)
                if note.number == last and not is_new[other]
            )
            given = through.exchange(_encode(self._letters) if rank == giver else b"")[giver]
            if mine.number < last:
                self._letters = _decode_letters(given)
        # Who comes anew takes over the number, and what it waited for in an older world is over.
        if mine.number < last and not is_new[rank]:
            self._has_been_through = True
        self._number = last
