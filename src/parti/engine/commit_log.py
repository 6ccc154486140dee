"""What a replica tells of its own course: the loops it begins, the steps it commits, and from whom
it was given the state. Who keeps that, and where, is not known here.
"""

from __future__ import annotations

from typing import Protocol

from parti.data.batches import Batch
from parti.data.order import Position


class CommitLog(Protocol):
    """Keeps the course of one replica in this process. Nothing that happens to it may stop a step,
    or take longer than a few microseconds."""

    def began(self, generation: int, step: int, at: Position) -> None:
        """A loop over batches begins: the batch at this position is for this step."""
        ...

    def joined(self, generation: int, step: int, giver: int) -> None:
        """A member has given its state to this process, which takes part from this step on."""
        ...

    def committed(
        self,
        generation: int,
        step: int,
        batch: Batch,
        *,
        first: int,
        end: int,
        num_samples: int,
        has_finished: bool,
    ) -> None:
        """A step counts. This rank has computed the micro-batches from `first` up to `end`, of so
        many samples, in the world of this generation; `has_finished` says that it has done what a
        lost rank had left undone of the update as well."""
        ...


class NoCommitLog:
    """Keeps nothing: for ranks that are threads, and where there is no directory of the run."""

    def began(self, generation: int, step: int, at: Position) -> None:
        return None

    def joined(self, generation: int, step: int, giver: int) -> None:
        return None

    def committed(
        self,
        generation: int,
        step: int,
        batch: Batch,
        *,
        first: int,
        end: int,
        num_samples: int,
        has_finished: bool,
    ) -> None:
        return None
