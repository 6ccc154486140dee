"""Who is in the world: a table of histories, and the page of the documents that is drawn from the
same function. Random histories are in `test_elastic_processes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parti.elastic.membership import (
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
    of_one_host,
)
from parti.elastic.roll import Call, Member, Role, Roll, Stage, orders

# ---- events and what follows, in words


def event_of(words: str) -> Event:
    match words.split():
        case ["here", member]:
            return Here(int(member))
        case ["entered", member, "in", generation]:
            return Entered(int(member), int(generation))
        case ["died", member]:
            return Died(int(member))
        case ["host", host, "came", "with", wanted]:
            return HostCame(int(host), int(wanted))
        case ["host", host, "came", "with", wanted, "and", num_spares, "to", "spare"]:
            return HostCame(int(host), int(wanted), int(num_spares))
        case ["host", host, "lost"]:
            return HostLost(int(host))
        case ["host", host, "leaves"]:
            return HostLeaves(int(host))
        case ["host", host, "misses", other]:
            return Unreachable(int(host), int(other))
        case ["closed"]:
            return Closed()
    raise ValueError(words)


def call_in_words(call: Call) -> str:
    how = f"{' torn' if call.is_torn else ''}{' paused' if call.is_paused else ''}"
    stay = " ".join(str(each) for each in call.members if each not in call.joining)
    join = "".join(f" + {each}" for each in call.joining)
    return f"call {call.generation}{how}: {stay}{join}"


def what_follows(before: Roll, event: Event) -> tuple[Roll, list[str]]:
    """The next roll, and what it asks of the hosts that the last did not."""
    after, told = advance(before, event)
    lines = [] if after.call in (None, before.call) else [call_in_words(after.call)]
    for host in before.hosts:
        asked = orders(after, host.number)
        if asked.is_out:
            lines.append(f"host {host.number} is out")
            continue
        kept = {each.number for each in asked.members}
        dead = {event.member} if isinstance(event, Died) else set()
        lines += [f"kill {each}" for each in sorted(host.numbers - kept - dead)]
    was = {each.number: each for host in before.hosts for each in host.members}
    for host in after.hosts:
        for member in orders(after, host.number).members:
            lines += start_in_words(host.number, member, was.get(member.number))
    return after, [*lines, *("tell" for _ in told), *(["end"] if after.end != before.end else [])]


def start_in_words(host: int, member: Member, was: Member | None) -> Iterator[str]:
    if was is None:
        place = " to stand by" if member.role is Role.SPARE else f".{member.place}"
        yield f"start {member.number} at {host}{place}"
    elif was.role is not member.role:
        yield f"wake {member.number} at {host}.{member.place}"


def play(roll: Roll, history: str) -> tuple[Roll, list[str]]:
    """What follows from each event of a history, in its own form: a line each."""
    lines = []
    for line in history.strip().splitlines():
        event = line.split("->")[0].strip()
        roll, follows = what_follows(roll, event_of(event))
        lines.append(f"{event} -> {'; '.join(follows)}" if follows else event)
    return roll, lines


def settled(*wanted: int, num_spares: int = 0, min_hosts: int = 1, more: int = 0) -> Roll:
    """World 1 counts, and all are there: so many processes on each host, and there is room for more
    hosts."""
    roll = begin(min_hosts, len(wanted) + more)
    for host, each in enumerate(wanted):
        roll, _ = advance(roll, HostCame(host, each, num_spares))
    roll, _ = advance(roll, Closed())
    for member in sorted(roll.starting):
        roll, _ = advance(roll, Here(member))
    return advance(roll, Entered(0, 1))[0]


# ---- histories

HISTORIES: dict[str, tuple[Roll, str]] = {
    "the first world is in the order of the start": (
        of_one_host(3),
        """
        here 2
        here 0
        here 1         -> call 1: 0 1 2
        entered 2 in 1
        entered 0 in 1
        """,
    ),
    "one dies, the others go on, another comes": (
        settled(3),
        """
        died 0         -> call 2 torn: 1 2; start 3 at 0.0
        entered 2 in 2
        here 3         -> call 3: 1 2 + 3
        entered 3 in 3
        died 1         -> call 4 torn: 2 3; start 4 at 0.1
        """,
    ),
    "who is ready waits until the others have settled": (
        settled(3),
        """
        died 2         -> call 2 torn: 0 1; start 3 at 0.2
        here 3
        entered 1 in 1
        entered 1 in 2 -> call 3: 0 1 + 3
        """,
    ),
    "two come while one is let in": (
        settled(4),
        """
        died 3         -> call 2 torn: 0 1 2; start 4 at 0.3
        died 2         -> call 3 torn: 0 1; start 5 at 0.2
        died 1         -> call 4 torn: 0; start 6 at 0.1
        entered 0 in 4
        here 6         -> call 5: 0 + 6
        here 4
        here 5
        entered 6 in 5 -> call 6: 0 6 + 4 + 5
        """,
    ),
    "a world is lost before it has settled": (
        settled(3),
        """
        died 1         -> call 2 torn: 0 2; start 3 at 0.1
        died 2         -> call 3 torn: 0; start 4 at 0.2
        entered 0 in 2
        entered 0 in 3
        """,
    ),
    "a newcomer dies as it joins": (
        settled(2),
        """
        died 1         -> call 2 torn: 0; start 2 at 0.1
        entered 0 in 2
        here 2         -> call 3: 0 + 2
        died 2         -> call 4 torn: 0; start 3 at 0.1
        entered 0 in 4
        """,
    ),
    "a newcomer whose world is lost waits again": (
        settled(3),
        """
        died 2         -> call 2 torn: 0 1; start 3 at 0.2
        entered 0 in 2
        here 3         -> call 3: 0 1 + 3
        died 1         -> call 4 torn: 0; start 4 at 0.1
        here 4
        entered 0 in 4 -> call 5: 0 + 3 + 4
        """,
    ),
    "a newcomer whose world is lost had settled there": (
        settled(3),
        """
        died 2         -> call 2 torn: 0 1; start 3 at 0.2
        entered 0 in 2
        here 3         -> call 3: 0 1 + 3
        died 1         -> call 4 torn: 0; start 4 at 0.1
        entered 3 in 3 -> kill 3; start 5 at 0.2
        entered 0 in 3
        entered 0 in 4
        here 4         -> call 5: 0 + 4
        died 3
        here 5
        entered 4 in 5 -> call 6: 0 4 + 5
        """,
    ),
    "the last that has the state dies": (
        settled(2),
        """
        died 0 -> call 2 torn: 1; start 2 at 0.0
        here 2
        died 1 -> end
        """,
    ),
    "one dies before the first world": (
        of_one_host(2),
        """
        here 0
        died 1 -> end
        """,
    ),
    "a spare takes the place": (
        settled(2, num_spares=1),
        """
        died 1         -> call 2 torn: 0; wake 2 at 0.1; start 3 at 0 to stand by
        entered 0 in 2
        here 2         -> call 3: 0 + 2
        """,
    ),
    "a spare dies, and is missed when one is needed": (
        of_one_host(2, num_spares=1),
        """
        here 0
        died 2
        here 1         -> call 1: 0 1
        entered 0 in 1
        died 1         -> call 2 torn: 0; start 3 at 0.1
        """,
    ),
    "one that is ready dies": (
        settled(2),
        """
        died 1         -> call 2 torn: 0; start 2 at 0.1
        here 2
        died 2         -> start 3 at 0.1
        entered 0 in 2
        """,
    ),
    "replacements die as they start": (
        settled(3),
        """
        died 2         -> call 2 torn: 0 1; start 3 at 0.2
        died 3         -> start 4 at 0.2
        died 4         -> start 5 at 0.2
        died 5         -> tell
        entered 0 in 2
        died 1         -> call 3 torn: 0; tell
        """,
    ),
    "one that has come gives the next ones their chances back": (
        settled(2),
        """
        died 1 -> call 2 torn: 0; start 2 at 0.1
        died 2 -> start 3 at 0.1
        died 3 -> start 4 at 0.1
        here 4
        died 4 -> start 5 at 0.1
        died 5 -> start 6 at 0.1
        died 6 -> start 7 at 0.1
        died 7 -> tell
        """,
    ),
    "late and strange words change nothing": (
        of_one_host(2),
        """
        entered 0 in 0
        here 7
        here 0
        here 0
        here 1         -> call 1: 0 1
        entered 0 in 1
        entered 1 in 1
        entered 1 in 9
        here 1
        died 7
        died 1         -> call 2 torn: 0; start 2 at 0.1
        died 1
        entered 1 in 1
        """,
    ),
    "the first world is in the order of the hosts": (
        begin(2, 3),
        """
        host 1 came with 1 and 1 to spare -> start 0 at 1.0; start 1 at 1 to stand by
        here 0
        host 0 came with 2                -> start 2 at 0.0; start 3 at 0.1
        here 3
        here 2
        host 2 came with 1                -> start 4 at 2.0
        here 4                            -> call 1: 2 3 0 4
        """,
    ),
    "the first world waits for more hosts until it is closed": (
        begin(2, 3),
        """
        host 0 came with 1 -> start 0 at 0.0
        closed
        here 0
        host 1 came with 1 -> start 1 at 1.0
        here 1             -> call 1: 0 1
        """,
    ),
    "all are ready when it is closed": (
        begin(1, 3),
        """
        host 0 came with 1 -> start 0 at 0.0
        here 0
        closed             -> call 1: 0
        """,
    ),
    "a host is lost before the first world": (
        begin(1, 2),
        """
        host 0 came with 1 -> start 0 at 0.0
        host 1 came with 1 -> start 1 at 1.0
        here 0
        closed
        host 1 lost        -> call 1: 0; host 1 is out
        """,
    ),
    "a host is one too many, or has the number of another": (
        settled(1, 1, more=1),
        """
        host 1 came with 1 -> tell
        host 2 came with 1 -> start 2 at 2.0
        host 3 came with 1 -> tell
        host 1 lost        -> call 2 torn: 0; host 1 is out
        host 1 came with 1 -> tell
        host 3 came with 1 -> start 3 at 3.0
        """,
    ),
    "a host comes to a training": (
        settled(2, 1, more=1),
        """
        host 2 came with 2 -> start 3 at 2.0; start 4 at 2.1
        here 4
        died 1             -> call 2 torn: 0 2; start 5 at 0.1
        entered 0 in 2
        here 5             -> call 3: 0 2 + 5
        here 3
        entered 3 in 3
        """,
    ),
    "a host comes, and one of its processes fails to start": (
        settled(1, more=1),
        """
        host 1 came with 3 -> start 1 at 1.0; start 2 at 1.1; start 3 at 1.2
        here 1
        here 3
        died 2             -> call 2: 0 + 1 + 3; start 4 at 1.1
        entered 0 in 2
        here 4             -> call 3: 0 1 3 + 4
        """,
    ),
    "a host is lost at once": (
        settled(2, 2, 1),
        """
        host 1 lost    -> call 2 torn: 0 1 4; host 1 is out
        died 3
        here 3
        entered 4 in 2
        """,
    ),
    "a process is replaced on its host": (
        settled(2, 2, num_spares=1),
        """
        died 3         -> call 2 torn: 0 1 4; wake 5 at 1.0; start 6 at 1 to stand by
        entered 0 in 2
        here 5         -> call 3: 0 1 4 + 5
        entered 5 in 3
        died 1         -> call 4 torn: 0 4 5; wake 2 at 0.1; start 7 at 0 to stand by
        """,
    ),
    "too few hosts stand still until another is there": (
        settled(1, 1, min_hosts=2),
        """
        host 1 lost        -> call 2 torn paused: 0; host 1 is out
        entered 0 in 2
        host 2 came with 1 -> start 2 at 2.0
        here 2             -> call 3: 0 + 2
        entered 2 in 3
        """,
    ),
    "newcomers of a host that stands still are let in": (
        settled(2, 1, min_hosts=2),
        """
        host 1 lost    -> call 2 torn paused: 0 1; host 1 is out
        died 1         -> call 3 torn paused: 0; start 3 at 0.1
        entered 0 in 3
        here 3         -> call 4 paused: 0 + 3
        entered 3 in 4
        """,
    ),
    "a host leaves": (
        settled(1, 2),
        """
        host 1 leaves  -> call 2: 0
        host 1 leaves
        entered 0 in 2 -> host 1 is out
        died 1
        """,
    ),
    "a host leaves as another comes": (
        settled(1, 1, min_hosts=2, more=1),
        """
        host 1 leaves      -> tell
        host 2 came with 1 -> start 2 at 2.0
        here 2             -> call 2: 0 1 + 2
        host 1 leaves
        entered 2 in 2     -> call 3: 0 2
        entered 0 in 3     -> host 1 is out
        """,
    ),
    "a host cannot leave with the state": (
        settled(1, more=1),
        """
        host 1 came with 1 -> start 1 at 1.0
        host 0 leaves      -> tell
        here 1             -> call 2: 0 + 1
        host 0 leaves
        entered 1 in 2     -> call 3: 1
        entered 1 in 3     -> host 0 is out
        """,
    ),
    "a host leaves when what is under way is done": (
        settled(1, 2, 1),
        """
        died 1         -> call 2 torn: 0 2 3; start 4 at 1.0
        host 1 leaves
        here 4
        died 2         -> call 3 torn: 0 3; host 1 is out
        entered 0 in 3
        """,
    ),
    "a host may leave, and then cannot": (
        settled(1, 1, 1, more=1),
        """
        host 1 leaves      -> call 2: 0 2
        host 0 leaves
        host 2 lost        -> call 3 torn: 0; host 1 is out; host 2 is out
        entered 0 in 3
        host 3 came with 1 -> start 3 at 3.0
        here 3             -> call 4: 0 + 3
        entered 3 in 4     -> call 5: 3
        entered 3 in 5     -> host 0 is out
        """,
    ),
    "one of a host that leaves is lost before its last step is done": (
        settled(1, 2),
        """
        host 1 leaves  -> call 2: 0
        died 2         -> call 3 torn: 0; host 1 is out
        entered 0 in 3
        """,
    ),
    "a host that leaves is lost, and so is a host that stays": (
        settled(1, 1, 1),
        """
        host 1 leaves -> call 2: 0 2
        host 2 lost   -> call 3 torn: 0; host 1 is out; host 2 is out
        host 1 lost
        """,
    ),
    "a host that is not in the world leaves at once": (
        settled(1, more=1),
        """
        host 1 came with 1 -> start 1 at 1.0
        host 1 leaves      -> host 1 is out
        here 1
        """,
    ),
    "hosts cannot reach each other, and the smaller one goes": (
        settled(1, 2),
        """
        host 1 misses 0 -> call 2 torn: 1 2; host 0 is out; tell
        host 0 misses 1
        """,
    ),
    "hosts of one size cannot reach each other, and the junior goes": (
        settled(2, 2, 1),
        """
        host 1 misses 0 -> call 2 torn: 0 1 4; host 1 is out; tell
        host 2 misses 1
        host 2 misses 0 -> call 3 torn: 0 1; host 2 is out; tell
        """,
    ),
    "starts fail on one host": (
        settled(1, 1),
        """
        died 1         -> call 2 torn: 0; start 2 at 1.0
        died 2         -> start 3 at 1.0
        died 3         -> start 4 at 1.0
        died 4         -> host 1 is out; tell
        entered 0 in 2
        died 0         -> end
        """,
    ),
    "starts fail on one host, of which some are left": (
        settled(1, 2, num_spares=1),
        """
        died 3         -> call 2 torn: 0 2; wake 4 at 1.1; start 5 at 1 to stand by
        died 4         -> wake 5 at 1.1; start 6 at 1 to stand by
        died 5         -> wake 6 at 1.1; start 7 at 1 to stand by
        died 6         -> tell
        entered 0 in 2
        died 2         -> call 3 torn: 0; host 1 is out; tell
        died 0         -> end
        """,
    ),
    "the last host with the state is lost": (
        settled(1, 1, more=1),
        """
        host 2 came with 1 -> start 2 at 2.0
        host 1 lost        -> call 2 torn: 0; host 1 is out
        here 2
        host 0 lost        -> host 0 is out; end
        host 3 came with 1
        """,
    ),
    "a newcomer has heard that its world had settled, and the others have not": (
        settled(1, 1, more=1),
        """
        host 2 came with 1 -> start 2 at 2.0
        here 2             -> call 2: 0 1 + 2
        host 0 lost        -> call 3 torn: 1; host 0 is out
        entered 1 in 3     -> call 4: 1 + 2
        entered 2 in 2     -> call 5 torn: 1; kill 2; start 3 at 2.0
        """,
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history(name: str) -> None:
    roll, history = HISTORIES[name]
    expected = [" ".join(line.split()) for line in history.strip().splitlines()]
    assert play(roll, history)[1] == expected


# ---- what a host sees of it


def test_who_sees_the_newest_roll_alone_knows_what_to_do() -> None:
    """A supervisor that saw nothing between two losses."""
    roll, _ = play(settled(1, 2, num_spares=1), "died 2\nentered 0 in 2\nhere 4\ndied 3")
    here, there = orders(roll, 0), orders(roll, 1)
    assert [(each.number, each.place, each.role) for each in there.members] == [
        (4, 0, Role.NEWCOMER),
        (5, 1, Role.NEWCOMER),
        (6, 1, Role.SPARE),
    ]
    assert (
        here.call
        == there.call
        == Call(generation=4, members=(0,), is_torn=True, why="1 process lost")
    )


@pytest.mark.parametrize(
    ("history", "last_torn"),
    [
        ("host 2 came with 1\nhere 3", 0),
        ("host 1 leaves", 0),
        ("host 2 came with 1\nhere 3\ndied 1", 3),
        ("died 1\nentered 0 in 2\nhost 2 came with 1\nhere 4", 2),
    ],
)
def test_whether_to_leave_a_world_at_once_is_known_later_too(history: str, last_torn: int) -> None:
    """A worker in world 1 does, where a later one was torn; in an orderly one it does not."""
    roll, _ = play(settled(1, 2, more=1), history)
    assert orders(roll, 0).last_torn == last_torn


def test_a_host_that_was_lost_is_out_and_has_nothing_to_do() -> None:
    roll, _ = play(settled(1, 1), "host 1 lost")
    asked = orders(roll, 1)
    assert asked.is_out and not asked.members
    assert orders(roll, 7).is_out, "it was never there"


def test_when_nobody_has_the_state_all_hosts_know() -> None:
    roll, _ = play(settled(1, 1, more=1), "host 2 came with 1\nhost 1 lost\nhost 0 lost")
    assert orders(roll, 2).end == "no process is left that holds the state of the training"


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
    "who was ready dies": lambda roll: Died(news[0]) if (news := candidates(roll)) else None,
    "who starts dies": lambda roll: Died(min(roll.starting)) if roll.starting else None,
}

SITUATIONS_OF_HOSTS = {
    "hosts 0 1 2 have settled": "",
    "0 1 have settled, 3 is starting": "host 2 lost\nentered 0 in 2\nhost 3 came with 1",
    "0 1 are called with newcomers of 3": (
        "host 2 lost\nentered 0 in 2\nhost 3 came with 1\nhere 6"
    ),
    "0 1 are called without 2, which finishes its step": "host 2 leaves",
    "0 stands still": "host 1 lost\nhost 2 lost\nentered 0 in 3",
    "0 stands still, 3 is starting": (
        "host 1 lost\nhost 2 lost\nentered 0 in 3\nhost 3 came with 1"
    ),
}
"""From a world of two processes on each of three hosts, of which there shall be two at least."""

OCCASIONS_OF_HOSTS: dict[str, Callable[[Roll], Event | None]] = {
    "who starts is ready": lambda roll: Here(min(roll.starting)) if roll.starting else None,
    "they have settled": lambda roll: None if roll.is_settled else Entered(0, roll.generation),
    "host 1 is lost": lambda roll: HostLost(1) if roll.host(1) else None,
    "host 2 is lost": lambda roll: HostLost(2) if roll.host(2) else None,
    "host 3 is lost": lambda roll: HostLost(3) if roll.host(3) else None,
    "host 1 is asked to leave": lambda roll: HostLeaves(1) if roll.host(1) else None,
    "0 and the last cannot reach each other": lambda roll: (
        Unreachable(0, roll.hosts[-1].number) if len(roll.hosts) > 1 else None
    ),
}


def candidates(roll: Roll) -> list[int]:
    return [each for each in (*roll.called, *roll.waiting) if each not in roll.holders]


def table(
    start: Roll, situations: dict[str, str], occasions: dict[str, Callable[[Roll], Event | None]]
) -> Iterator[str]:
    yield f"| | {' | '.join(occasions)} |"
    yield f"|---{'|---' * len(occasions)}|"
    for situation, history in situations.items():
        roll, _ = play(start, history)
        cells = []
        for occasion in occasions.values():
            event = occasion(roll)
            follows = [] if event is None else what_follows(roll, event)[1]
            cells.append("" if event is None else "<br>".join(follows) or "–")
        yield f"| {situation} | {' | '.join(cells)} |"


def state_of(roll: Roll) -> str:
    if roll.end is not None:
        return "Over"
    if roll.call is None:
        return "Gathering"
    if roll.is_settled:
        return "Paused" if roll.call.is_paused else "Settled"
    if any(host.stage is Stage.DEPARTS for host in roll.hosts):
        return "Leaving"
    return "Joining" if roll.newcomers else "Called"


def events_of(roll: Roll) -> Iterator[tuple[str, Event]]:
    for member in sorted(roll.starting):
        yield "one is ready", Here(member)
        yield "one that starts dies", Died(member)
    if roll.call is not None and not roll.is_settled:
        yield "all have settled", Entered(roll.called[0], roll.generation)
    for member in roll.holders:
        yield "one that has the state dies", Died(member)
    for member in candidates(roll):
        yield "a newcomer dies" if member in roll.called else "one that waits dies", Died(member)
    for host in roll.hosts:
        yield "a host is lost", HostLost(host.number)
        yield "a host leaves", HostLeaves(host.number)
    if len(roll.hosts) < 3:
        yield "a host comes", HostCame(roll.next_member, 1)


def diagram() -> Iterator[str]:
    """All that can follow, from looking at every roll that seven events or fewer lead to."""
    start, _ = play(begin(2, 3), "host 0 came with 1\nhost 1 came with 1\nclosed")
    rolls, seen, arrows = [start], {start}, dict[tuple[str, str], dict[str, None]]()
    for _ in range(7):
        before, rolls = rolls, []
        for roll in before:
            for name, event in events_of(roll):
                after, _ = advance(roll, event)
                arrow = state_of(roll), state_of(after)
                if arrow[0] != arrow[1] or after.call != roll.call:
                    arrows.setdefault(arrow, {})[name] = None
                if after.end is None and after not in seen:
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
    parts = {
        "states": diagram(),
        "table": table(settled(3), SITUATIONS, OCCASIONS),
        "hosts": table(
            settled(2, 2, 2, min_hosts=2, more=1), SITUATIONS_OF_HOSTS, OCCASIONS_OF_HOSTS
        ),
    }
    for name, lines in parts.items():
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
