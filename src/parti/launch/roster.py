"""The workers of one host as a membership: what they say on their lines goes in, and what
`parti.elastic.membership` decides is carried out.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import assert_never

from parti.elastic import membership
from parti.elastic.membership import (
    Action,
    Activate,
    Call,
    Died,
    End,
    Entered,
    Event,
    Here,
    Start,
    Tell,
)
from parti.launch import events
from parti.launch.control import Activated, Called, FromWorker, HasEntered, HasLost, IsHere, Refused
from parti.launch.events import Events
from parti.launch.failure import signal_name
from parti.launch.spawn import Worker


class Roster:
    """Who takes part on this host. It has no say before the first world has settled: until then a
    lost worker is the end of the job."""

    def __init__(
        self,
        wanted: int,
        *,
        num_spares: int,
        start: Callable[[int, int], None],
        stand_by: Callable[[int], None],
        show: Callable[[int], None],
        note: Callable[[str], None],
        record: Events,
    ) -> None:
        """`start(member, rank)` starts a replacement, `stand_by(member)` a spare, `show(member)`
        brings its output to the console."""
        self._roll = membership.begin(wanted, num_spares)
        self._workers: dict[int, Worker] = {}
        self._seats: dict[int, int] = {}
        """The rank that each process was started for."""
        self._start = start
        self._stand_by = stand_by
        self._show = show
        self._note = note
        self._record = record
        self._has_settled = False
        self._lost_reports: list[tuple[int, int]] = []
        self.patience_s = 60.0
        self.end: str | None = None
        """Why the job cannot go on."""

    def add(self, worker: Worker) -> None:
        self._workers[worker.member] = worker
        self._seats[worker.member] = worker.rank

    def hear(self, worker: Worker) -> None:
        """A worker has said something."""
        self._listen(worker)
        self._answer_lost()

    def _listen(self, worker: Worker) -> None:
        for message in worker.control.receive() or ():
            self._take(worker, message)

    def _take(self, worker: Worker, message: FromWorker) -> None:
        match message:
            case IsHere():
                self.patience_s = message.patience_s
                self._advance(Here(worker.member))
            case HasEntered():
                self._has_settled = True
                self._advance(Entered(worker.member, message.generation))
            case HasLost():
                self._lost_reports.append((worker.member, message.generation))
            case _:
                assert_never(message)

    def takes(self, worker: Worker) -> str | None:
        """How the job goes on without a worker that has ended, in words; None if it does not.

        One that is killed is lost. One that ends by itself has a reason that the others would meet
        as well, unless it is a replacement that has no part in the training yet.
        """
        # What was said before this death comes first: a world may have settled just before it.
        for each in self._workers.values():
            self._listen(each)
        code = worker.exit_code
        is_part = worker.member in self._roll.holders
        next_member = self._roll.next_member
        if (
            code is None
            or worker.is_ended_by_us
            or not self._has_settled
            or (is_part and code >= 0)
        ):
            self._answer_lost()
            return None
        self._advance(Died(worker.member))
        if self.end is not None:
            return None
        what = f"rank {worker.rank}" if is_part else f"the replacement for rank {worker.rank}"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if worker.stuck is not None:
            how = f"{worker.stuck}; it was killed"
        left = len(self._roll.holders)
        others = "1 process goes" if left == 1 else f"{left} processes go"
        step = worker.control.board.step
        at = f" at step {step}" if is_part and step >= 0 else ""
        follows = ", another is started" if self._roll.next_member > next_member else ""
        return f"{what} (process {worker.process.pid}) {how}{at}; {others} on{follows}"

    def watched(self) -> list[Worker]:
        """Those whose standing still would hold up the others."""
        if not self._has_settled:
            return []
        return [self._workers[each] for each in {*self._roll.holders, *self._roll.called}]

    def failed_to_start(self, member: int) -> None:
        """A process that was to be started could not be."""
        self._advance(Died(member))

    def _give_up(self, member: int) -> None:
        """Another takes its place: if it lives, it has no part in the training any more."""
        worker = self._workers.get(member)
        if worker is not None and worker.is_alive:
            worker.is_replaced = True
            worker.signal(signal.SIGKILL)

    def is_needless(self, worker: Worker) -> bool:
        """It waits for a place in a training that the others have finished."""
        is_over = self.end is not None or not self._has_settled
        return not is_over and worker.member not in self._roll.holders

    def _advance(self, event: Event) -> None:
        before = self._roll
        self._roll, actions = membership.advance(before, event)
        if isinstance(event, Entered) and self._roll is not before:
            self._record.tell(events.Settled(generation=event.generation))
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Call():
                self._record.tell(
                    events.Called(
                        generation=action.generation,
                        members=action.members,
                        joining=action.joining,
                        why=action.why,
                    )
                )
                message = Called(action.generation, action.members, action.joining)
                for member in action.members:
                    self._workers[member].control.send(message)
                self._show(action.members[0])
            case Start():
                self._give_up(action.in_place_of)
                self._seats[action.member] = self._seats[action.in_place_of]
                self._start(action.member, self._seats[action.member])
            case Activate():
                self._give_up(action.in_place_of)
                spare = self._workers[action.member]
                spare.rank = self._seats[action.member] = self._seats[action.in_place_of]
                self._record.tell(events.Activated(member=action.member, rank=spare.rank))
                spare.control.send(Activated())
                self._stand_by(action.next_spare)
            case Tell():
                self._note(action.words)
            case End():
                self.end = action.why
                self._note(action.why)
            case _:
                assert_never(action)

    def _answer_lost(self) -> None:
        """Who misses somebody that was not killed but has come to its end is not to go on."""
        for member, generation in self._lost_reports:
            if generation < self._roll.generation:
                continue  # a newer world has been called
            called = [self._workers[each] for each in self._roll.called if each in self._workers]
            if any(worker.exit_code is not None for worker in called):
                self._workers[member].control.send(Refused(generation))
        self._lost_reports = [
            (member, generation)
            for member, generation in self._lost_reports
            if generation >= self._roll.generation
        ]
