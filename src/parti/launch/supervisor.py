"""Watches the workers of one host from their start to their end. One thread, one loop.

A job is *running*, *settling* (somebody failed; in a moment it is decided who was first), *ending*
(the others get SIGTERM, and SIGKILL after a grace) and *over*. What happens on other hosts comes
in through `Peers`; which failure was the first is decided in `failure`; how far workers are that
were asked to save their state and end is in `preemption`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from parti.elastic.roll import Member, Role
from parti.errors import Preempted, WorkerFailed
from parti.launch.control import Order
from parti.launch.environment import GRACE_S
from parti.launch.events import Events, Seen, Started, loss_of, places
from parti.launch.evidence import Reports, num_oom_kills
from parti.launch.failure import (
    Ending,
    Verdict,
    fold,
    is_consequence,
    is_failure,
    judge,
    shell_code,
    summary,
)
from parti.launch.feed import Feed
from parti.launch.output import Console, Log
from parti.launch.peers import Announcement, Kind, Peers
from parti.launch.preemption import Preemption
from parti.launch.roster import Roster
from parti.launch.signals import SignalInbox
from parti.launch.spawn import Worker, spawn
from parti.launch.standstill import Standstill
from parti.launch.watch import Watch

_GRACE_S = 0.5
"""Between SIGTERM and SIGKILL."""
_SETTLE_S = 0.1
"""After a failure: for others that fail alike."""
_SETTLE_LOST_S = 1.0
"""After the last process with the state is gone: for what the host where it was has to tell."""
_SETTLE_CONSEQUENCE_S = 0.3
"""After a failure that blames another rank: for that rank's own."""
_LOOK_S = 0.25
"""How often to look for what no descriptor tells: reports of workers that do not exit."""
_POLL_S = 0.02
"""The same where the system does not tell of a process's end either."""
_FLUSH_S = 1.0
"""How long a failed job waits for a console that does not move."""
_JOINS = {Role.FIRST: "", Role.NEWCOMER: "1", Role.SPARE: "spare"}
"""What a process finds in `PARTI_JOINS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the workers of this host are."""

    program: tuple[str, ...]
    environment_of: Callable[[int], Mapping[str, str]]
    """The environment of a local rank."""
    cwd: str | None
    run_directory: Path
    failure_directory: Path
    num_spares: int = 0
    grace_s: float = GRACE_S
    """How long an orderly stop may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended."""

    exit_code: int
    announcement: Announcement
    verdict: Verdict | None
    preempted: Preempted | None = None
    """Of a job that was stopped: where its state is."""


