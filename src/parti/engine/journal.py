"""How far each rank is with its part of an update, where its neighbours can read it.

An update changes weights and optimizer state in place, piece by piece. A rank that is killed in the
middle leaves one piece half changed: so before a piece changes, its state is copied to a log that
the neighbours map, too. Its weights need no log, since the neighbours hold them until they are
handed out. Whoever takes the place of the lost rank goes on from here, and writes on in the same
journal, so that a third could take over from it.

x86-64 makes stores visible in program order, and a process that is killed has made all stores
before some point and none after: a word says that everything before it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from parti.comm.protocol import Neighbours

_TOKEN, _LOGGED, _UPDATED, _HANDED = range(4)
_WORDS_BYTES = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Numbers of pieces, counted from the first."""

    logged: int
    updated: int
    handed: int


class Journal(Protocol):
    def begin(self, token: int) -> None:
        """My update of the step with this token begins."""
        ...

    def log(self, owner: int, piece: int, state: Sequence[torch.Tensor]) -> None:
        """Piece number `piece` of the owner is about to change; this is its state."""
        ...

    def updated(self, owner: int, piece: int) -> None: ...

    def handed(self, owner: int, piece: int) -> None: ...

    def progress(self, owner: int, token: int) -> Progress | None:
        """How far it is; None if it has not begun with this step."""
        ...

    def adopt(self, owner: int, token: int) -> None:
        """Begin in the owner's place."""
        ...

    def restore(self, owner: int, state: Sequence[torch.Tensor]) -> None:
        """Put the state of the piece logged last back."""
        ...


class NoJournal:
    """For who cannot be replaced: a rank that is alone, or a job without recovery."""

    def begin(self, token: int) -> None:
        return None

    def log(self, owner: int, piece: int, state: Sequence[torch.Tensor]) -> None:
        return None

    def updated(self, owner: int, piece: int) -> None:
        return None

    def handed(self, owner: int, piece: int) -> None:
        return None

    def progress(self, owner: int, token: int) -> Progress | None:
        raise AssertionError("nobody's place is taken without a journal")

    def adopt(self, owner: int, token: int) -> None:
        raise AssertionError("nobody's place is taken without a journal")

    def restore(self, owner: int, state: Sequence[torch.Tensor]) -> None:
        raise AssertionError("nobody's place is taken without a journal")


class SharedJournal:
    """A few words and a log of one piece for each neighbour."""

    def __init__(self, neighbours: Neighbours, log_bytes: int) -> None:
        region = neighbours.allocate(_WORDS_BYTES + log_bytes)
        self._me = neighbours.index
        self._words = [
            view[:_WORDS_BYTES].numpy().data.cast("B").cast("q") for view in region.views
        ]
        self._logs = [view[_WORDS_BYTES:] for view in region.views]

    def begin(self, token: int) -> None:
        self.adopt(self._me, token)

    def adopt(self, owner: int, token: int) -> None:
        words = self._words[owner]
        words[_TOKEN] = 0
        words[_LOGGED] = words[_UPDATED] = words[_HANDED] = 0
        words[_TOKEN] = token

    def log(self, owner: int, piece: int, state: Sequence[torch.Tensor]) -> None:
        log, start = self._logs[owner], 0
        for each in state:
            log[start : start + each.numel()].copy_(each)
            start += each.numel()
        self._words[owner][_LOGGED] = piece + 1

    def restore(self, owner: int, state: Sequence[torch.Tensor]) -> None:
        log, start = self._logs[owner], 0
        for each in state:
            each.copy_(log[start : start + each.numel()])
            start += each.numel()

    def updated(self, owner: int, piece: int) -> None:
        self._words[owner][_UPDATED] = piece + 1

    def handed(self, owner: int, piece: int) -> None:
        self._words[owner][_HANDED] = piece + 1

    def progress(self, owner: int, token: int) -> Progress | None:
        words = self._words[owner]
        if words[_TOKEN] != token:
            return None
        return Progress(words[_LOGGED], words[_UPDATED], words[_HANDED])
