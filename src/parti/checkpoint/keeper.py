"""The checkpoints of one loop: when one is due, what goes into it, and where a loop begins again.

Knows of ranks only that they can agree: all of them call the same methods in the same order.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parti.checkpoint.read import facts as read_facts
from parti.checkpoint.read import load, newest_good
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer
from parti.engine.letter import Wish
from parti.errors import CheckpointError, ConfigError
from parti.launch.stopping import Stopping

if TYPE_CHECKING:
    from parti.data.batches import Feed
    from parti.data.order import Position
    from parti.engine.replica import Replica

State = Mapping[str, Any]

_LOOK_S = 0.02
_WRITE_S = 600.0
"""How long the other parts of a checkpoint may take."""


class Ranks(Protocol):
    """The part of a Replica that keeping checkpoints needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def new_token(self) -> str:
        """A name that no other loop of any job has, the same on all ranks."""
        ...

    def give_up_token(self) -> None: ...

    def ask(self, wishes: Callable[[], Wish] | None) -> None: ...

    def exchange(self, payload: bytes) -> tuple[bytes, ...]: ...


class Keeper:
    """Writes the checkpoints of one loop, and ends it when the process is asked to stop. `give`
    returns the state, in memory that may change after the call; `facts` what is told of it."""

    def __init__(
        self,
        settings: Checkpoint,
        ranks: Ranks,
        *,
        give: Callable[[], State],
        facts: Callable[[], State],
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._give = give
        self._facts = facts
        self._name = ranks.new_token()
        self._told: deque[str] = deque()
        # It raises on one rank alone; here all ranks do so together.
        quiet = dataclasses.replace(settings, on_error="warn")
        self._writer = Writer(quiet, token=self._token(), note=self._told.append)
        self._last_step = -1
        self._since_s = time.monotonic()
        self._stopping = Stopping()
        self._has_reserved = False
        ranks.ask(self._wishes)

    def _wishes(self) -> Wish:
        """What this rank wants of the step under way."""
        wishes = Wish.BUSY if self._writer.is_busy else Wish(0)
        if self._stopping.is_asked:
            wishes |= Wish.STOP
        if self._ranks.rank == 0 and self._is_overdue:
            wishes |= Wish.SAVE
        return wishes

    @property
    def _is_overdue(self) -> bool:
        """By this rank's clock, where it is the clock that decides."""
        return isinstance(self._settings.every, timedelta) and self._settings.is_due(
            step=0, is_last_of_epoch=False, seconds_since_last=time.monotonic() - self._since_s
        )

    def after_step(self, step: int, *, is_last_of_epoch: bool, wishes: Wish) -> None:
        """Write one if it is due, or wished for, and nobody still writes the one before. All
        arguments are equal on all ranks. Raises Preempted if one of them is asked to stop."""
        is_due = not isinstance(self._settings.every, timedelta) and self._settings.is_due(
            step=step, is_last_of_epoch=is_last_of_epoch, seconds_since_last=0.0
        )
        self._pass_on()
        if Wish.STOP in wishes:
            self._stop(step)
        if (is_due or Wish.SAVE in wishes) and Wish.BUSY not in wishes:
            self._raise_together()
            self._begin(step)
        elif not self._has_reserved:
            # Now that there has been a step, the optimizer has its state.
            self._writer.reserve(
                self._give(), part=self._ranks.rank, num_parts=self._ranks.world_size
            )
        self._has_reserved = True

    def _stop(self, step: int) -> None:
        problem = self._bring_to_disk(step) or ""
        raise self._stopping.has_saved(
            step, str(self._settings.path), problem, is_chief=self._ranks.rank == 0
        )

    def _begin(self, step: int) -> None:
        self._last_step, self._since_s = step, time.monotonic()
        self._writer.begin(
            self._give(),
            step=step,
            facts=self._facts(),
            part=self._ranks.rank,
            num_parts=self._ranks.world_size,
            deadline_s=_WRITE_S,
        )

    def ranks_changed(self) -> None:
        """Parts of ranks that are lost will not come: forget what is under way."""
        self._writer.abandon(token=self._token())

    def finish(self, step: int) -> None:
        """The loop has ended: the last state is on the disk when this returns. Raises Preempted if
        a rank was asked to stop meanwhile."""
        problem = self._bring_to_disk(step)
        if any(self._ranks.exchange(b"stop" if self._stopping.is_asked else b"")):
            raise self._stopping.has_saved(
                step, str(self._settings.path), problem or "", is_chief=self._ranks.rank == 0
            )

    def _bring_to_disk(self, step: int) -> str | None:
        """The state after this step. What went wrong, if anything did and is no reason to raise."""
        if step != self._last_step:
            self._raise_if_asked(self._all_settled())  # the one before
        for is_begun in (step == self._last_step, False, False):
            if not is_begun:
                self._begin(step)
            problem = self._all_settled()
            # A loss on the way makes all forget the checkpoint: then once more.
            if problem or int(self._ranks.exchange(b"%d" % (self._writer.last_step or -1))[0]) == (
                step
            ):
                break
        self._pass_on()
        self._raise_if_asked(problem)
        return problem

    def _raise_if_asked(self, problem: str | None) -> None:
        if problem and self._settings.on_error == "raise":
            raise CheckpointError(problem)

    def _all_settled(self) -> str | None:
        """Wait until nobody writes any more, together, so that a lost rank is noticed. What went
        wrong on any rank."""
        deadline_s = time.monotonic() + _WRITE_S
        while any(self._ranks.exchange(b"" if self._writer.is_settled else b"busy")):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
        return self._agreed_problem()

    def _agreed_problem(self) -> str | None:
        mine = self._writer.wait(0.0) if self._writer.is_settled else None
        return max(self._ranks.exchange((mine or "").encode())).decode() or None

    def _raise_together(self) -> None:
        if self._settings.on_error == "raise":
            self._raise_if_asked(self._agreed_problem())

    def _pass_on(self) -> None:
        """What the writing thread had to say. A warning may be an error, which it must not meet."""
        while self._told:
            _tell(self._told.popleft())

    def close(self) -> None:
        self._ranks.ask(None)
        self._ranks.give_up_token()
        self._stopping.close()
        self._writer.close(timeout_s=5.0)

    def _token(self) -> str:
        return f"{self._name}-{self._ranks.generation}"


def _tell(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def facts_of(replica: Replica, feed: Feed, position: Position) -> dict[str, object]:
    """What is told of a state beside it, whatever keeps it."""
    return {
        "step": replica.step_number,
        "epoch": position.epoch,
        "step_in_epoch": position.step_in_epoch,
        "seed": replica.seed,
        "batch_size": feed.batch_size,
        "micro_batches": feed.num_micro_batches,
        "num_samples": feed.num_samples,
        "processes": replica.world_size,
    }


def find(ranks: Ranks, settings: Checkpoint, *, after_step: int) -> tuple[Path, State] | None:
    """The newest good checkpoint behind a step, with its facts; the same on every rank."""
    told = ""
    if ranks.rank == 0:
        found = newest_good(settings.path, _tell)
        told = "" if found is None or found.step <= after_step else str(found.path)
    path = ranks.exchange(told.encode())[0].decode()
    if not path:
        return None
    return Path(path), read_facts(path)


def read(path: Path) -> State:
    """The whole state; raises if a byte is wrong."""
    state: State = load(path)
    return state


def check_same(facts: State, name: str, asked: object, remedy: str) -> None:
    """What the checkpoint was written with and what is asked for must not contradict."""
    held = facts.get(name)
    if asked is not None and held is not None and held != asked:
        raise ConfigError(
            f"{name}={asked!r} is asked for, but the checkpoint at step {facts.get('step')} was "
            f"written with {name}={held!r}. {remedy}"
        )


def check_resumed(
    facts: State, batch_size: int | None, micro_batches: int | None, seed: int
) -> None:
    """Refuse to go on with another program than the one that the checkpoint comes from."""
    other = "Ask for the same, or begin anew in another directory."
    check_same(facts, "seed", seed, other)
    check_same(facts, "micro_batches", micro_batches, other)
    if facts["step_in_epoch"]:
        check_same(facts, "batch_size", batch_size, f"It stands in the middle of an epoch. {other}")
