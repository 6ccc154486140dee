"""How far a Trainer is in its script, for a process that comes later and runs it from the top.

Calls that the others have behind them are answered with what they gave; the call the others are in
is entered where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from parti.errors import RankMismatch
from parti.history import History

if TYPE_CHECKING:
    from parti.fitting import Fit
    from parti.trainer import Trainer

T = TypeVar("T")


class Standing:
    """The calls of one Trainer's methods, in order, with what they returned."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._done: list[tuple[str, Any]] = []
        self._ahead: list[tuple[str, Any]] = []
        """What the others have done and this process has not come to yet."""
        self._is_within = False
        self._fit: Fit | None = None
        self._fit_state: Mapping[str, Any] | None = None

    def once(self, name: str, call: Callable[[], T]) -> T:
        """Make the call, or answer it with what the others got. A call within a call is a part of
        the outer one."""
        if self._is_within:
            return call()
        self._trainer.replica.join()
        if self._ahead:
            replayed: T = self._replay(name)
            return replayed
        self._is_within = True
        try:
            result = call()
        finally:
            self._is_within = False
        self._done.append((name, result))
        return result

    def _replay(self, name: str) -> Any:
        known, result = self._ahead.pop(0)
        if known != name:
            raise RankMismatch(
                f"this process calls trainer.{name}() as its call {len(self._done) + 1}, and the "
                f"others have called trainer.{known}() there. The script must make the same calls "
                "on every process."
            )
        self._done.append((name, result))
        return result

    @property
    def came_later(self) -> bool:
        """There is a fit to go on with: this process has been given the state of others, in the
        middle of theirs, or a checkpoint has been read."""
        return self._fit_state is not None

    def resume(self, fit_state: Mapping[str, Any] | None) -> None:
        """The fit that begins next goes on with one that an earlier start of the script began."""
        self._fit_state = fit_state

    def enter(self, fit: Fit) -> None:
        """A fit begins, or goes on where another process or another start was."""
        self._fit = fit
        if self._fit_state is not None:
            fit.load_state_dict(self._fit_state)
            self._fit_state = None

    def leave(self) -> None:
        self._fit = None

    @property
    def fit(self) -> Fit | None:
        """The fit that is under way."""
        return self._fit

    def state_dict(self) -> dict[str, Any]:
        return {
            "calls": [(name, _packed(result)) for name, result in self._done],
            "fit": None if self._fit is None else self._fit.state_dict(),
            "course": self._trainer.course(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ahead = [(name, _unpacked(result)) for name, result in state["calls"]]
        self._fit_state = state["fit"]
        self._trainer.follow(state["course"])


def _packed(result: Any) -> Any:
    return {"history": result.to_json()} if isinstance(result, History) else {"value": result}


def _unpacked(packed: Mapping[str, Any]) -> Any:
    return History.from_json(packed["history"]) if "history" in packed else packed["value"]
