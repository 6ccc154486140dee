"""Who is in the world, and what follows when somebody dies or comes. Pure: an event makes a new
roll out of the last one.

    PROCESS                              WORLD
    started ── Here ──▶ waiting          generation g: called ── all Entered ──▶ settled
       │                   │                   ▲                        │
       └── Died ──▶ gone ◀─┴── Died ───────────┴──── Died: g + 1 ◀──────┘
                                               (waiting and settled: g + 1 with those who wait)

A world is *called* with a list of its members and counts from the moment one of them says that it
has settled there: then all of them have the state. Those of the world that counts are the
*holders*. A newer world is called from holders who live, so that nothing is healed from anybody who
may not have it, and with newcomers only when nothing else is under way.

A call is *torn* when somebody of the world before is gone, a process or all of a host: the others
leave that world wherever they are, and bring a half-done step to one end together. It is orderly
when somebody comes or leaves: the step is finished first, also by those who leave. Who was left out
of a world never holds the state again, as that world may have gone on without it.

Words take their time: a world that is given up, because one has died, may have settled before that
is heard. The holders lose nothing by it. Its newcomers train from there, while the others go on
without them, and a process cannot begin a second time: they are given up for others. All this
relies on hearing what a process has said in the order in which it said it, and before its death.
When a host is lost, what its processes have said may be lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from parti.elastic.roll import Call, Host, Member, Role, Roll, Stage

MAX_FAILED_STARTS = 3
"""So many replacements on a host may die in a row before they have come as far as to wait for a
place."""


@dataclass(frozen=True, slots=True)
class Here:
    """A process is ready to be in a world."""

    member: int


@dataclass(frozen=True, slots=True)
class Entered:
    """A member has settled in a world, where all others have the state then."""

    member: int
    generation: int


@dataclass(frozen=True, slots=True)
class Died:
    """A process was killed, or was found frozen and ended, or could not be started."""

    member: int


@dataclass(frozen=True, slots=True)
class HostCame:
    """A supervisor is there and can start so many processes."""

    host: int
    wanted: int
    num_spares: int = 0


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host vanished, supervisor and all."""

    host: int


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """A host was asked to leave."""

    host: int


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Members of one host cannot reach those of the other, although both are alive."""

    host: int
    other: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The first world shall not wait for more hosts."""


Event: TypeAlias = Here | Entered | Died | HostCame | HostLost | HostLeaves | Unreachable | Closed
Next: TypeAlias = tuple[Roll, tuple[str, ...]]
"""The roll that follows, and what a person should know."""


def begin(min_hosts: int, max_hosts: int) -> Roll:
    """Nobody is there yet."""
    return Roll(min_hosts=min_hosts, max_hosts=max_hosts)


def of_one_host(wanted: int, num_spares: int = 0) -> Roll:
    """A job of host 0 alone. Spares have the numbers behind those of the first world."""
    return advance(begin(1, 1), HostCame(0, wanted, num_spares))[0]


def advance(roll: Roll, event: Event) -> Next:
    """What follows from one event."""
    if roll.end is not None:
        return roll, ()
    match event:
        case Here():
            return _here(roll, event.member), ()
        case Entered():
            return _entered(roll, event)
        case Died():
            return _died(roll, frozenset({event.member}))
        case HostCame():
            return _host_came(roll, event)
        case HostLost():
            return _drop(roll, event.host, f"host {event.host} lost"), ()
        case HostLeaves():
            return _host_leaves(roll, event.host)
        case Unreachable():
            return _unreachable(roll, event)
        case Closed():
            return _call_next(replace(roll, is_closed=True)), ()
        case _:
            assert_never(event)


# ---- processes


def _here(roll: Roll, member: int) -> Roll:
    found = roll.find(member)
    if found is None or member not in roll.starting:
        return roll  # it was given up meanwhile
    host, _ = found
    roll = roll.with_host(replace(host, arriving=host.arriving - {member}, failed_starts=0))
    starting = roll.starting - {member}
    return _call_next(replace(roll, starting=starting, waiting=(*roll.waiting, member)))


def _entered(roll: Roll, event: Entered) -> Next:
    if event.generation != roll.generation:
        return _died(roll, _too_late(roll, event))
    if roll.is_settled or event.member not in roll.called:
        return roll, ()
    # Where one has settled, all that were called have the state. Whoever says so was in the worlds
    # before, and would have said of them that they had settled.
    roll = replace(roll, is_settled=True, holders=roll.called, passed_over=())
    return _call_next(_see_off(roll)), ()


def _too_late(roll: Roll, event: Entered) -> frozenset[int]:
    """A world of the past had settled: its newcomers are no newcomers any more, and the others are
    ahead of them."""
    given_up = frozenset(dict(roll.passed_over).get(event.generation, ()))
    # Between hosts one may hear the last word of a world that the others miss.
    is_new = event.member in roll.waiting or event.member in roll.newcomers
    if is_new and event.generation < roll.generation:
        given_up |= {event.member}
    return given_up


