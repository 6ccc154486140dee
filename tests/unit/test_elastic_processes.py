"""Random histories of a job, driven through a model of its hosts and processes.

The model knows the truth, which no supervisor does: who lives, who has the state, who has arrived
where. Its processes talk as real ones do, its supervisors see the newest roll when they look, and
perhaps none of those before it. Words on one line keep their order and may take any time. They are
heard before their process's death, unless the host is lost with them.

On one host an exchange is passed by all or by none of those who live. Between hosts, when all have
arrived and one vanishes, any of the others may have passed it. A step there is *prepared* by each,
who says so in an exchange, and counts for whoever has heard it from all. In the next world they
compare: if one has committed, or all are prepared, the others commit as well; or else all forget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from parti.elastic.membership import (
    MAX_FAILED_STARTS,
    Closed,
    Died,
    Entered,
    Event,
    Here,
    HostCame,
    HostLeaves,
    HostLost,
    Unreachable,
    advance,
    begin,
)
from parti.elastic.roll import Call, Member, Role, Roll, Stage, orders

# The exchanges of a world, in the order in which its members come to them.
MEETING, PLACE, STATE, LAST, FIRST_STEP = range(5)
"""In every step two more: its gradients, and whether all are prepared."""

Step: TypeAlias = tuple[int, int]
"""Its number, and the generation of the world in which its update was begun."""
Move: TypeAlias = tuple[str, Callable[[], None]]


@dataclass(eq=False)
class Group:
    """A world as those know it who are in it."""

    call: Call
    arrived: dict[int, int] = field(default_factory=dict)
    said: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    """In an exchange, by a member."""
    given: dict[int, tuple[Step, ...]] = field(default_factory=dict)
    """The states of holders, for newcomers to take."""

    def num_arrived(self) -> int:
        """At so many exchanges all have arrived."""
        return min(self.arrived.get(each, 0) for each in self.call.members)


@dataclass(eq=False)
class Process:
    number: int
    host: int
    stands_by: bool
    is_alive: bool = True
    is_dead_for_all: bool = False
    """The roll has heard of it."""
    has_come: bool = False
    heard: deque[tuple[Call, int] | None] = field(default_factory=deque)
    """Worlds, with the newest torn generation; None to stand by no longer."""
    said: deque[Event] = field(default_factory=deque)
    newest: Call | None = None
    torn: int = 0
    left: Group | None = None
    """The world it was in last."""
    group: Group | None = None
    passed: int = 0
    history: tuple[Step, ...] | None = None
    """The steps in its weights; None without any state of the training."""
    begun: tuple[Step, Group] | None = None
    """A step whose update has begun and is not committed, and where."""
    is_prepared: bool = False
    """It has said so of that step."""
    has_settled: bool = False
    leaves: bool = False
    """After this step, for others to come or to leave."""

    @property
    def is_called(self) -> bool:
        here = self.group or self.left
        generation = 0 if here is None else here.call.generation
        return self.newest is not None and self.newest.generation > generation

    @property
    def may_enter(self) -> bool:
        """It cannot begin a second time."""
        newest = self.newest
        if newest is None or not self.is_called or self.number not in newest.members:
            return False
        return not (self.number in newest.joining and self.has_settled)


@dataclass(eq=False)
class Supervisor:
    number: int
    seen: Roll
    is_alive: bool = True
    is_out: bool = False
    announced: int = 0


class Job:
    """All hosts and processes, the roll they share, and all that must be true of them."""

    def __init__(self, coming: Iterable[HostCame], min_hosts: int, max_hosts: int) -> None:
        self.roll = begin(min_hosts, max_hosts)
        self.is_alone = max_hosts == 1
        self.coming: list[HostCame] = list(coming)
        self.is_closed = False
        self.supervisors: dict[int, Supervisor] = {}
        self.processes: dict[int, Process] = {}
        self.groups: dict[int, Group] = {}
        self.cuts: dict[frozenset[int], dict[int, int]] = {}
        """Pairs of hosts that cannot reach each other any more; in each world, so many exchanges
        were complete before."""
        self.steps: list[Step] = []
        """What was committed by anybody."""
        self.newest_settled = 0
        self.known_holders: set[int] = set()
        """Of the newest world that the roll has heard to have settled, those not known to be
        dead and not left out."""
        self.departing: set[int] = set()
        self.asked_to_leave: set[int] = set()
        self.starting: set[int] = set()
        """Those that the roll waits for."""
        self.failed_starts: dict[int, int] = {}
        self.slow_host: int | None = None
        """Its supervisor does nothing."""
        self.slow_line: int | None = None
        """What this process says is not heard before its end."""
        self.are_losses_seen = True
        """By processes of other hosts. They may have to be told."""

    @property
    def has_ended(self) -> bool:
        return self.roll.end is not None

    # ---- what can happen next, faults left out

    def moves(self) -> list[Move]:
        return [] if self.has_ended else [*self.moves_of_supervisors(), *self.moves_of_processes()]

    def moves_of_supervisors(self) -> Iterator[Move]:
        for came in self.coming:
            yield f"host {came.host} comes", partial(self.host_comes, came)
        if not self.is_closed and not self.coming:
            yield "close", self.close
        for each in self.supervisors.values():
            if not each.is_alive and each.number not in self.roll.gone:
                yield f"miss host {each.number}", partial(self.tell, HostLost(each.number))
            elif each.is_alive and not each.is_out and each.number != self.slow_host:
                yield from self.moves_of_supervisor(each)

    def moves_of_supervisor(self, supervisor: Supervisor) -> Iterator[Move]:
        if supervisor.seen is not self.roll:
            yield f"host {supervisor.number} looks", partial(self.look, supervisor)
        for process in self.processes_of(supervisor.number):
            if process.is_dead_for_all:
                continue
            if process.said and process.number != self.slow_line:
                yield f"hear {process.number}", partial(self.hear, process)
            if not process.is_alive:
                yield f"find {process.number} dead", partial(self.bury, process)
        for other in sorted(self.cut_off_from(supervisor.number)):
            event = Unreachable(supervisor.number, other)
            yield f"host {supervisor.number} cannot reach {other}", partial(self.tell, event)

    def moves_of_processes(self) -> Iterator[Move]:
        for process in self.processes.values():
            if process.is_alive:
                for name, move in self.moves_of(process):
                    yield f"{process.number} {name}", partial(move, process)

    def moves_of(self, process: Process) -> Iterator[tuple[str, Callable[[Process], None]]]:
        if process.heard:
            yield "listens", self.listen
        group = process.group
        if group is None:
            if not process.stands_by and not process.has_come:
                yield "comes", self.come
            elif process.may_enter:
                yield "goes to its world", self.enter
            return
        if not self.is_alone and process.torn > group.call.generation:
            yield "leaves at once", self.leave
        if group.arrived[process.number] == process.passed:
            if not (group.call.is_paused and process.passed == FIRST_STEP):
                yield "arrives", self.arrive
            elif process.is_called:
                yield "goes on", self.leave
            return
        if self.can_pass(process, group):
            yield "passes", self.go_through
        elif self.is_alone and process.passed == MEETING and process.is_called:
            yield "turns back", self.leave
        if (process.passed > MEETING or not self.is_alone) and self.misses_one(process, group):
            yield "misses one", self.leave

    def can_pass(self, process: Process, group: Group) -> bool:
        num_complete = group.num_arrived()
        for cut in self.cuts_within(process.host, group):
            num_complete = min(num_complete, self.cuts[cut].get(group.call.generation, 0))
        return num_complete > process.passed

    def misses_one(self, process: Process, group: Group) -> bool:
        """One is gone. What it had said before may have come from another host, or not."""
        if self.are_losses_seen and list(self.cuts_within(process.host, group)):
            return True
        gone = [self.processes[m] for m in group.call.members if not self.processes[m].is_alive]
        return any(
            group.arrived.get(each.number, 0) <= process.passed
            if each.host == process.host
            else self.are_losses_seen
            for each in gone
        )

    def cuts_within(self, host: int, group: Group) -> Iterator[frozenset[int]]:
        hosts = {self.processes[each].host for each in group.call.members}
        return (cut for cut in self.cuts if host in cut and cut <= hosts)

    def cut_off_from(self, host: int) -> set[int]:
        groups = [each.group or each.left for each in self.processes_of(host)]
        cuts = [cut for group in groups if group for cut in self.cuts_within(host, group)]
        return {other for cut in cuts for other in cut} - {host} - self.roll.gone

    def processes_of(self, host: int) -> list[Process]:
        return [each for each in self.processes.values() if each.host == host]

    # ---- supervisors

    def host_comes(self, came: HostCame) -> None:
        self.coming.remove(came)
        self.tell(came)
        if self.roll.host(came.host) is not None:
            self.supervisors[came.host] = Supervisor(came.host, begin(1, 1))
            self.failed_starts[came.host] = 0

    def close(self) -> None:
        self.is_closed = True
        self.tell(Closed())

    def hear(self, process: Process) -> None:
        event = process.said.popleft()
        if isinstance(event, Here) and event.member in self.starting:
            self.failed_starts[process.host] = 0
            self.starting.remove(event.member)
        if isinstance(event, Entered) and event.generation == self.roll.generation:
            self.known_holders = {
                each
                for each in self.groups[event.generation].call.members
                if not self.processes[each].is_dead_for_all
            }
            self.departing = set()
        self.tell(event)

    def bury(self, process: Process) -> None:
        """What it has said is heard before its end."""
        while process.said and not self.has_ended:
            self.hear(process)
        if self.has_ended:
            return
        process.is_dead_for_all = True
        if process.number in self.starting:
            self.failed_starts[process.host] += 1
            self.starting.remove(process.number)
        self.tell(Died(process.number))

    def tell(self, event: Event) -> None:
        before = self.roll
        after, words = advance(before, event)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(after), type=Roll) == after
        note(f"    {event}{''.join(f'; {each}' for each in words)}")
        if after == before:
            return
        self.roll = after
        self.look_at_hosts(before, event)
        if after.call is not None and after.call != before.call:
            self.check_call(after.call, before, event)
        if after.end is not None:
            assert not self.known_holders, "somebody is left who has the state"

    def look_at_hosts(self, before: Roll, event: Event) -> None:
        after = self.roll
        if isinstance(event, HostLeaves):
            self.asked_to_leave.add(event.host)
        for number in after.gone - before.gone:
            for process in self.processes_of(number):
                process.is_dead_for_all = True
        self.known_holders -= {m for m, p in self.processes.items() if p.is_dead_for_all}
        known = {each.number: each for host in before.hosts for each in host.members}
        for host in after.hosts:
            for each in host.members:
                old = known.get(each.number)
                if old is None:
                    assert each.number >= before.next_member, "a number is used again"
                if each.role is not Role.SPARE and (old is None or old.role is Role.SPARE):
                    self.starting.add(each.number)
                if old is None and not isinstance(event, HostCame):
                    assert self.failed_starts[host.number] < MAX_FAILED_STARTS
                    assert host.number not in self.asked_to_leave, "one is started to leave"

    def check_call(self, call: Call, before: Roll, event: Event) -> None:
        note(f"    {call}")
        called = [self.processes[each] for each in call.members]
        stay = [each for each in called if each.number not in call.joining]
        hosts = {each.host for each in called}
        assert call.generation == before.generation + 1 == max(self.groups, default=0) + 1
        assert len(set(call.members)) == len(call.members)
        assert set(call.joining) <= set(call.members)
        assert not any(each.is_dead_for_all for each in called), "a dead one is called"
        assert all(each.has_come for each in called), "one is called that is not ready"
        if before.call is None:
            assert called == sorted(called, key=lambda each: (each.host, each.number))
            assert len(hosts) >= self.roll.min_hosts
            self.known_holders = set(call.members)
            for each in called:
                each.history = ()
        assert stay and called[0] in stay, "nobody is there who has the state"
        assert all(each.history is not None for each in stay), (
            "one without state counts as a holder"
        )
        if self.is_alone:
            joining = [each for each in called if each.number in call.joining]
            assert not any(each.has_settled for each in joining), "one that trains is to join"
        assert call.is_paused == (len(hosts) < self.roll.min_hosts)
        missed = {*before.called, *self.departing} - set(call.members)
        assert call.is_torn == any(self.roll.find(each) is None for each in missed)
        assert self.roll.last_torn == (call.generation if call.is_torn else before.last_torn)
        left_out = self.known_holders - set(call.members)
        if call.is_torn:
            assert not left_out and not call.joining
            self.departing = set()
        else:
            assert before.call is None or before.is_settled or isinstance(event, Entered), (
                "something else is under way"
            )
            assert {self.processes[each].host for each in left_out} <= self.asked_to_leave
            self.departing = left_out
            self.known_holders -= left_out
        self.groups[call.generation] = Group(call)

    def look(self, supervisor: Supervisor) -> None:
        """See to what the newest roll asks, whatever was seen before."""
        supervisor.seen = self.roll
        asked = orders(self.roll, supervisor.number)
        supervisor.is_out = asked.is_out
        wanted = {each.number for each in asked.members}
        for process in self.processes_of(supervisor.number):
            if process.number not in wanted and process.is_alive:
                note(f"    kill {process.number}")
                process.is_alive, process.is_dead_for_all = False, True
        for member in asked.members:
            self.see_to(member, supervisor.number)
        if asked.call is not None and asked.call.generation > supervisor.announced:
            supervisor.announced = asked.call.generation
            for process in self.processes_of(supervisor.number):
                if process.is_alive and not self.is_spare(process):
                    process.heard.append((asked.call, asked.last_torn))

    def see_to(self, member: Member, host: int) -> None:
        process = self.processes.get(member.number)
        if process is None:
            stands_by = member.role is Role.SPARE
            self.processes[member.number] = Process(member.number, host, stands_by)
        elif member.role is not Role.SPARE and self.is_spare(process):
            process.heard.append(None)

    def is_spare(self, process: Process) -> bool:
        return process.stands_by and None not in process.heard

    # ---- the processes

    def come(self, process: Process) -> None:
        process.has_come = True
        process.said.append(Here(process.number))

    def listen(self, process: Process) -> None:
        message = process.heard.popleft()
        if message is None:
            process.stands_by = False
        else:
            process.newest, process.torn = message

    def enter(self, process: Process) -> None:
        assert process.newest is not None
        process.group, process.passed = self.groups[process.newest.generation], 0
        process.group.arrived[process.number] = 0
        is_new = process.number in process.newest.joining
        assert is_new or process.history is not None

    def leave(self, process: Process) -> None:
        assert process.group is not None
        process.left, process.group = process.group, None
        process.leaves = False

    def arrive(self, process: Process) -> None:
        group, number = process.group, process.number
        assert group is not None
        exchange = process.passed
        if number not in group.call.joining or exchange >= FIRST_STEP:
            assert process.history is not None
            if exchange == PLACE:
                is_torn = process.begun is not None
                is_bound = is_torn if self.is_alone else process.is_prepared
                group.said[exchange, number] = len(process.history), is_bound
            elif exchange == STATE:
                assert process.begun is None
                group.given[number] = process.history
            elif exchange >= FIRST_STEP and exchange % 2 == 0:
                group.said[exchange, number] = len(process.history), process.is_called
            elif exchange > FIRST_STEP:
                process.is_prepared = True
        group.arrived[number] = exchange + 1

    def go_through(self, process: Process) -> None:
        group, exchange = process.group, process.passed
        assert group is not None
        process.passed += 1
        said = [group.said[key] for key in sorted(group.said) if key[0] == exchange]
        if exchange == PLACE and process.number not in group.call.joining:
            self.compare(process, group, said)
        elif exchange == STATE and process.number in group.call.joining:
            (process.history,) = set(group.given.values())
            assert list(process.history[: len(self.steps)]) == self.steps, "it is behind"
        elif exchange == LAST:
            process.has_settled = True
            self.newest_settled = max(self.newest_settled, group.call.generation)
            process.said.append(Entered(process.number, group.call.generation))
        elif exchange >= FIRST_STEP and exchange % 2 == 0:
            assert len({step for step, _ in said}) == 1, "they are not in the same step"
            assert not group.call.is_paused, "they go on although they are too few"
            assert process.begun is None
            process.begun = (len(process.history or ()), group.call.generation), group
            process.leaves = bool(group.said[exchange, group.call.members[0]][1])
        elif exchange > FIRST_STEP:
            if self.is_alone:
                assert group.call.generation >= self.newest_settled, "a past world goes on"
            self.commit(process)
            if process.leaves:
                self.leave(process)

    def compare(self, process: Process, group: Group, said: list[tuple[int, bool]]) -> None:
        """What becomes of a step that was under way in the world before."""
        newest = max(num_steps for num_steps, _ in said)
        is_behind = len(process.history or ()) < newest
        if self.is_alone:
            assert len(set(said)) == 1, "they are not at the same place"
            if process.begun is not None:
                self.check_all_lost_are_dead(process.begun[1], group)
        else:
            assert all(
                steps == newest or (steps == newest - 1 and bound) for steps, bound in said
            ), "one is behind, and not prepared to follow"
        if is_behind or all(bound for _, bound in said):
            self.commit(process)
        process.begun, process.is_prepared = None, False

    def check_all_lost_are_dead(self, old: Group, new: Group) -> None:
        """Their part of the update is about to be done by others."""
        for each in set(old.call.members) - set(new.call.members):
            assert not self.processes[each].is_alive, "one that lives is written for"

    def commit(self, process: Process) -> None:
        assert process.begun is not None and process.history is not None
        step = process.begun[0]
        assert step[0] == len(process.history)
        assert not self.groups[step[1]].call.is_paused
        if step[0] == len(self.steps):
            self.steps.append(step)
        assert self.steps[step[0]] == step, "a step was taken in two worlds"
        process.history, process.begun, process.is_prepared = (*process.history, step), None, False

    # ---- faults

    def kill(self, processes: Iterable[Process]) -> None:
        for each in processes:
            note(f"kill {each.number}")
            each.is_alive = False

    def vanish(self, supervisor: Supervisor) -> None:
        """A host with all that its processes have said and that was not heard."""
        note(f"host {supervisor.number} vanishes")
        supervisor.is_alive = False
        for each in self.processes_of(supervisor.number):
            each.is_alive = False
            each.said.clear()

    def cut(self, host: int, other: int) -> None:
        note(f"hosts {host} and {other} are cut off from each other")
        complete = {generation: group.num_arrived() for generation, group in self.groups.items()}
        self.cuts.setdefault(frozenset({host, other}), complete)

    # ---- at the end

    def is_at_rest(self) -> bool:
        """All that live and are wanted have settled in one world, and everybody knows."""
        alive = [each for each in self.processes.values() if each.is_alive]
        there = [s for s in self.supervisors.values() if s.is_alive and not s.is_out]
        if (
            self.coming
            or not self.is_closed
            or any(each.said or each.heard for each in alive)
            or any(
                not each.is_alive and not each.is_dead_for_all for each in self.processes.values()
            )
            or any(
                s.number not in self.roll.gone for s in self.supervisors.values() if not s.is_alive
            )
            or any(s.seen is not self.roll for s in there)
            or any(self.cut_off_from(s.number) for s in there)
        ):
            return False
        if self.roll.call is None:
            return len(there) < self.roll.min_hosts and all(
                each.has_come or each.stands_by for each in alive
            )
        group = self.groups[self.roll.generation]
        can_stay = [each for each in alive if not each.stands_by]
        if any(host.stage is Stage.LEAVES for host in self.roll.hosts):
            can_stay = [each for each in can_stay if each.host not in self.asked_to_leave]
            can_stay += [self.processes[each] for each in self.roll.holders]
        return all(each.group is group and each.passed > LAST for each in can_stay)

    def check_rest(self) -> None:
        roll = self.roll
        call = roll.call
        if call is None:
            assert not roll.starting
            return
        assert roll.is_settled
        assert roll.holders == roll.called == call.members
        assert not roll.ready
        assert not any(host.stage is Stage.DEPARTS for host in roll.hosts)
        for host in roll.hosts:
            num_there = len(host.numbers & {*roll.holders})
            if host.stage is Stage.STAYS and self.failed_starts[host.number] < MAX_FAILED_STARTS:
                assert num_there == host.wanted
            assert num_there or host.stage is Stage.STAYS
        stay = [host for host in roll.hosts if host.stage is Stage.STAYS]
        if len(stay) < len(roll.hosts):
            assert len(stay) < roll.min_hosts, "one could have left"
        assert call.is_paused == (len(roll.hosts) < roll.min_hosts)
        for each in roll.holders:
            history = self.processes[each].history
            assert history is not None and list(history) == self.steps[: len(history)]
            assert len(history) >= len(self.steps) - 1


class RandomHistories(RuleBasedStateMachine):
    """At the end of each no more faults come, and all come to rest."""

    is_sound = False

    @initialize(
        wanted=st.sampled_from(
            ([2, 1], [3], [1, 1, 1], [2, 2], [4], [1, 1], [2, 1, 2], [1, 1, 1, 1], [5], [2], [1])
        ),
        num_spares=st.integers(0, 2),
        min_hosts=st.sampled_from((1, 2, 3)),
        num_more=st.sampled_from((2, 1, 0)),
        num_rounds=st.sampled_from((25, 0)),
        spares_the_last=st.sampled_from((True, True, True, False)),
        are_losses_seen=st.booleans(),
    )
    def start(
        self,
        wanted: list[int],
        num_spares: int,
        min_hosts: int,
        num_more: int,
        num_rounds: int,
        spares_the_last: bool,
        are_losses_seen: bool,
    ) -> None:
        coming = [HostCame(host, each, num_spares) for host, each in enumerate(wanted)]
        max_hosts = 1 if len(wanted) == 1 else len(wanted) + num_more
        self.job = Job(coming, min(min_hosts, len(wanted)), max_hosts)
        self.is_sound = True
        self.job.are_losses_seen = are_losses_seen
        self.spares_the_last = spares_the_last
        self.next_host = len(wanted)
        for _ in range(num_rounds):
            self.do_all_that_is_possible()

    # ---- time passes

    @rule(count=st.integers(0, 60), seed=st.integers(0, 9999))
    def anything_happens(self, count: int, seed: int) -> None:
        self.go_on(self.job.moves, count, Random(seed))

    @rule(count=st.integers(0, 60), seed=st.integers(0, 9999))
    def supervisors_are_slow(self, count: int, seed: int) -> None:
        self.go_on(self.job.moves_of_processes, count, Random(seed))

    @rule(which=st.none() | st.integers(0, 3))
    def a_supervisor_is_slow_from_now_on(self, which: int | None) -> None:
        self.job.slow_host = which

    @rule(which=st.none() | st.integers(0, 9))
    def a_line_is_slow_from_now_on(self, which: int | None) -> None:
        """Preferably one of those that have come last."""
        numbers = sorted(self.job.processes, reverse=True)
        slow = None if which is None else numbers[which : which + 1]
        self.job.slow_line = slow[0] if slow else None

    @rule(count=st.integers(0, 9), seed=st.integers(0, 9999))
    def processes_are_slow(self, count: int, seed: int) -> None:
        self.go_on(self.job.moves_of_supervisors, count, Random(seed))

    # ---- processes are lost

    @precondition(lambda self: self.num_left > self.num_spared)
    @rule(which=st.integers(0, 99))
    def one_is_killed(self, which: int) -> None:
        alive = [each for each in self.job.processes.values() if each.is_alive]
        self.job.kill(alive[which % len(alive) :][:1] if alive else [])

    @precondition(lambda self: self.num_left > self.num_spared)
    @rule(
        exchange=st.sampled_from((MEETING, PLACE, STATE, LAST, FIRST_STEP, FIRST_STEP + 1)),
        has_arrived=st.booleans(),
        among_newcomers=st.booleans(),
        are_supervisors_slow=st.booleans(),
        are_newcomers_heard_late=st.booleans(),
        what=st.sampled_from(("found later", "found at once", "all of the host")),
        seed=st.integers(0, 9999),
    )
    def one_is_killed_at(
        self,
        exchange: int,
        has_arrived: bool,
        among_newcomers: bool,
        are_supervisors_slow: bool,
        are_newcomers_heard_late: bool,
        what: str,
        seed: int,
    ) -> None:
        """At the next opportunity, where there is one soon."""
        random = Random(seed)
        moves = self.job.moves_of_processes if are_supervisors_slow else self.job.moves
        for _ in range(0 if self.job.has_ended else 100):
            there = [
                each
                for each in self.job.processes.values()
                if each.is_alive
                and each.group is not None
                and each.passed == exchange
                and (each.group.arrived[each.number] > exchange) == has_arrived
                and (each.group.call.joining or not among_newcomers)
            ]
            if there:
                chosen = random.choice(there)
                if are_newcomers_heard_late and chosen.group is not None:
                    self.hear_late(chosen.group)
                if what == "all of the host":
                    self.lose_host(chosen.host)
                    return
                self.job.kill([chosen])
                supervisor = self.job.supervisors[chosen.host]
                if what == "found at once" and not supervisor.is_out:
                    self.make((f"find {chosen.number} dead", partial(self.job.bury, chosen)))
                return
            self.go_on(moves, 1, random)

    @precondition(lambda self: self.num_left > self.num_spared)
    @rule(times=st.integers(1, MAX_FAILED_STARTS + 1), which=st.integers(0, 9))
    def replacements_die_as_they_start(self, times: int, which: int) -> None:
        hosts = [s for s in self.job.supervisors.values() if s.is_alive and not s.is_out]
        for supervisor in hosts[which % max(1, len(hosts)) :][:1]:
            for _ in range(times):
                starting = [
                    each
                    for each in self.job.processes_of(supervisor.number)
                    if each.is_alive and not each.stands_by and not each.has_come
                ]
                self.job.kill(starting)
                for each in starting:
                    if not self.job.has_ended:
                        self.make((f"find {each.number} dead", partial(self.job.bury, each)))
                if not supervisor.is_out and not self.job.has_ended:
                    self.make(("look", partial(self.job.look, supervisor)))

    # ---- hosts are lost, come and leave

    @precondition(lambda self: len(self.hosts()) > 1)
    @rule(which=st.integers(0, 9))
    def a_host_vanishes(self, which: int) -> None:
        self.lose_host(self.one_of_hosts(which))

    @precondition(lambda self: len(self.hosts()) > 1)
    @rule(
        exchange=st.sampled_from((LAST, FIRST_STEP + 1, FIRST_STEP, PLACE, STATE)),
        among_newcomers=st.booleans(),
        are_newcomers_heard_late=st.booleans(),
        seed=st.integers(0, 9999),
    )
    def a_host_vanishes_from_an_exchange(
        self, exchange: int, among_newcomers: bool, are_newcomers_heard_late: bool, seed: int
    ) -> None:
        """All have arrived there, and some have passed it."""
        random = Random(seed)
        for _ in range(200):
            for group in self.job.groups.values():
                there = [self.job.processes[each] for each in group.call.members]
                are_there = all(
                    each.is_alive and each.group is group and each.passed == exchange
                    for each in there
                )
                if (
                    are_there
                    and group.num_arrived() > exchange
                    and (group.call.joining or not among_newcomers)
                ):
                    for each in random.sample(there, random.randrange(len(there))):
                        if self.job.can_pass(each, group):
                            move = partial(self.job.go_through, each)
                            self.make((f"{each.number} passes", move))
                    if are_newcomers_heard_late:
                        self.hear_late(group)
                    self.lose_host(random.choice(there).host)
                    return
            self.go_on(self.job.moves, 1, random)

    @precondition(lambda self: len(self.hosts()) > 1)
    @rule(which=st.integers(0, 9))
    def a_host_is_cut_off_from_the_store(self, which: int) -> None:
        """It counts as lost while its processes go on."""
        host = self.one_of_hosts(which)
        if self.num_left_without(host) > 0 or not self.spares_the_last:
            self.make((f"miss host {host}", partial(self.job.tell, HostLost(host))))

    @precondition(lambda self: len(self.hosts()) > 1)
    @rule(which=st.integers(0, 9), other=st.integers(0, 9))
    def two_hosts_are_cut_off(self, which: int, other: int) -> None:
        pair = {self.one_of_hosts(which), self.one_of_hosts(other)}
        if len(pair) == 2:
            self.job.cut(*pair)

    @precondition(lambda self: len(self.hosts()) > 1)
    @rule(which=st.integers(0, 9), then_vanishes=st.booleans())
    def a_host_is_asked_to_leave(self, which: int, then_vanishes: bool) -> None:
        host = self.one_of_hosts(which)
        self.make((f"host {host} leaves", partial(self.job.tell, HostLeaves(host))))
        if then_vanishes and host in self.hosts():
            self.lose_host(host)

    @precondition(lambda self: not self.job.is_alone and self.next_host < 9)
    @rule(wanted=st.integers(1, 2), num_spares=st.integers(0, 1))
    def a_host_comes(self, wanted: int, num_spares: int) -> None:
        self.job.coming.append(HostCame(self.next_host, wanted, num_spares))
        self.next_host += 1

    def hear_late(self, group: Group) -> None:
        if group.call.joining:
            self.job.slow_line = group.call.joining[0]

    def hosts(self) -> list[int]:
        """Whose loss can be told."""
        if self.job.has_ended:
            return []
        supervisors = self.job.supervisors.values()
        gone = self.job.roll.gone
        return [s.number for s in supervisors if s.is_alive and s.number not in gone]

    def one_of_hosts(self, which: int) -> int:
        hosts = self.hosts()
        return hosts[which % len(hosts)]

    def lose_host(self, number: int) -> None:
        if self.num_left_without(number) > 0 or not self.spares_the_last:
            self.job.vanish(self.job.supervisors[number])

    # ---- how

    def num_left_without(self, host: int | None) -> int:
        gone = self.job.roll.gone
        return sum(
            each.is_alive and each.history is not None
            for each in self.job.processes.values()
            if each.host != host and each.host not in gone
        )

    @property
    def num_left(self) -> int:
        return self.num_left_without(None)

    @property
    def num_spared(self) -> int:
        """Without any that live little would be left to see."""
        return 1 if self.spares_the_last else 0

    def go_on(self, moves: Callable[[], Iterable[Move]], count: int, random: Random) -> None:
        for _ in range(count):
            if self.job.has_ended or not (possible := list(moves())):
                return
            self.make(random.choice(possible))

    def make(self, move: Move) -> None:
        name, do = move
        note(name)
        self.is_sound = False
        do()
        self.is_sound = True

    def teardown(self) -> None:
        if not self.is_sound:
            return  # it has failed already
        note("no more faults")
        self.job.slow_host = self.job.slow_line = None
        for _ in range(400):
            if self.job.has_ended:
                return
            if self.job.is_at_rest():
                self.job.check_rest()
                self.check_progress()
                return
            self.do_all_that_is_possible()
        raise AssertionError("they do not come to rest")

    def check_progress(self) -> None:
        num_steps, call = len(self.job.steps), self.job.roll.call
        for _ in range(12):
            self.do_all_that_is_possible()
        assert self.job.roll.call == call
        goes_on = call is not None and not call.is_paused
        assert (len(self.job.steps) > num_steps) == goes_on

    def do_all_that_is_possible(self) -> None:
        for name in [name for name, _ in self.job.moves()]:
            if (move := dict(self.job.moves()).get(name)) is not None:
                self.make((name, move))


RandomHistories.TestCase.settings = settings(max_examples=150, stateful_step_count=25)
# Where one fails, time is needed to make it small.
TestRandomHistories = pytest.mark.timeout(400)(RandomHistories.TestCase)


# ---- what seldom happens by chance

some_time = st.integers(0, 150)
seeds = st.integers(0, 9999)


def training(*wanted: int, are_losses_seen: bool = True) -> RandomHistories:
    """All have settled and train."""
    machine = RandomHistories()
    machine.start(
        wanted=list(wanted),
        num_spares=0,
        min_hosts=1,
        num_more=1,
        num_rounds=25,
        spares_the_last=True,
        are_losses_seen=are_losses_seen,
    )
    assert machine.job.roll.is_settled
    return machine


def all_come_to_their_last_exchange(machine: RandomHistories, random: Random) -> list[Process]:
    """Of a world with newcomers; these come last."""
    for _ in range(3000):
        group = machine.job.groups[machine.job.roll.generation]
        if group.call.joining and group.num_arrived() > LAST:
            there = [machine.job.processes[each] for each in group.call.members]
            if all(each.passed == LAST for each in there):
                return there
        machine.go_on(machine.job.moves, 1, random)
    raise AssertionError("nobody comes")


def pass_it(machine: RandomHistories, process: Process) -> None:
    machine.make((f"{process.number} passes", partial(machine.job.go_through, process)))


@given(are_losses_seen=st.booleans(), soon=st.integers(0, 25), seed=seeds)
@settings(max_examples=40)
def test_a_host_that_leaves_vanishes_before_its_last_step_is_done(
    are_losses_seen: bool, soon: int, seed: int
) -> None:
    machine = training(2, 1, 1, are_losses_seen=are_losses_seen)
    machine.make(("host 1 leaves", partial(machine.job.tell, HostLeaves(1))))
    machine.go_on(machine.job.moves, soon, Random(seed))
    machine.job.vanish(machine.job.supervisors[1])
    machine.teardown()


@given(lost=st.integers(0, 1), later=some_time, seed=seeds)
@settings(max_examples=40)
def test_a_newcomer_has_heard_the_last_word_of_a_world_and_nobody_else_has(
    lost: int, later: int, seed: int
) -> None:
    machine, random = training(1, 1), Random(seed)
    machine.job.coming.append(HostCame(2, 1))
    *there, newcomer = all_come_to_their_last_exchange(machine, random)
    pass_it(machine, newcomer)
    machine.job.slow_line = newcomer.number
    machine.job.vanish(machine.job.supervisors[lost])
    machine.make(("it is missed", partial(machine.job.tell, HostLost(lost))))
    machine.make(("the other misses it", partial(machine.job.leave, there[1 - lost])))
    machine.go_on(machine.job.moves, later, random)
    machine.teardown()
    assert not newcomer.is_alive


@given(lost=st.integers(0, 1), later=some_time, seed=seeds)
@settings(max_examples=40)
def test_one_dies_as_a_world_has_settled_and_its_newcomer_is_heard_late(
    lost: int, later: int, seed: int
) -> None:
    machine, random = training(3), Random(seed)
    machine.job.kill([machine.job.processes[2]])
    there = all_come_to_their_last_exchange(machine, random)
    for each in there:
        if each is not there[lost]:
            pass_it(machine, each)
    machine.job.slow_line = there[-1].number
    machine.job.kill([there[lost]])
    machine.make(("found", partial(machine.job.bury, there[lost])))
    machine.go_on(machine.job.moves, later, random)
    machine.teardown()
    assert not there[-1].is_alive


@given(lost=st.integers(0, 2), later=st.integers(0, 60), seed=seeds)
@settings(max_examples=100)
def test_a_host_vanishes_in_the_middle_of_a_step(lost: int, later: int, seed: int) -> None:
    machine, random = training(1, 1, 1), Random(seed)
    machine.go_on(machine.job.moves_of_processes, later, random)
    machine.job.vanish(machine.job.supervisors[lost])
    machine.make(("it is missed", partial(machine.job.tell, HostLost(lost))))
    machine.go_on(machine.job.moves, later, random)
    machine.teardown()


@given(host=st.integers(0, 2), later=some_time, seed=seeds)
@settings(max_examples=40)
def test_a_host_leaves_without_a_step_undone(host: int, later: int, seed: int) -> None:
    machine = training(1, 2, 1)
    machine.make((f"host {host} leaves", partial(machine.job.tell, HostLeaves(host))))
    machine.go_on(machine.job.moves, later, Random(seed))
    machine.teardown()
    assert host in machine.job.roll.gone
    assert machine.job.roll.last_torn == 0
