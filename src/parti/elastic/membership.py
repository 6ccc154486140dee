"""Who is in the world, and what follows when somebody dies or comes. Pure: events in, actions out.

    PROCESS                              WORLD
    started ── Here ──▶ waiting          generation g: called ── all Entered ──▶ settled
       │                   │                   ▲                        │
       └── Died ──▶ gone ◀─┴── Died ───────────┴──── Died: g + 1 ◀──────┘
                                               (waiting and settled: g + 1 with those who wait)

A world is *called* with a list of its members and counts from the moment one of them says that it
has settled there: then all of them have. Those of the world that counts are the *holders*: each of
them has the whole state. A newer world is called from holders who live, so that nothing is healed
from anybody who may not have it, and with newcomers only when nothing else is under way.

Words take their time: a world that is given up, because one has died, may have settled before that
is heard. The holders lose nothing by it. Its newcomers train from there, while the others go on
without them, and a process cannot begin a second time: they are given up for others. All this
relies on hearing what a process has said in the order in which it said it, and before its death.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

MAX_FAILED_STARTS = 3
"""So many replacements in a row may die before they have come as far as to wait for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """What is known of all processes of the job."""

    wanted: int
    """How many there shall be in the world."""
    generation: int = 0
    """Of the world that was called last; none so far."""
    called: tuple[int, ...] = ()
    """Its members, in the order of their ranks."""
    is_settled: bool = False
    """It counts: its members are the holders."""
    holders: tuple[int, ...] = ()
    """Who has the state, dead ones left out; in the order of seniority."""
    waiting: tuple[int, ...] = ()
    """Who is ready to join, the longest first."""
    starting: frozenset[int] = field(default_factory=frozenset)
    """Processes that are on their way."""
    spares: tuple[int, ...] = ()
    """Processes that are warm, or on the way to it, and stand by."""
    passed_over: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Worlds that were given up and may have settled before: generation, and who was to join."""
    next_member: int = 0
    failed_starts: int = 0


@dataclass(frozen=True, slots=True)
class Here:
    """A process is ready to be in a world."""

    member: int


@dataclass(frozen=True, slots=True)
class Entered:
    """A member has settled in a world, which it can only together with all others."""

    member: int
    generation: int


@dataclass(frozen=True, slots=True)
class Died:
    """A process was killed, or was found frozen and ended."""

    member: int


Event: TypeAlias = Here | Entered | Died


@dataclass(frozen=True, slots=True)
class Call:
    """Tell these processes that they are the next world."""

    generation: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    """Those of them who have to be given the state."""
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process in the place of the lost one."""

    member: int
    in_place_of: int


@dataclass(frozen=True, slots=True)
class Activate:
    """Have a spare take the place of the lost one, and start another spare."""

    member: int
    in_place_of: int
    next_spare: int


