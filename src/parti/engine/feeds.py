"""Which loop over batches a replica is in, so that a process that comes later finds its place.

Such a process runs the script from the top. A loop is known by the line of the script it stands on
and by how often it has been entered; loops that the others have behind them are empty for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from parti.data.batches import Batch, Feed
from parti.data.order import Position
from parti.errors import ConfigError


class Kept(Protocol):
    """Something with a state that is part of the training."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SavedLoop(Protocol):
    """What keeps a loop's states in checkpoints."""

    feed: Feed | None

    def begin(self, start: Position) -> Position | None:
        """Where the loop begins: at `start`, or where a checkpoint says; None if it is over."""
        ...

    def between(self, last: Batch) -> None:
        """After a step."""
        ...

    def end(self, is_through: bool) -> None: ...


class SavesLoops(Protocol):
    """A value that says where and how often (`parti.Checkpoint`)."""

    def loop(self, replica: Any) -> SavedLoop: ...


def check_checkpoint(given: object) -> None:
    """Refuse a directory where a value that says more is expected."""
    if given is not None and not hasattr(given, "loop"):
        raise ConfigError(
            f"checkpoint={given!r}; expected parti.Checkpoint(directory), which also says how "
            "often one is written (every=) and how many are kept (keep=)."
        )


class NothingSaved:
    """No checkpoints are asked for."""

    feed: Feed | None = None

    def begin(self, start: Position) -> Position | None:
        return start

    def between(self, last: Batch) -> None:
        return None

    def end(self, is_through: bool) -> None:
        return None


class Feeds:
    def __init__(self) -> None:
        self._entered: dict[str, int] = {}
        self._last_step = 0
        self._current: tuple[str, int, int, int] | None = None
        """The loop that steps are taken in: its place, the how-manieth time, epoch and step."""
        self._target: Feeds | None = None
        """Where the others are; None when this rank is with them."""
        self.num_saved = 0
        """How many loops with checkpoints have been entered."""
        self.resumed: tuple[int, Position] | None = None
        """The number of the loop that a checkpoint was written in, and where."""

    def begin(self, place: str, start: Position) -> Position | None:
        """A loop is entered: where it begins, None if it is over already."""
        nth = self._entered[place] = self._entered.get(place, 0) + 1
        target = self._target
        if target is None or target._current is None:
            return start
        there, their_nth, epoch, step = target._current
        if (place, nth) != (there, their_nth):
            return None
        self._entered, self._target = target._entered, None
        return Position(epoch=epoch, step_in_epoch=step)

    def between(self, place: str, following: Position, steps: int) -> bool:
        """After a batch: whether a step was taken with it, so that others may join here."""
        if steps == self._last_step:
            return False
        self._last_step = steps
        nth = self._entered[place]
        self._current = (place, nth, following.epoch, following.step_in_epoch)
        return True

    def arrive(self) -> None:
        """The state taken in is that of the others; this rank is at its first loop."""
        target = Feeds()
        target._entered, target._current = self._entered, self._current
        self._entered, self._target = {}, target

    def state_dict(self) -> dict[str, Any]:
        return {
            "entered": dict(self._entered),
            "current": self._current,
            "last_step": self._last_step,
            "num_saved": self.num_saved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entered = dict(state["entered"])
        self._current = state["current"]
        self._last_step = state["last_step"]
        self.num_saved = state["num_saved"]


def place_of_caller() -> str:
    """File and line of the code that called the caller."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