def _died(roll: Roll, lost: frozenset[int]) -> Next:
    """Processes are gone, or given up. Others take their places on the same host."""
    found = [pair for each in sorted(lost) if (pair := roll.find(each)) is not None]
    took_part = [(host, each) for host, each in found if each.role is not Role.SPARE]
    failed = roll.starting & lost
    why = _count(len(took_part), "lost")
    if roll.call is None and took_part:
        return _end(roll), ()
    roll = _without(roll, frozenset(each.number for _, each in found), why)
    words: list[str] = []
    for host, member in took_part:
        if roll.end is None:
            roll, more = _replace(roll, host.number, member, member.number in failed)
            words += more
    return _call_next(roll), tuple(words)


def _replace(roll: Roll, number: int, lost: Member, has_failed: bool) -> Next:
    """By a spare where there is one, or a process from scratch."""
    host = roll.host(number)
    if host is None:
        return roll, ()
    host = replace(host, failed_starts=host.failed_starts + has_failed)
    if host.stage is not Stage.STAYS or host.failed_starts >= MAX_FAILED_STARTS:
        words = f"{host.failed_starts} replacements in a row have died as they started: no more"
        told = () if host.stage is not Stage.STAYS else (words,)
        roll = roll.with_host(host)
        if all(each.role is Role.SPARE for each in host.members):
            roll = _drop(roll, number, f"host {number} has no process left")
        return roll, told
    spare = next((each for each in host.members if each.role is Role.SPARE), None)
    if spare is None:
        taking = Member(number=roll.next_member, place=lost.place, role=Role.NEWCOMER)
        members = (*host.members, taking)
    else:
        taking = replace(spare, place=lost.place, role=Role.NEWCOMER)
        others = (taking if each is spare else each for each in host.members)
        members = (*others, replace(spare, number=roll.next_member))
    roll = roll.with_host(replace(host, members=members))
    starting = roll.starting | {taking.number}
    return replace(roll, starting=starting, next_member=roll.next_member + 1), ()


# ---- hosts


def _host_came(roll: Roll, event: HostCame) -> Next:
    if roll.host(event.host) is not None or event.host in roll.gone:
        return roll, (f"host {event.host} is refused: this number was given to another",)
    if len(roll.hosts) >= roll.max_hosts:
        num_hosts = f"{len(roll.hosts)} host{'s' if len(roll.hosts) > 1 else ''}"
        return roll, (f"host {event.host} is refused: {num_hosts} of {roll.max_hosts} are there",)
    role = Role.FIRST if roll.call is None else Role.NEWCOMER
    first, last = roll.next_member, event.wanted - 1
    active = [Member(number=first + i, place=i, role=role) for i in range(event.wanted)]
    spares = [
        Member(number=first + event.wanted + i, place=last, role=Role.SPARE)
        for i in range(event.num_spares)
    ]
    numbers = frozenset(each.number for each in active)
    host = Host(
        number=event.host, wanted=event.wanted, members=(*active, *spares), arriving=numbers
    )
    return replace(
        roll,
        hosts=(*roll.hosts, host),
        starting=roll.starting | numbers,
        next_member=first + len(host.members),
    ), ()


def _host_leaves(roll: Roll, number: int) -> Next:
    host = roll.host(number)
    if host is None or host.stage is not Stage.STAYS:
        return roll, ()
    if not host.numbers & {*roll.called}:
        return _drop(roll, number, f"host {number} left"), ()
    leaving = [each.number for each in roll.hosts if each.stage is Stage.LEAVES]
    if not _can_do_without(roll, {*leaving, number}):
        words = f"too few would be left with the state of the training (min_hosts={roll.min_hosts})"
        return roll, (f"host {number} cannot leave: {words}",)
    return _call_next(roll.with_host(replace(host, stage=Stage.LEAVES))), ()


def _unreachable(roll: Roll, event: Unreachable) -> Next:
    pair = [host for host in roll.hosts if host.number in (event.host, event.other)]
    if len(pair) < 2:
        return roll, ()
    # `min` takes the first of those that are equal.
    junior_first = reversed(pair)
    loser = min(junior_first, key=lambda host: len(host.numbers & {*roll.holders}))
    why = f"hosts {event.host} and {event.other} cannot reach each other"
    roll = _drop(roll, loser.number, f"{why}: {loser.number} given up")
    return roll, (f"{why}; host {loser.number} is given up",)


def _drop(roll: Roll, number: int, why: str) -> Roll:
    """A host is out, with all its processes at once."""
    host = roll.host(number)
    if host is None:
        return roll
    # Before its record, by which it is seen whether the others miss its members.
    roll = _without(roll, host.numbers, why)
    return _call_next(roll.without_hosts({number}))


