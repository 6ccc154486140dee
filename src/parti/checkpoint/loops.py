"""The checkpoints of a loop over `Replica.batches`: the user's own, without a Trainer."""

from __future__ import annotations

from typing import final

from parti.checkpoint.keeper import Keeper, check_resumed, facts_of, find, read
from parti.checkpoint.value import Checkpoint
from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.engine.replica import Replica


@final
class KeptLoop:
    def __init__(self, settings: Checkpoint, replica: Replica) -> None:
        self._settings = settings
        self._replica = replica
        self._keeper: Keeper | None = None
        self._position = Position()
        self._number = 0
        self._has_stepped = False
        self.feed: Feed | None = None
        replica.on_new_world(self._ranks_changed)

    def begin(self, start: Position) -> Position | None:
        loops = self._replica.loops
        if self._replica.shares_token:  # it comes into the middle of the loop, where the others are
            self._number = loops.num_saved - 1
        else:
            self._number, loops.num_saved = loops.num_saved, loops.num_saved + 1
            if self._number == 0:
                self._resume()
            if loops.resumed is not None:
                number, position = loops.resumed
                if self._number < number:
                    return None  # an earlier start has been through this loop
                if self._number == number:
                    start = position
        self._position = start
        self._keeper = Keeper(
            self._settings, self._replica, give=self._replica.saved_state, facts=self._facts
        )
        return start

    def _resume(self) -> None:
        """Load the newest good checkpoint, if there is one."""
        found = find(self._replica, self._settings, after_step=self._replica.step_number)
        if found is None:
            return
        path, facts = found
        assert self.feed is not None
        check_resumed(facts, self.feed.batch_size, self.feed.num_micro_batches, self._replica.seed)
        self._replica.load_saved_state(read(path))
        position = Position(epoch=facts["epoch"], step_in_epoch=facts["step_in_epoch"])
        self._replica.loops.resumed = facts["loop"], position

    def between(self, last: Batch) -> None:
        self._position = last.after
        self._has_stepped = True
        assert self._keeper is not None
        self._keeper.after_step(
            self._replica.step_number,
            is_last_of_epoch=last.is_last_of_epoch,
            wishes=self._replica.last_wishes,
        )

    def _ranks_changed(self) -> None:
        if self._keeper is not None:
            self._keeper.ranks_changed()

    def _facts(self) -> dict[str, object]:
        assert self.feed is not None
        return {"loop": self._number, **facts_of(self._replica, self.feed, self._position)}

    def end(self, is_through: bool) -> None:
        if self._keeper is None:
            return
        try:
            if is_through and self._has_stepped:
                self._keeper.finish(self._replica.step_number)
        finally:
            self._keeper.close()
            self._keeper = None