class Supervisor:
    """The workers of this host, from `run()` to its return."""

    def __init__(
        self,
        assignment: Assignment,
        peers: Peers,
        console: Console,
        inbox: SignalInbox,
        events: Events,
    ) -> None:
        self._assignment = assignment
        self._peers = peers
        self._inbox = inbox
        self._console = console
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._feed = Feed(self._selector, console)
        self._reports = Reports(assignment.failure_directory)
        self._workers: list[Worker] = []
        self._announcement: Announcement | None = None
        self._has_succeeded_here = False
        self._settle_until_s: float | None = None
        self._ended_s: float | None = None
        self._kill_at_s: float | None = None
        self._flush_until_s: float | None = None
        self._oom_kills_before = num_oom_kills()
        self._watch = Watch(assignment.failure_directory)
        self._standstill = Standstill(time.monotonic())
        self._preemption = Preemption(assignment.grace_s, console.note, events)
        self._roster = Roster(
            peers.register(assignment.num_spares),
            host=peers.number,
            first_rank=peers.layout.first_rank,
            start=self._start,
            show=self._show,
            note=console.note,
            record=events,
        )

    # ---- from start to end

    def run(self, on_started: Callable[[], None]) -> Outcome:
        """Start the workers; return when none is left."""
        try:
            self._selector.register(self._inbox.fileno(), selectors.EVENT_READ, self._on_signals)
            if self._peers.waits_for is not None:
                self._selector.register(self._peers.waits_for, selectors.EVENT_READ, self._on_news)
            self._roster.look()
            on_started()
            while not self._is_over():
                self._turn()
            return self._outcome()
        finally:
            self._leave_nothing()

    def _start(self, member: Member) -> Worker | None:
        """Without one for the first world there is no job. Without another the others go on."""
        try:
            return self._spawn(member)
        except WorkerFailed as error:
            if member.role is Role.FIRST:
                raise
            self._console.note(str(error))
            return None

    def _spawn(self, member: Member) -> Worker:
        layout = self._peers.layout
        rank = layout.first_rank + member.place
        joins = _JOINS[member.role]
        name = f"spare{member.number}" if member.role is Role.SPARE else f"rank{rank}"
        log = Log(self._assignment.run_directory / f"{name}.log")
        try:
            worker = spawn(
                self._assignment.program,
                member=member.number,
                rank=rank,
                environ={
                    **self._assignment.environment_of(member.place),
                    **({"PARTI_JOINS": joins} if joins else {}),
                },
                log=log,
                console=self._console,
                cwd=self._assignment.cwd,
                is_shown=rank == 0 and not joins,
            )
        except OSError as error:
            log.close()
            raise WorkerFailed(
                f"rank {rank} could not be started: {error}; {member.place} of "
                f"{layout.num_local} processes of this host were (see `ulimit -u` and `ulimit -n`)"
            ) from error
        self._workers.append(worker)
        self._events.tell(
            Started(
                member=member.number,
                rank=rank,
                pid=worker.process.pid,
                joins=member.role is Role.NEWCOMER,
                is_spare=member.role is Role.SPARE,
            )
        )
        self._feed.add(worker)
        self._selector.register(
            worker.control, selectors.EVENT_READ, functools.partial(self._roster.hear, worker)
        )
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, self._collect)
        return worker

    def _show(self, member: int) -> None:
        """Bring the output of the first rank to the console."""
        for worker in self._workers:
            worker.show(worker.member == member)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()
        if sys.platform != "linux":
            self._collect()
        self._reports.look(now=False)
        if self._ended_s is None:
            self._look_around()
        self._advance(time.monotonic())
        self._feed.turn()

    def _look_around(self) -> None:
        watched, bystanders = self._roster.watched(), self._roster.bystanders()
        for worker in self._watch.look(watched, bystanders, self._roster.patience_s):
            self._tell_places(f"rank {worker.rank} {worker.stuck}")
        alive = self._alive()
        steps = [worker.control.board.step for worker in alive if worker.control.board.beat]
        lasted_s = self._standstill.look(steps, time.monotonic())
        if lasted_s is not None and steps:
            self._tell_places(f"no step for {lasted_s:.0f} s")

    def _tell_places(self, why: str) -> None:
        self._events.tell(Seen(why=why, places=places(self._workers)))

    def _timeout_s(self) -> float:
        now_s = time.monotonic()
        grace_s = self._preemption.until_s if self._ended_s is None else None
        moments = (self._settle_until_s, self._kill_at_s, self._flush_until_s, grace_s)
        waits = [max(0.0, moment - now_s) for moment in moments if moment is not None]
        look_s = _LOOK_S if sys.platform == "linux" else _POLL_S
        return min([*waits, look_s, self._watch.next_look_s(self._roster.patience_s)])

    def _is_over(self) -> bool:
        if self._announcement is None or self._alive():
            return False
        is_late = self._flush_until_s is not None and time.monotonic() >= self._flush_until_s
        return is_late or self._feed.is_flushed

    def _leave_nothing(self) -> None:
        """Whatever happened, an interrupt in the middle of the above included."""
        try:
            if self._announcement is None:
                self._announce(Kind.LOST)
                for worker in self._alive():
                    worker.control.board.command(Order.END)
                self._signal_workers(signal.SIGTERM)
                deadline_s = time.monotonic() + _GRACE_S
                while self._alive() and time.monotonic() < deadline_s:
                    self._collect()
                    time.sleep(_POLL_S)
        finally:
            self._signal_workers(signal.SIGKILL)
            for worker in self._alive():
                worker.collect()
            for worker in self._workers:
                worker.close()
            self._selector.close()

    # ---- what comes in

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_alive]

    def _collect(self) -> None:
        for worker in self._alive():
            if worker.has_ended():
                if worker.pidfd is not None:
                    self._selector.unregister(worker.pidfd)
                self._selector.unregister(worker.control)
                self._roster.hear(worker)  # its last words
                worker.collect()
                self._feed.take_rest(worker)
                self._reports.look(now=True)
                self._tell_loss(worker)
                self._go_on_without(worker)

    def _tell_loss(self, worker: Worker) -> None:
        ending = self._ending(worker)
        if not is_failure(ending) or self._preemption.ended_so(worker):
            return
        how = summary(ending) if worker.stuck is None else f"{worker.stuck}; it was killed"
        traceback = "" if ending.report is None else ending.report.traceback
        stack = self._watch.stack_of(worker) or traceback
        self._events.tell(loss_of(worker, how, stack, is_consequence=is_consequence(ending)))

    def _go_on_without(self, worker: Worker) -> None:
        """One that was killed is no failure of the job where the others can go on."""
        if self._ended_s is not None:
            return
        if self._has_stopped() and (worker.exit_code or 0) < 0:
            worker.is_replaced = True  # nothing was left for it to do
            return
        if not self._peers.can_lose or self._preemption.ended_so(worker):
            return
        how = self._roster.takes(worker)
        if how is not None:
            worker.is_replaced = True
            stack = self._watch.stack_of(worker)
            worker.log.write(f"{stack}\n".encode() if stack else b"")
            self._console.note(f"{how} (log: {worker.log.path})" + (f"\n{stack}" if stack else ""))

    def _on_news(self) -> None:
        news = self._peers.poll()
        if news is None:
            self._roster.look()
            return
        if self._peers.waits_for is not None:
            self._selector.unregister(self._peers.waits_for)
        if self._announcement is None:
            self._end(news)

    def _on_signals(self) -> None:
        for number in self._inbox.take():
            if number == signal.SIGWINCH:
                self._feed.copy_terminal_size()
            elif number == signal.SIGTSTP:
                self._signal_workers(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._signal_workers(signal.SIGCONT)
            elif number == signal.SIGUSR2:
                self._peers.leave()
            elif self._ended_s is None:
                if self._preemption.asks(number, self._alive(), time.monotonic()):
                    continue
                if number == signal.SIGINT:
                    self._console.end_echo()
                self._end(self._announce(Kind.SIGNAL, number=number))
            else:  # asked again: now
                self._kill_at_s = self._flush_until_s = time.monotonic()

    # ---- what follows from it

    def _advance(self, now_s: float) -> None:
        if self._ended_s is None:
            self._preemption.look(self._workers, now_s)
            self._decide(now_s)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = None
            self._signal_workers(signal.SIGKILL)

    def _decide(self, now_s: float) -> None:
        """Has the job failed, or have all workers of this host done their part?"""
        self._roster.look_for_cuts(now_s)
        if self._roster.is_out and self._roster.end is None:
            words = "" if self._alive() else "no process of this host could take part"
            self._end(self._announcement_of(Kind.OUT, words=words))
            return
        verdict = judge(self._failures())
        if verdict is not None:
            is_blamed_on_another = is_consequence(verdict.first)
            until_s = now_s + (_SETTLE_CONSEQUENCE_S if is_blamed_on_another else _SETTLE_S)
            self._settle_until_s = min(self._settle_until_s or until_s, until_s)
            if now_s >= self._settle_until_s:
                self._end(self._announce(Kind.FAILURE, ending=verdict.first))
        elif self._roster.end is not None:
            self._settle_until_s = self._settle_until_s or now_s + _SETTLE_LOST_S
            if now_s >= self._settle_until_s:
                self._end(self._announce(Kind.LOST, words=self._roster.end))
        elif self._are_all_through() and not self._has_succeeded_here:
            for worker in self._alive():  # they wait for a place that nobody needs any more
                worker.is_ended_by_us = True
                worker.signal(signal.SIGKILL)
            self._has_succeeded_here = True
            self._announcement = self._peers.succeed(self._announcement_of(self._good_end()))
        elif self._preemption.is_late(now_s) or (
            self._alive() and self._preemption.is_pointless(self._alive())
        ):
            kind = Kind.STOPPED if self._has_stopped() else Kind.SIGNAL
            self._end(self._announce(kind, number=self._preemption.signal))

    def _has_stopped(self) -> bool:
        return self._preemption.stopped is not None

    def _good_end(self) -> Kind:
        """All workers are through: with the training, or with what was left to do when they were
        asked to stop."""
        is_stopped = any(self._preemption.ended_so(worker) for worker in self._workers)
        return Kind.STOPPED if is_stopped else Kind.SUCCESS

    def _are_all_through(self) -> bool:
        """All workers have ended, but for replacements that came too late."""
        has_any_ended_well = any(
            worker.exit_code == 0 or self._preemption.ended_so(worker) for worker in self._workers
        )
        # Without one, others have been killed, and are about to be replaced.
        return (has_any_ended_well or self._has_stopped()) and all(
            self._roster.is_needless(worker) for worker in self._alive()
        )

    def _end(self, announcement: Announcement) -> None:
        """The job is at its end, for the reason announced."""
        now_s = time.monotonic()
        self._announcement = announcement
        self._ended_s = now_s
        self._settle_until_s = None
        self._kill_at_s = now_s + _GRACE_S
        if announcement.kind not in (Kind.SUCCESS, Kind.STOPPED):
            self._tell_places("the job is ended")
            self._flush_until_s = now_s + _GRACE_S + _FLUSH_S
        for worker in self._alive():
            worker.is_ended_by_us = True
            worker.control.board.command(Order.END)
        self._signal_workers(signal.SIGTERM)
        self._signal_workers(signal.SIGCONT)  # one that is stopped would not see the other

    def _announce(
        self, kind: Kind, *, ending: Ending | None = None, number: int = 0, words: str = ""
    ) -> Announcement:
        announcement = self._announcement_of(kind, ending=ending, number=number, words=words)
        return self._peers.announce(announcement)

    def _announcement_of(
        self, kind: Kind, *, ending: Ending | None = None, number: int = 0, words: str = ""
    ) -> Announcement:
        layout, preemption = self._peers.layout, self._preemption
        is_of_it = kind is Kind.STOPPED or (
            kind is Kind.SIGNAL and preemption.is_late(time.monotonic())
        )
        return Announcement(
            kind=kind,
            node_rank=layout.node_rank,
            host=layout.hosts[layout.node_rank],
            ending=ending,
            signal=number,
            words=preemption.words if is_of_it else words,
        )

    def _signal_workers(self, number: int) -> None:
        for worker in self._alive():
            worker.signal(number)

    # ---- how it is told

    def _failures(self) -> list[Ending]:
        """How the workers ended that have failed, or have reported that they will."""
        return [
            self._ending(worker)
            for worker in self._workers
            if not worker.is_replaced
            and not self._preemption.ended_so(worker)
            and not self._roster.is_needless(worker)
            and (worker.exit_code or self._reports.of(worker.member) is not None)
        ]

    def _ending(self, worker: Worker) -> Ending:
        report = self._reports.of(worker.member)
        if report is not None and self._ended_s is not None and report.at_s > self._ended_s:
            report = None  # it raised because it was being ended
        exit_code = worker.exit_code or 0
        if report is not None and (worker.is_alive or worker.is_ended_by_us):
            exit_code = max(exit_code, 1)  # it had raised and was on its way out
        layout = self._peers.layout
        return Ending(
            rank=worker.rank,
            exit_code=exit_code,
            at_s=worker.ended_s,
            host=layout.hosts[layout.node_rank] if layout.num_nodes > 1 else "",
            report=report,
            tail=worker.log.tail,
            is_on_console=worker.is_on_console,
            is_ended_by_us=worker.is_ended_by_us and report is None,
            num_oom_kills=self._oom_kills_since_start(),
        )

    def _oom_kills_since_start(self) -> int | None:
        now = num_oom_kills()
        if now is None or self._oom_kills_before is None:
            return None
        return now - self._oom_kills_before

    def _outcome(self) -> Outcome:
        assert self._announcement is not None
        if self._announcement.kind is Kind.STOPPED and self._preemption.signal:
            # Who was asked knows by what.
            self._announcement = dataclasses.replace(
                self._announcement, words=self._preemption.words
            )
        endings = self._failures()
        here = judge(endings)
        failures = [] if here is None else [here.first, *here.alike, *here.consequences]
        elsewhere = self._peers.finish(failures)
        for ending in endings:
            self._file_traceback(ending)
        verdict = _verdict(self._announcement, [*failures, *elsewhere])
        return Outcome(
            exit_code=_exit_code(self._announcement, verdict),
            announcement=self._announcement,
            verdict=verdict,
            preempted=(
                self._preemption.preempted if self._announcement.kind is Kind.STOPPED else None
            ),
        )

    def _file_traceback(self, ending: Ending) -> None:
        """Workers leave the printing of their last traceback to us; every one goes to its log."""
        if ending.report is not None and not ending.report.is_printed:
            worker = next(w for w in reversed(self._workers) if w.rank == ending.rank)
            worker.log.write(ending.report.traceback.encode())


def _verdict(announcement: Announcement, failures: Sequence[Ending]) -> Verdict | None:
    """The announced failure first, in its latest version, and all others under it."""
    if announcement.kind is not Kind.FAILURE or announcement.ending is None:
        return None
    rank = announcement.ending.rank
    latest = next((e for e in failures if e.rank == rank), announcement.ending)
    return fold(latest, [e for e in failures if e.rank != rank])


def _exit_code(announcement: Announcement, verdict: Verdict | None) -> int:
    match announcement.kind:
        case Kind.SUCCESS:
            return 0
        case Kind.FAILURE:
            return 1 if verdict is None else shell_code(verdict.first.exit_code)
        case Kind.SIGNAL:
            return 128 + announcement.signal
        case Kind.STOPPED:
            return Preempted.CODE
        case Kind.LOST:
            return 1
        case Kind.OUT:
            return 1 if announcement.words else Preempted.CODE
        case _:
            assert_never(announcement.kind)
