"""The workers of one host as members of a job: what they say on their lines goes to the roll, and
what the roll asks of this host is seen to.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import assert_never

from parti.elastic.membership import Died, Entered, Event, Here, Unreachable
from parti.elastic.roll import Call, Member, Orders, Role, Roll, orders
from parti.launch import events
from parti.launch.control import Activated, Called, FromWorker, HasEntered, HasLost, IsHere, Refused
from parti.launch.events import Events
from parti.launch.failure import signal_name
from parti.launch.register import Register
from parti.launch.spawn import Worker

CUT_AFTER_S = 10.0
"""How long those who have missed somebody wait for word that he is gone. Longer than a host's lease
lasts, since that is how a host is found to be gone."""


ALONE_AFTER_S = 3 * CUT_AFTER_S


class Roster:
    """Who takes part on this host. It has no say before the first world has settled: until then a
    lost worker is the end of the job."""

    def __init__(
        self,
        register: Register,
        *,
        host: int,
        first_rank: int,
        start: Callable[[Member], Worker | None],
        show: Callable[[int], None],
        note: Callable[[str], None],
        record: Events,
    ) -> None:
        """`start` gives None for a process that could not be started and that others can go on
        without; `show(member)` brings its output to the console."""
        self._register = register
        self._host = host
        self._first_rank = first_rank
        self._workers: dict[int, Worker] = {}
        self._standing_by: set[int] = set()
        self._announced = 0
        """Generation of the world that the workers were told of last."""
        self._recorded = 0
        """Generation of the world that was last recorded to have settled."""
        self._start = start
        self._show = show
        self._note = note
        self._record = record
        self._has_settled = False
        self._lost_reports: list[tuple[int, int]] = []
        self._missed: dict[int, tuple[float, tuple[int, ...]]] = {}
        """By the generation of a world: since when, and whom workers of this host could not reach
        in it."""
        self._left_since: dict[int, tuple[int, float]] = {}
        """By member: the world it has left because it missed somebody, and when."""
        self.patience_s = 60.0
        self.end: str | None = None
        """Why the job cannot go on."""

    @property
    def _roll(self) -> Roll:
        return self._register.roll

    @property
    def _has_begun(self) -> bool:
        """The first world has settled, here or before this host came."""
        roll = self._roll
        return self._has_settled or roll.is_settled or roll.generation > 1

    # ---- what workers say, and their ends

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
                self._tell(Here(worker.member))
            case HasEntered():
                self._has_settled = True
                self._tell(Entered(worker.member, message.generation))
            case HasLost():
                self._lost_reports.append((worker.member, message.generation))
                self._left_since.setdefault(worker.member, (message.generation, time.monotonic()))
                if message.missed:
                    self._missed[message.generation] = (time.monotonic(), message.missed)
            case _:
                assert_never(message)

    def takes(self, worker: Worker) -> str | None:
        """How the job goes on without a worker that has ended, in words; None if it does not.

        One that is killed is lost. One that ends by itself has a reason that the others would meet
        as well, unless it is a replacement that has no part in the training yet.
        """
        # What was said before this death comes first: a world may have settled just before it.
        for each in list(self._workers.values()):
            self._listen(each)
        code = worker.exit_code
        is_part = worker.member in self._roll.holders
        next_member = self._roll.next_member
        if code is None or worker.is_ended_by_us or not self._has_begun or (is_part and code >= 0):
            self._answer_lost()
            return None
        self._tell(Died(worker.member))
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
        is_replaced = any(each >= next_member for each in self._workers)
        follows = ", another is started" if is_replaced else ""
        return f"{what} (process {worker.process.pid}) {how}{at}; {others} on{follows}"

    def watched(self) -> list[Worker]:
        """Those whose standing still would hold up the others."""
        if not self._has_begun:
            return []
        numbers = {*self._roll.holders, *self._roll.called}
        return [self._workers[each] for each in numbers if each in self._workers]

    def bystanders(self) -> list[Worker]:
        """Those who are on their way, or stand by."""
        watched = {worker.member for worker in self.watched()}
        if not watched:
            return []
        return [worker for member, worker in self._workers.items() if member not in watched]

    def is_needless(self, worker: Worker) -> bool:
        """It waits for a place in a training that the others have finished."""
        is_over = self.end is not None or not self._has_begun
        return not is_over and worker.member not in self._roll.holders

    @property
    def is_out(self) -> bool:
        """The others go on without this host."""
        return orders(self._roll, self._host).is_out

    def look_for_cuts(self, now_s: float) -> None:
        """Where members of another host were missed, and nobody has been found to be gone, the
        way between the two hosts is cut: the job goes on with one of them."""
        self._end_those_nobody_calls(now_s)
        for generation, (since_s, members) in list(self._missed.items()):
            if generation < self._roll.generation:
                del self._missed[generation]
            elif now_s - since_s > CUT_AFTER_S:
                del self._missed[generation]
                for host in list(self._roll.hosts_of(members)):
                    if host.number != self._host:
                        self._tell(Unreachable(self._host, host.number))

    def _tell(self, event: Event) -> None:
        before = self._roll
        words = self._register.tell(event)
        if isinstance(event, Entered) and self._roll is not before:
            self._record_settled(event.generation)
        for each in words:
            self._note(each)
        self.look()

    # ---- what the roll asks

    def look(self) -> None:
        """See to what the newest roll asks of this host: to be called when there may be one."""
        while failed := self._follow(orders(self._roll, self._host)):
            for member in failed:
                for each in self._register.tell(Died(member)):
                    self._note(each)

    def _follow(self, asked: Orders) -> list[int]:
        """Those that could not be started."""
        wanted = {each.number for each in asked.members}
        for number, worker in self._workers.items():
            if number not in wanted:
                self._give_up(worker)
        if asked.call is not None:
            self._announce(asked.call)
        failed = []
        for member in asked.members:
            if member.number not in self._workers:
                failed += self._begin(member)
            elif member.role is not Role.SPARE and member.number in self._standing_by:
                self._activate(self._workers[member.number], member.place)
        if asked.end is not None and self.end is None:
            self.end = asked.end
            self._note(asked.end)
        return failed

    def _give_up(self, worker: Worker) -> None:
        """If it lives, it has no part in the training any more."""
        if worker.is_alive and not worker.is_replaced:
            worker.is_replaced = True
            worker.signal(signal.SIGKILL)

    def _announce(self, call: Call) -> None:
        if call.generation > self._announced:
            self._announced = call.generation
            self._record.tell(
                events.Called(
                    generation=call.generation,
                    members=call.members,
                    joining=call.joining,
                    why=call.why,
                )
            )
            message = Called(
                call.generation, call.members, call.joining, self._roll.last_torn, call.is_paused
            )
            for number, worker in self._workers.items():
                if number not in self._standing_by:
                    worker.control.send(message)
            self._show(call.members[0])
        if self._roll.is_settled:
            self._record_settled(self._roll.generation)

    def _record_settled(self, generation: int) -> None:
        if generation > self._recorded:
            self._recorded = generation
            self._record.tell(events.Settled(generation=generation))

    def _begin(self, member: Member) -> list[int]:
        worker = self._start(member)
        if worker is None:
            return [member.number]
        self._workers[member.number] = worker
        if member.role is Role.SPARE:
            self._standing_by.add(member.number)
        return []

    def _activate(self, worker: Worker, place: int) -> None:
        self._standing_by.remove(worker.member)
        worker.rank = self._first_rank + place
        self._record.tell(events.Activated(member=worker.member, rank=worker.rank))
        worker.control.send(Activated())

    def _end_those_nobody_calls(self, now_s: float) -> None:
        """A worker that has left its world, as it missed somebody whom nobody else misses: there is
        another world when it is gone itself."""
        for member, (generation, since_s) in list(self._left_since.items()):
            if generation < self._roll.generation or self._workers[member].exit_code is not None:
                del self._left_since[member]
            elif now_s - max(since_s, self._register.reached_since_s) > ALONE_AFTER_S:
                del self._left_since[member]
                self._workers[member].stuck = "missed somebody who was there"
                self._workers[member].signal(signal.SIGKILL)

    def _answer_lost(self) -> None:
        """Who misses somebody that was not killed but has come to its end is not to go on."""
        for member, generation in self._lost_reports:
            if generation < self._roll.generation:
                continue  # a newer world has been called
            called = [self._workers[each] for each in self._roll.called if each in self._workers]
            # Of one that is replaced the roll will say so, when the store can be reached.
            if any(each.exit_code is not None and not each.is_replaced for each in called):
                self._workers[member].control.send(Refused(generation))
        self._lost_reports = [
            (member, generation)
            for member, generation in self._lost_reports
            if generation >= self._roll.generation
        ]
