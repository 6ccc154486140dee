"""Who is in the world: a table of histories, random ones driven through a model of the processes,
and the page of the documents that is drawn from the same function.

The model knows the truth, which the supervisor does not: who lives, who has the state, who has
arrived where. Its processes talk as real ones do. Words on one line keep their order and may take
any time; an exchange is passed by all or by none of those who live; a process leaves a world when
one who is gone has not arrived, or, before all are connected, when it is called to a newer one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from parti.elastic.membership import (
    MAX_FAILED_STARTS,
    Action,
    Activate,
    Call,
    Died,
    End,
    Entered,
    Event,
    Here,
    Roll,
    Start,
    Tell,
    advance,
    begin,
)

# ---- events and actions in words


def event_of(words: str) -> Event:
    match words.split():
        case ["here", member]:
            return Here(int(member))
        case ["entered", member, "in", generation]:
            return Entered(int(member), int(generation))
        case ["died", member]:
            return Died(int(member))
    raise ValueError(words)


def words_of(action: Action) -> str:
    match action:
        case Call():
            stay = " ".join(str(each) for each in action.members if each not in action.joining)
            join = "".join(f" + {each}" for each in action.joining)
            return f"call {action.generation}: {stay}{join}"
        case Start():
            return f"start {action.member} for {action.in_place_of}"
        case Activate():
            new = f"start {action.next_spare} to stand by"
            return f"wake {action.member} for {action.in_place_of}, {new}"
        case Tell():
            return "tell"
        case End():
            return "end"


def play(roll: Roll, history: str) -> tuple[Roll, list[str]]:
    """What follows from each event of a history, in its own form: a line each."""
    lines = []
    for line in history.strip().splitlines():
        event = line.split("->")[0].strip()
        roll, actions = advance(roll, event_of(event))
        lines.append(f"{event} -> {'; '.join(map(words_of, actions))}" if actions else event)
    return roll, lines


def settled(wanted: int, num_spares: int = 0) -> Roll:
    """World 1 counts, and all are there."""
    history = [*(f"here {member}" for member in range(wanted)), "entered 0 in 1"]
    return play(begin(wanted, num_spares), "\n".join(history))[0]


# ---- histories

HISTORIES: dict[str, tuple[Roll, str]] = {
    "the first world is in the order of the start": (
        begin(3),
        """
        here 2
        here 0
        here 1           -> call 1: 0 1 2
        entered 2 in 1
        entered 0 in 1
        """,
    ),
    "one dies, the others go on, another comes": (
        settled(3),
        """
        died 0           -> call 2: 1 2; start 3 for 0
        entered 2 in 2
        here 3           -> call 3: 1 2 + 3
        entered 3 in 3
        died 1           -> call 4: 2 3; start 4 for 1
        """,
    ),
    "who is ready waits until the others have settled": (
        settled(3),
        """
        died 2           -> call 2: 0 1; start 3 for 2
        here 3
        entered 1 in 1
        entered 1 in 2   -> call 3: 0 1 + 3
        """,
    ),
    "two come while one is let in": (
        settled(4),
        """
        died 3           -> call 2: 0 1 2; start 4 for 3
        died 2           -> call 3: 0 1; start 5 for 2
        died 1           -> call 4: 0; start 6 for 1
        entered 0 in 4
        here 6           -> call 5: 0 + 6
        here 4
        here 5
        entered 6 in 5   -> call 6: 0 6 + 4 + 5
        """,
    ),
    "a world is lost before it has settled": (
        settled(3),
        """
        died 1           -> call 2: 0 2; start 3 for 1
        died 2           -> call 3: 0; start 4 for 2
        entered 0 in 2
        entered 0 in 3
        """,
    ),
    "a newcomer dies as it joins": (
        settled(2),
        """
        died 1           -> call 2: 0; start 2 for 1
        entered 0 in 2
        here 2           -> call 3: 0 + 2
        died 2           -> call 4: 0; start 3 for 2
        entered 0 in 4
        """,
    ),
    "a newcomer whose world is lost waits again": (
        settled(3),
        """
        died 2           -> call 2: 0 1; start 3 for 2
        entered 0 in 2
        here 3           -> call 3: 0 1 + 3
        died 1           -> call 4: 0; start 4 for 1
        here 4
        entered 0 in 4   -> call 5: 0 + 3 + 4
        """,
    ),
    "a newcomer whose world is lost had settled there": (
        settled(3),
        """
        died 2           -> call 2: 0 1; start 3 for 2
        entered 0 in 2
        here 3           -> call 3: 0 1 + 3
        died 1           -> call 4: 0; start 4 for 1
        entered 3 in 3   -> start 5 for 3
        entered 0 in 3
        entered 0 in 4
        here 4           -> call 5: 0 + 4
        died 3
        here 5
        entered 4 in 5   -> call 6: 0 4 + 5
        """,
    ),
    "the last that has the state dies": (
        settled(2),
        """
        died 0           -> call 2: 1; start 2 for 0
        here 2
        died 1           -> end
        """,
    ),
    "one dies before the first world": (
        begin(2),
        """
        here 0
        died 1           -> end
        """,
    ),
    "a spare takes the place": (
        settled(2, num_spares=1),
        """
        died 1           -> call 2: 0; wake 2 for 1, start 3 to stand by
        entered 0 in 2
        here 2           -> call 3: 0 + 2
        """,
    ),
    "a spare dies, and is missed when one is needed": (
        begin(2, num_spares=1),
        """
        here 0
        died 2
        here 1           -> call 1: 0 1
        entered 0 in 1
        died 1           -> call 2: 0; start 3 for 1
        """,
    ),
    "one that is ready dies": (
        settled(2),
        """
        died 1           -> call 2: 0; start 2 for 1
        here 2
        died 2           -> start 3 for 2
        entered 0 in 2
        """,
    ),
    "replacements die as they start": (
        settled(3),
        """
        died 2           -> call 2: 0 1; start 3 for 2
        died 3           -> start 4 for 3
        died 4           -> start 5 for 4
        died 5           -> tell
        entered 0 in 2
        died 1           -> call 3: 0; tell
        """,
    ),
    "one that has come gives the next ones their chances back": (
        settled(2),
        """
        died 1           -> call 2: 0; start 2 for 1
        died 2           -> start 3 for 2
        died 3           -> start 4 for 3
        here 4
        died 4           -> start 5 for 4
        died 5           -> start 6 for 5
        died 6           -> start 7 for 6
        died 7           -> tell
        """,
    ),
    "late and strange words change nothing": (
        begin(2),
        """
        entered 0 in 0
        here 7
        here 0
        here 0
        here 1           -> call 1: 0 1
        entered 0 in 1
        entered 1 in 1
        entered 1 in 9
        here 1
        died 7
        died 1           -> call 2: 0; start 2 for 1
        died 1
        entered 1 in 1
        """,
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history(name: str) -> None:
    roll, history = HISTORIES[name]
    expected = [" ".join(line.split()) for line in history.strip().splitlines()]
    assert play(roll, history)[1] == expected


# ---- a model of processes

# The exchanges of a world, in the order in which its members come to them.
MEETING, PLACE, STATE, LAST, FIRST_STEP = range(5)
"""In every step two more: its gradients, and its end."""

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

    def have_all_arrived(self, exchange: int) -> bool:
        return all(self.arrived.get(each, 0) > exchange for each in self.call.members)


@dataclass(eq=False)
class Process:
    number: int
    stands_by: bool = False
    is_alive: bool = True
    is_dead_for_all: bool = False
    """Its supervisor knows."""
    has_come: bool = False
    heard: deque[Call | Activate] = field(default_factory=deque)
    said: deque[Event] = field(default_factory=deque)
    newest: Call | None = None
    left: int = 0
    """Generation of the world it was in last."""
    group: Group | None = None
    passed: int = 0
    history: tuple[Step, ...] | None = None
    """The steps in its weights; None without any state of the training."""
    torn: tuple[Step, Group] | None = None
    """A step whose update has begun and not come to its end, and where."""
    has_settled: bool = False
    leaves: bool = False
    """After this step, to let others in."""

    @property
    def is_called(self) -> bool:
        here = self.left if self.group is None else self.group.call.generation
        return self.newest is not None and self.newest.generation > here

    @property
    def place(self) -> tuple[int, bool]:
        assert self.history is not None
        return len(self.history), self.torn is not None


class Host:
    """All processes of a job and their supervisor, and all that must be true of them."""

    def __init__(self, wanted: int, num_spares: int) -> None:
        self.roll = begin(wanted, num_spares)
        self.processes = {
            number: Process(number, stands_by=number >= wanted)
            for number in range(wanted + num_spares)
        }
        self.groups: dict[int, Group] = {}
        self.steps: list[Step] = []
        """What was committed by anybody."""
        self.newest_settled = 0
        self.counts = 0
        """Generation of the newest world that the supervisor has heard to have settled."""
        self.starting = set(range(wanted))
        """Those that the supervisor waits for."""
        self.failed_starts = 0
        self.has_ended = self.has_given_up = False

    # ---- what can happen next, faults left out

    def moves(self) -> list[Move]:
        return [] if self.has_ended else [*self.moves_of_supervisor(), *self.moves_of_processes()]

    def moves_of_supervisor(self) -> Iterator[Move]:
        for process in self.processes.values():
            if process.is_dead_for_all:
                continue
            if process.said:
                yield f"hear {process.number}", partial(self.hear, process)
            if not process.is_alive:
                yield f"find {process.number} dead", partial(self.bury, process)

    def moves_of_processes(self) -> Iterator[Move]:
        for process in self.processes.values():
            if process.is_alive:
                for name, move in self.moves_of(process):
                    yield f"{process.number} {name}", partial(move, process)

    def moves_of(self, process: Process) -> Iterator[tuple[str, Callable[[Process], None]]]:
        if process.heard:
            yield "listens", self.listen
        if process.group is None:
            if not process.stands_by and not process.has_come:
                yield "comes", self.come
            elif process.is_called:
                yield "goes to its world", self.enter
            return
        if process.group.arrived[process.number] == process.passed:
            yield "arrives", self.arrive
        elif process.group.have_all_arrived(process.passed):
            yield "passes", self.go_through
        elif process.passed == MEETING and process.is_called:
            yield "turns back", self.leave
        elif process.passed > MEETING and self.is_one_missing(process):
            yield "misses one", self.leave

    def is_one_missing(self, process: Process) -> bool:
        assert process.group is not None
        return any(
            not self.processes[each].is_alive
            and process.group.arrived.get(each, 0) <= process.passed
            for each in process.group.call.members
        )

    # ---- the supervisor

    def hear(self, process: Process) -> None:
        event = process.said.popleft()
        if isinstance(event, Here):
            self.failed_starts = 0
            self.starting.remove(event.member)
        if isinstance(event, Entered) and event.generation == self.roll.generation:
            self.counts = max(self.counts, event.generation)
        self.advance(event)

    def bury(self, process: Process) -> None:
        """What it has said is heard before its end."""
        while process.said and not self.has_ended:
            self.hear(process)
        if self.has_ended:
            return
        process.is_dead_for_all = True
        if process.number in self.starting:
            self.failed_starts += 1
            self.starting.remove(process.number)
        self.advance(Died(process.number))

    def advance(self, event: Event) -> None:
        self.roll, actions = advance(self.roll, event)
        note(f"    {event} -> {'; '.join(map(words_of, actions))}")
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        match action:
            case Call():
                self.call(action)
            case Start():
                self.starting.add(action.member)
                self.add(action.member, action.in_place_of, stands_by=False)
            case Activate():
                spare = self.processes[action.member]
                assert spare.stands_by and not spare.is_dead_for_all
                spare.heard.append(action)
                self.starting.add(action.member)
                self.add(action.next_spare, action.in_place_of, stands_by=True)
            case Tell():
                assert self.failed_starts >= MAX_FAILED_STARTS
                self.has_given_up = True
            case End():
                assert not self.known_holders(), "somebody is left who has the state"
                self.has_ended = True

    def call(self, call: Call) -> None:
        called = [self.processes[each] for each in call.members]
        stay = [each for each in called if each.number not in call.joining]
        assert call.generation == max(self.groups, default=0) + 1
        assert len(set(call.members)) == len(call.members)
        assert set(call.joining) <= set(call.members)
        assert not any(each.is_dead_for_all for each in called), "a dead one is called"
        assert all(each.has_come for each in called), "one is called that is not ready"
        if not self.groups:
            for each in called:
                each.history = ()
        assert stay and called[0] in stay, "nobody is there who has the state"
        assert all(each.history is not None for each in stay), (
            "one without state counts as a holder"
        )
        joining = [each for each in called if each.number in call.joining]
        assert not any(each.has_settled for each in joining), "one that trains is called to join"
        self.groups[call.generation] = Group(call)
        for each in called:
            each.heard.append(call)

    def add(self, number: int, in_place_of: int, *, stands_by: bool) -> None:
        assert self.failed_starts < MAX_FAILED_STARTS
        assert number not in self.processes, "a number is used again"
        assert in_place_of in self.processes
        self.processes[number] = Process(number, stands_by)
        lost = self.processes[in_place_of]
        if not lost.is_dead_for_all:  # it is given up
            has_joined = lost.group is not None and lost.group.have_all_arrived(LAST)
            assert has_joined or lost.has_settled
            lost.stands_by = True

    def known_holders(self) -> list[int]:
        """Of the newest world that was heard to have settled, those not known to be dead."""
        counts = self.groups.get(max(self.counts, 1))
        members = () if counts is None else counts.call.members
        return [each for each in members if not self.processes[each].is_dead_for_all]

    # ---- the processes

    def come(self, process: Process) -> None:
        process.has_come = True
        process.said.append(Here(process.number))

    def listen(self, process: Process) -> None:
        message = process.heard.popleft()
        if isinstance(message, Call):
            assert process.number in message.members
            process.newest = message
        else:
            process.stands_by = False

    def enter(self, process: Process) -> None:
        assert process.newest is not None
        process.group, process.passed = self.groups[process.newest.generation], 0
        process.group.arrived[process.number] = 0
        is_new = process.number in process.newest.joining
        assert not (is_new and process.has_settled), "it would train with a batch of the past"
        assert is_new or process.history is not None

    def leave(self, process: Process) -> None:
        assert process.group is not None
        process.left, process.group = process.group.call.generation, None
        process.leaves = False

    def arrive(self, process: Process) -> None:
        group, number = process.group, process.number
        assert group is not None
        exchange = process.passed
        if number not in group.call.joining or exchange >= FIRST_STEP:
            if exchange == PLACE:
                group.said[exchange, number] = process.place
            elif exchange == STATE:
                assert process.history is not None
                unfinished = () if process.torn is None else (process.torn[0],)
                group.given[number] = (*process.history, *unfinished)
            elif exchange >= FIRST_STEP and exchange % 2 == 0:
                group.said[exchange, number] = len(process.history or ()), process.is_called
        group.arrived[number] = exchange + 1

    def go_through(self, process: Process) -> None:
        group, exchange = process.group, process.passed
        assert group is not None
        process.passed += 1
        said = [group.said[key] for key in sorted(group.said) if key[0] == exchange]
        if exchange == PLACE:
            assert len(set(said)) == 1, "they are not at the same place"
            if process.torn is not None:
                self.check_all_lost_are_dead(process.torn[1], group)
        elif exchange == STATE:
            if process.number in group.call.joining:
                (process.history,) = set(group.given.values())
                assert list(process.history[: len(self.steps)]) == self.steps, "it is behind"
            elif process.torn is not None:
                self.commit(process)
        elif exchange == LAST:
            process.has_settled = True
            self.newest_settled = max(self.newest_settled, group.call.generation)
            process.said.append(Entered(process.number, group.call.generation))
        elif exchange >= FIRST_STEP and exchange % 2 == 0:
            assert len({step for step, _ in said}) == 1, "they are not in the same step"
            process.torn = (len(process.history or ()), group.call.generation), group
            process.leaves = bool(group.said[exchange, group.call.members[0]][1])
        elif exchange > FIRST_STEP:
            assert group.call.generation >= self.newest_settled, "a world of the past goes on"
            self.commit(process)
            if process.leaves:
                self.leave(process)

    def check_all_lost_are_dead(self, old: Group, new: Group) -> None:
        """Their part of the update is about to be done by others."""
        for each in set(old.call.members) - set(new.call.members):
            assert not self.processes[each].is_alive, "one that lives is written for"

    def commit(self, process: Process) -> None:
        assert process.torn is not None and process.history is not None
        step = process.torn[0]
        assert step[0] == len(process.history)
        if step[0] == len(self.steps):
            self.steps.append(step)
        assert self.steps[step[0]] == step, "a step was taken in two worlds"
        process.history, process.torn = (*process.history, step), None

    # ---- at the end

    def is_at_rest(self) -> bool:
        """All that live and are wanted have settled in one world, and everybody knows."""
        alive = [each for each in self.processes.values() if each.is_alive]
        group = self.groups.get(self.roll.generation)
        return (
            group is not None
            and not any(each.said or each.heard for each in alive)
            and all(each.is_alive or each.is_dead_for_all for each in self.processes.values())
            and all(
                each.group is group and each.passed > LAST for each in alive if not each.stands_by
            )
        )

    def check_rest(self) -> None:
        roll = self.roll
        assert roll.is_settled
        assert roll.holders == roll.called == self.groups[roll.generation].call.members
        assert not roll.waiting and not roll.starting
        if not self.has_given_up:
            assert len(roll.holders) == roll.wanted
        for each in roll.holders:
            history = self.processes[each].history
            assert history is not None and list(history) == self.steps[: len(history)]
            assert len(history) >= len(self.steps) - 1


class RandomHistories(RuleBasedStateMachine):
    """At the end of each no more faults come, and all come to rest."""

    is_sound = False

    @initialize(
        wanted=st.sampled_from((3, 4, 2, 5, 1)),
        num_spares=st.integers(0, 2),
        num_rounds=st.sampled_from((15, 0)),
        spares_the_last=st.sampled_from((True, True, True, False)),
    )
    def start(self, wanted: int, num_spares: int, num_rounds: int, spares_the_last: bool) -> None:
        self.host, self.is_sound = Host(wanted, num_spares), True
        self.spares_the_last = spares_the_last
        for _ in range(num_rounds):
            self.do_all_that_is_possible()

    @rule(count=st.integers(0, 60), seed=st.integers(0, 9999))
    def anything_happens(self, count: int, seed: int) -> None:
        self.go_on(self.host.moves, count, Random(seed))

    @rule(count=st.integers(0, 60), seed=st.integers(0, 9999))
    def the_supervisor_is_slow(self, count: int, seed: int) -> None:
        self.go_on(self.host.moves_of_processes, count, Random(seed))

    @rule(count=st.integers(0, 9), seed=st.integers(0, 9999))
    def the_processes_are_slow(self, count: int, seed: int) -> None:
        self.go_on(self.host.moves_of_supervisor, count, Random(seed))

    @precondition(lambda self: self.may_lose_one)
    @rule(which=st.integers(0, 99))
    def one_is_killed(self, which: int) -> None:
        alive = [each for each in self.host.processes.values() if each.is_alive]
        self.kill(alive[which % len(alive) :][:1] if alive else [])

    @precondition(lambda self: self.may_lose_one)
    @rule(
        exchange=st.sampled_from((MEETING, PLACE, STATE, LAST, FIRST_STEP, FIRST_STEP + 1)),
        has_arrived=st.booleans(),
        among_newcomers=st.booleans(),
        is_supervisor_slow=st.booleans(),
        is_found_at_once=st.booleans(),
        seed=st.integers(0, 9999),
    )
    def one_is_killed_at(
        self,
        exchange: int,
        has_arrived: bool,
        among_newcomers: bool,
        is_supervisor_slow: bool,
        is_found_at_once: bool,
        seed: int,
    ) -> None:
        """At the next opportunity, where there is one soon."""
        random = Random(seed)
        moves = self.host.moves_of_processes if is_supervisor_slow else self.host.moves
        for _ in range(0 if self.host.has_ended else 100):
            there = [
                each
                for each in self.host.processes.values()
                if each.is_alive
                and each.group is not None
                and each.passed == exchange
                and (each.group.arrived[each.number] > exchange) == has_arrived
                and (each.group.call.joining or not among_newcomers)
            ]
            if there:
                chosen = random.choice(there)
                self.kill([chosen])
                if is_found_at_once and not chosen.is_alive:
                    self.make((f"find {chosen.number} dead", partial(self.host.bury, chosen)))
                return
            self.go_on(moves, 1, random)

    @precondition(lambda self: self.may_lose_one)
    @rule(times=st.integers(1, MAX_FAILED_STARTS + 1))
    def replacements_die_as_they_start(self, times: int) -> None:
        for _ in range(times):
            starting = [
                each
                for each in self.host.processes.values()
                if each.is_alive and not each.stands_by and not each.has_come
            ]
            self.kill(starting)
            for each in starting:
                if not self.host.has_ended:
                    self.make((f"find {each.number} dead", partial(self.host.bury, each)))

    @property
    def may_lose_one(self) -> bool:
        """Without that little would be left to see."""
        processes = self.host.processes.values()
        num_left = sum(each.is_alive and each.history is not None for each in processes)
        return num_left > (1 if self.spares_the_last else 0)

    def kill(self, processes: list[Process]) -> None:
        for each in processes:
            note(f"kill {each.number}")
            each.is_alive = False

    def go_on(self, moves: Callable[[], Iterable[Move]], count: int, random: Random) -> None:
        for _ in range(count):
            if self.host.has_ended or not (possible := list(moves())):
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
        for _ in range(300):
            if self.host.has_ended:
                return
            if self.host.is_at_rest():
                self.host.check_rest()
                return
            self.do_all_that_is_possible()
        raise AssertionError("they do not come to rest")

    def do_all_that_is_possible(self) -> None:
        names = [name for name, _ in self.host.moves()]
        assert names, "nothing goes on any more"
        for name in names:
            if (move := dict(self.host.moves()).get(name)) is not None:
                self.make((name, move))


RandomHistories.TestCase.settings = settings(max_examples=150, stateful_step_count=25)
# Where one fails, time is needed to make it small.
TestRandomHistories = pytest.mark.timeout(400)(RandomHistories.TestCase)


# ---- the page of the documents

PAGE = Path(__file__).parents[2] / "docs" / "membership.md"
UPDATE = "UPDATE_DOCUMENTS"
"""A variable of the environment, in which the page is drawn anew."""

SITUATIONS = {
    "0 1 2 have settled": "",
    "0 2 are called, 3 is starting": "died 1",
    "0 2 are called, 3 is ready": "died 1\nhere 3",
    "0 2 have settled, 3 is starting": "died 1\nentered 0 in 2",
    "0 2 are called with newcomer 3": "died 1\nentered 0 in 2\nhere 3",
    "0 is called, newcomer 3 was given up": "died 1\nentered 0 in 2\nhere 3\ndied 2",
    "0 has settled, two have died as they started": (
        "died 1\ndied 2\nentered 0 in 3\ndied 3\ndied 4"
    ),
}
"""From a world of three."""

OCCASIONS: dict[str, Callable[[Roll], Event | None]] = {
    "who starts is ready": lambda roll: Here(min(roll.starting)) if roll.starting else None,
    "they have settled": lambda roll: None if roll.is_settled else Entered(0, roll.generation),
    "the world given up had settled": lambda roll: (
        Entered(roll.passed_over[-1][1][0], roll.passed_over[-1][0]) if roll.passed_over else None
    ),
    "who has the state dies": lambda roll: Died(roll.holders[-1]),
    "who was ready dies": lambda roll: Died(news[0]) if (news := newcomers(roll)) else None,
    "who starts dies": lambda roll: Died(min(roll.starting)) if roll.starting else None,
}


def newcomers(roll: Roll) -> list[int]:
    return [each for each in (*roll.called, *roll.waiting) if each not in roll.holders]


def table() -> Iterator[str]:
    yield f"| | {' | '.join(OCCASIONS)} |"
    yield f"|---{'|---' * len(OCCASIONS)}|"
    for situation, history in SITUATIONS.items():
        roll, _ = play(settled(3), history)
        cells = []
        for occasion in OCCASIONS.values():
            event = occasion(roll)
            actions = () if event is None else advance(roll, event)[1]
            cells.append("" if event is None else "<br>".join(map(words_of, actions)) or "–")
        yield f"| {situation} | {' | '.join(cells)} |"


def state_of(roll: Roll) -> str:
    if roll.generation == 0:
        return "Gathering"
    if roll.is_settled:
        return "Settled"
    return "Joining" if set(roll.called) - set(roll.holders) else "Called"


def events_of(roll: Roll) -> Iterator[tuple[str, Event]]:
    for member in sorted(roll.starting):
        yield "one is ready", Here(member)
    if not roll.is_settled and roll.called:
        yield "all have settled", Entered(roll.called[0], roll.generation)
    for member in roll.holders:
        last = "the last that has the state dies"
        yield last if len(roll.holders) == 1 else "one that has the state dies", Died(member)
    for member in newcomers(roll):
        yield "a newcomer dies" if member in roll.called else "one that waits dies", Died(member)
    for member in sorted(roll.starting):
        yield "one that starts dies", Died(member)


def diagram() -> Iterator[str]:
    """All that can follow, from looking at every roll that eight events or fewer lead to."""
    rolls, seen, arrows = [begin(3)], {begin(3)}, dict[tuple[str, str], dict[str, None]]()
    for _ in range(8):
        before, rolls = rolls, []
        for roll in before:
            for name, event in events_of(roll):
                after, actions = advance(roll, event)
                is_over = any(isinstance(action, End) for action in actions)
                arrow = state_of(roll), "Over" if is_over else state_of(after)
                if arrow[0] != arrow[1] or any(isinstance(action, Call) for action in actions):
                    arrows.setdefault(arrow, {})[name] = None
                if not is_over and after not in seen:
                    seen.add(after)
                    rolls.append(after)
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield "    [*] --> Gathering"
    for (here, there), names in arrows.items():
        yield f"    {here} --> {there}: {', or '.join(names)}"
    yield "    Over --> [*]"
    yield "```"


def drawn(page: str) -> str:
    """The page with what lies between its marks drawn from the code."""
    for name, lines in (("states", diagram()), ("table", table())):
        head, rest = page.split(f"<!-- {name}, drawn by {Path(__file__).name} -->\n")
        tail = rest.split(f"<!-- end of {name} -->\n")[1]
        body = "".join(f"{line}\n" for line in lines)
        mark = f"<!-- {name}, drawn by {Path(__file__).name} -->\n"
        page = f"{head}{mark}{body}<!-- end of {name} -->\n{tail}"
    return page


def test_the_page_shows_what_the_code_does() -> None:
    page = PAGE.read_text()
    if os.environ.get(UPDATE):
        PAGE.write_text(drawn(page))
    else:
        assert page == drawn(page), f"draw it anew: {UPDATE}=1 pytest {Path(__file__).name}"