@dataclass(frozen=True, slots=True)
class End:
    """Nobody is left who has the state."""

    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Something a person should know."""

    words: str


Action: TypeAlias = Call | Start | Activate | End | Tell


def begin(wanted: int, num_spares: int = 0) -> Roll:
    """All are on their way. Spares have the numbers behind those of the first world."""
    total = wanted + num_spares
    return Roll(
        wanted=wanted,
        starting=frozenset(range(wanted)),
        spares=tuple(range(wanted, total)),
        next_member=total,
    )


def advance(roll: Roll, event: Event) -> tuple[Roll, tuple[Action, ...]]:
    """What follows from one event."""
    match event:
        case Here():
            return _here(roll, event.member)
        case Entered():
            return _entered(roll, event)
        case Died():
            return _died(roll, event.member)
        case _:
            assert_never(event)


def _here(roll: Roll, member: int) -> tuple[Roll, tuple[Action, ...]]:
    if member not in roll.starting:
        return roll, ()  # it was given up meanwhile
    roll = replace(
        roll,
        starting=roll.starting - {member},
        waiting=(*roll.waiting, member),
        failed_starts=0,
    )
    if roll.generation == 0:
        if len(roll.waiting) < roll.wanted:
            return roll, ()
        # The first world: ranks are in the order in which the processes were started.
        first = tuple(sorted(roll.waiting))
        roll = replace(roll, generation=1, called=first, holders=first, waiting=())
        return roll, (Call(1, first, (), "all are here"),)
    return _admit(roll)


def _entered(roll: Roll, event: Entered) -> tuple[Roll, tuple[Action, ...]]:
    if event.generation != roll.generation:
        return _give_up_joined(roll, event.generation)
    if roll.is_settled:
        return roll, ()
    # Nobody settles alone: where one has, all that were called have the state. Whoever says so was
    # in the worlds before, and would have said of them that they had settled.
    roll = replace(roll, is_settled=True, holders=roll.called, passed_over=())
    return _admit(roll)


def _give_up_joined(roll: Roll, generation: int) -> tuple[Roll, tuple[Action, ...]]:
    """A world of the past had settled: its newcomers are no newcomers any more, and the others are
    ahead of them."""
    actions: list[Action] = []
    for member in dict(roll.passed_over).get(generation, ()):
        roll, more = _died(roll, member)
        actions.extend(more)
    return roll, tuple(actions)


def _admit(roll: Roll) -> tuple[Roll, tuple[Action, ...]]:
    """Call those who wait, when nothing else is under way."""
    if not roll.is_settled or not roll.waiting:
        return roll, ()
    members = (*roll.holders, *roll.waiting)
    call = Call(roll.generation + 1, members, roll.waiting, _count(roll.waiting, "ready to join"))
    roll = replace(roll, generation=call.generation, called=members, is_settled=False, waiting=())
    return roll, (call,)


def _died(roll: Roll, member: int) -> tuple[Roll, tuple[Action, ...]]:
    if member in roll.spares:
        # The next that is needed is started when it is.
        return replace(roll, spares=_without(roll.spares, member)), ()
    was_called = member in roll.called
    if not was_called and member not in roll.waiting and member not in roll.starting:
        return roll, ()  # it was given up before
    failed = roll.failed_starts + (member in roll.starting)
    holders = _without(roll.holders, member)
    # Who was called to join and had not settled has to wait again.
    joining = tuple(each for each in roll.called if each not in roll.holders and each != member)
    roll = replace(
        roll,
        holders=holders,
        waiting=_without(roll.waiting, member),
        starting=roll.starting - {member},
        failed_starts=failed,
    )
    if not holders:
        return roll, (End("no process is left that holds the state of the training"),)
    actions: list[Action] = []
    if failed < MAX_FAILED_STARTS:
        roll, action = _replace(roll, member)
        actions.append(action)
    elif failed == MAX_FAILED_STARTS:
        actions.append(Tell(f"{failed} replacements in a row have died as they started: no more"))
    if was_called:
        generation = roll.generation + 1
        roll = replace(
            roll,
            generation=generation,
            called=holders,
            is_settled=False,
            waiting=(*joining, *roll.waiting),
            passed_over=(*roll.passed_over, *([(roll.generation, joining)] if joining else [])),
        )
        actions.insert(0, Call(generation, holders, (), _count((member,), "lost")))
    return roll, tuple(actions)


def _replace(roll: Roll, lost: int) -> tuple[Roll, Action]:
    """A spare where there is one, or a process from scratch."""
    new = roll.next_member
    if not roll.spares:
        roll = replace(roll, starting=roll.starting | {new}, next_member=new + 1)
        return roll, Start(new, lost)
    spare, *others = roll.spares
    roll = replace(
        roll,
        starting=roll.starting | {spare},
        spares=(*others, new),
        next_member=new + 1,
    )
    return roll, Activate(spare, lost, new)


def _without(members: tuple[int, ...], lost: int) -> tuple[int, ...]:
    return tuple(each for each in members if each != lost)


def _count(members: tuple[int, ...], what: str) -> str:
    return f"{len(members)} process{'es' if len(members) > 1 else ''} {what}"
