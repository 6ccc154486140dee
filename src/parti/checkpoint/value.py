"""`Checkpoint`: where, how often and how many, as the user says it.

Checked when it is constructed. Knows no files: whether the directory can be written to is found by
the process that writes there.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parti.errors import ConfigError

if TYPE_CHECKING:
    from parti.engine.feeds import SavedLoop
    from parti.engine.replica import Replica


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write the training state to `directory`, in the background, while training goes on.

    `every`: a number of steps, "epoch", or a `timedelta`. `keep`: how many good checkpoints stay.
    `on_error`: "warn" says what went wrong and trains on; "raise" ends the training.
    """

    directory: str | Path
    _: KW_ONLY
    every: int | Literal["epoch"] | timedelta = "epoch"
    keep: int = 3
    on_error: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise ConfigError(f"directory={self.directory!r}; expected the path of a directory.")
        if not _is_interval(self.every):
            raise ConfigError(
                f"every={self.every!r}; expected a number of steps (1 or more), 'epoch', or a "
                f"datetime.timedelta above zero."
            )
        if not _is_count(self.keep):
            raise ConfigError(f"keep={self.keep!r}; expected how many checkpoints stay, 1 or more.")
        if self.on_error not in ("warn", "raise"):
            raise ConfigError(
                f"on_error={self.on_error!r}; expected 'warn' (say so and train on) or 'raise'."
            )

    @property
    def path(self) -> Path:
        """The directory, absolute: a script may change its working directory."""
        return Path(self.directory).expanduser().absolute()

    def loop(self, replica: Replica) -> SavedLoop:
        """For a loop of the user's own; `Replica.batches` asks for it."""
        from parti.checkpoint.loops import KeptLoop

        return KeptLoop(self, replica)

    def is_due(self, *, step: int, is_last_of_epoch: bool, seconds_since_last: float) -> bool:
        """Whether a checkpoint is to be written after this step.

        With a `timedelta`, clocks decide: let one rank ask and tell the others.
        """
        if isinstance(self.every, timedelta):
            return seconds_since_last >= self.every.total_seconds()
        if self.every == "epoch":
            return is_last_of_epoch
        return step % self.every == 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_interval(value: object) -> bool:
    if isinstance(value, timedelta):
        return value > timedelta(0)
    return value == "epoch" or _is_count(value)