def _see_off(roll: Roll) -> Roll:
    """Nobody waits any more for hosts that were left out."""
    return roll.without_hosts({host.number for host in roll.hosts if host.stage is Stage.DEPARTS})


def _can_do_without(roll: Roll, leaving: set[int]) -> bool:
    """Whether a world without these hosts is big enough, and has somebody with the state."""
    out = {each for host in roll.hosts if host.number in leaving for each in host.numbers}
    hosts = roll.hosts_of({*roll.called, *roll.ready} - out)
    return bool({*roll.called} - out) and len(list(hosts)) >= roll.min_hosts


# ---- worlds


def _call_next(roll: Roll) -> Roll:
    """Call those who come and leave out those who leave, when nothing else is under way."""
    if roll.end is not None:
        return roll
    if roll.call is None:
        return _call_first(roll)
    for host in roll.hosts:
        if host.stage is Stage.LEAVES and not host.numbers & {*roll.called}:
            return _drop(roll, host.number, f"host {host.number} left")
    if not roll.is_settled:
        return roll
    leaving: set[int] = set()
    for host in roll.hosts:
        if host.stage is Stage.LEAVES and _can_do_without(roll, {*leaving, host.number}):
            leaving.add(host.number)
    joining = roll.ready
    if not leaving and not joining:
        return roll
    reasons = [f"host {number} leaves" for number in sorted(leaving)]
    if joining:
        reasons.append(_count(len(joining), "ready to join"))
    roll = _let_go(roll, leaving)
    waiting = tuple(each for each in roll.waiting if each not in joining)
    return _call(replace(roll, waiting=waiting), joining, "; ".join(reasons), is_torn=False)


def _call_first(roll: Roll) -> Roll:
    """Ranks are in the order of the hosts' numbers, and in which their processes were started."""
    num_hosts = len(roll.hosts)
    if num_hosts < roll.min_hosts or not (roll.is_closed or num_hosts >= roll.max_hosts):
        return roll
    if roll.starting or not roll.waiting:
        return roll
    hosts = sorted(roll.hosts, key=lambda host: host.number)
    holders = tuple(each for host in hosts for each in sorted(host.numbers & {*roll.waiting}))
    return _call(replace(roll, holders=holders, waiting=()), (), "all are here", is_torn=False)


def _call(roll: Roll, joining: tuple[int, ...], why: str, *, is_torn: bool) -> Roll:
    members = (*roll.holders, *joining)
    call = Call(
        generation=roll.generation + 1,
        members=members,
        joining=joining,
        is_torn=is_torn,
        is_paused=len(list(roll.hosts_of(members))) < roll.min_hosts,
        why=why,
    )
    last_torn = call.generation if is_torn else roll.last_torn
    return replace(roll, call=call, last_torn=last_torn, is_settled=False)


def _let_go(roll: Roll, leaving: set[int]) -> Roll:
    """The next world is without these hosts, and waits for their part of the step."""
    for host in roll.hosts:
        if host.number in leaving:
            others = host.numbers - {*roll.called}
            roll = _without(roll, others, "")
            members = tuple(each for each in host.members if each.number not in others)
            roll = roll.with_host(replace(host, members=members, stage=Stage.DEPARTS))
            holders = tuple(each for each in roll.holders if each not in host.numbers)
            roll = replace(roll, holders=holders)
    return roll


def _without(roll: Roll, lost: frozenset[int], why: str) -> Roll:
    """Members are gone, all at once. Those who miss them are the next world."""
    if not lost:
        return roll
    departing = {
        each for host in roll.hosts if host.stage is Stage.DEPARTS for each in host.numbers
    }
    are_missed = bool(lost & {*roll.called, *departing})
    # Who was called to join and had not settled has to wait again.
    joining = tuple(each for each in roll.newcomers if each not in lost)
    roll = replace(
        roll,
        hosts=tuple(host.without(lost) for host in roll.hosts),
        holders=tuple(each for each in roll.holders if each not in lost),
        waiting=tuple(each for each in roll.waiting if each not in lost),
        starting=roll.starting - lost,
    )
    if not are_missed:
        return roll
    if not roll.holders:
        return _end(roll)
    passed_over = (*roll.passed_over, *([(roll.generation, joining)] if joining else []))
    roll = replace(roll, waiting=(*joining, *roll.waiting), passed_over=passed_over)
    return _see_off(_call(roll, (), why, is_torn=True))


def _end(roll: Roll) -> Roll:
    return replace(roll, end="no process is left that holds the state of the training")


def _count(number: int, what: str) -> str:
    return f"{number} process{'es' if number != 1 else ''} {what}"
