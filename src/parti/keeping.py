"""What a Trainer keeps in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.checkpoint.keeper import Keeper
from parti.checkpoint.value import Checkpoint
from parti.data.batches import Feed
from parti.engine.letter import Wish
from parti.engine.report import StepReport

if TYPE_CHECKING:
    from parti.trainer import Trainer


class NothingKept:
    """No checkpoints are asked for."""

    def wishes(self) -> Wish:
        return Wish(0)

    def after_step(self, report: StepReport, is_last_of_epoch: bool) -> None:
        return None

    def ranks_changed(self) -> None:
        return None

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None


class KeptStates:
    """The checkpoints of one fit."""

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint, feed: Feed) -> None:
        self._trainer = trainer
        self._feed = feed
        self._keeper = Keeper(
            checkpoint, trainer.replica, give=trainer.kept_state, facts=self._facts
        )

    def _facts(self) -> dict[str, object]:
        trainer, feed = self._trainer, self._feed
        return {
            "step": trainer.step,
            "epoch": trainer.epoch,
            "step_in_epoch": trainer.step_in_epoch,
            "seed": trainer.strategy.seed,
            "batch_size": feed.batch_size,
            "micro_batches": feed.num_micro_batches,
            "num_samples": feed.num_samples,
            "processes": trainer.replica.world_size,
        }

    def wishes(self) -> Wish:
        """What this rank wants of the step that begins."""
        return self._keeper.wishes()

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
