"""What a Trainer keeps in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.checkpoint.keeper import Keeper, facts_of
from parti.checkpoint.value import Checkpoint
from parti.data.batches import Feed
from parti.data.order import Position
from parti.engine.report import StepReport

if TYPE_CHECKING:
    from parti.trainer import Trainer


class KeptStates:
    """The checkpoints of one fit."""

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint, feed: Feed) -> None:
        self._trainer = trainer
        self._feed = feed
        self._keeper = Keeper(
            checkpoint, trainer.replica, give=trainer.kept_state, facts=self._facts
        )

    def _facts(self) -> dict[str, object]:
        trainer = self._trainer
        position = Position(epoch=trainer.epoch, step_in_epoch=trainer.step_in_epoch)
        phase = trainer.phases[-1]
        return {
            **facts_of(trainer.replica, self._feed, position),
            "phase": phase.name,
            "phase_number": phase.number,
            "phase_began": phase.began,
            "phase_first_step": phase.first_step,
            "phase_is_complete": phase.is_complete,
            "fingerprint": phase.fingerprint,
        }

    def after_step(self, report: StepReport, is_last_of_epoch: bool) -> None:
        self._keeper.after_step(
            self._trainer.step, is_last_of_epoch=is_last_of_epoch, wishes=report.wishes
        )

    def ranks_changed(self) -> None:
        self._keeper.ranks_changed()

    def finish(self) -> None:
        self._keeper.finish(self._trainer.step)

    def close(self) -> None:
        self._keeper.close()
