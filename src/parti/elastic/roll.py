"""All that is known of a job's hosts and processes as one value, and what it asks of each host.

Whoever sees the newest roll alone, and none before it, knows all that has to be done. How one roll
follows from another is in `membership`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum


class Role(Enum):
    """What a process is there for."""

    FIRST = "first"
    """To be in the first world."""
    NEWCOMER = "newcomer"
    """To be let into a training that is under way."""
    SPARE = "spare"
    """To stand by until another is lost."""


class Stage(Enum):
    """Of a host's time in the job."""

    STAYS = "stays"
    LEAVES = "leaves"
    """It was asked to leave, and does when it can."""
    DEPARTS = "departs"
    """The newest world was called without it. Its members finish their step of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process."""

    number: int
    """No other of the job gets it, at no time."""
    place: int
    """Which of its host's processes it is, or was started in the place of."""
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A supervisor and its processes."""

    number: int
    wanted: int
    """How many of its processes there shall be in the world."""
    members: tuple[Member, ...]
    """Those that shall run, by number."""
    arriving: frozenset[int]
    """Those it came with that are not ready yet. The others of this host wait for them."""
    failed_starts: int = 0
    """In a row."""
    stage: Stage = Stage.STAYS

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(each.number for each in self.members)

    def without(self, lost: frozenset[int]) -> Host:
        members = tuple(each for each in self.members if each.number not in lost)
        return replace(self, members=members, arriving=self.arriving - lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A world, and all that its members have to know of it."""

    generation: int
    members: tuple[int, ...]
    """In the order of their ranks."""
    joining: tuple[int, ...] = ()
    """Those of them who have to be given the state."""
    is_torn: bool = False
    """Somebody of the world before is gone. The others leave it at once, and otherwise at the end
    of their step."""
    is_paused: bool = False
    """They are of too few hosts. They settle, and then stand still until the next call."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """What is known of all hosts and processes of the job."""

    min_hosts: int
    max_hosts: int
    is_closed: bool = False
    """The first world waits for no more hosts."""
    hosts: tuple[Host, ...] = ()
    """In the order in which they came."""
    gone: frozenset[int] = field(default_factory=frozenset)
    """Numbers of hosts that are out."""
    call: Call | None = None
    """The world that was called last."""
    last_torn: int = 0
    """The newest generation that was called because somebody was gone."""
    is_settled: bool = False
    """The world counts: its members are the holders."""
    holders: tuple[int, ...] = ()
    """Who has the state, dead ones left out; in the order of seniority."""
    waiting: tuple[int, ...] = ()
    """Who is ready to join, the longest first."""
    starting: frozenset[int] = field(default_factory=frozenset)
    """Processes that are on their way."""
    passed_over: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Worlds that were given up and may have settled before: generation, and who was to join."""
    next_member: int = 0
    end: str | None = None
    """Why the job cannot go on."""

    @property
    def generation(self) -> int:
        """Of the world that was called last; 0 if none was."""
        return 0 if self.call is None else self.call.generation

    @property
    def called(self) -> tuple[int, ...]:
        return () if self.call is None else self.call.members

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Who was called and does not have the state yet, as far as is known."""
        return tuple(each for each in self.called if each not in self.holders)

    @property
    def ready(self) -> tuple[int, ...]:
        """Who would be let in now."""
        may_come = {
            number
            for host in self.hosts
            if host.stage is Stage.STAYS and not host.arriving
            for number in host.numbers
        }
        return tuple(each for each in self.waiting if each in may_come)

    def host(self, number: int) -> Host | None:
        return next((host for host in self.hosts if host.number == number), None)

    def find(self, member: int) -> tuple[Host, Member] | None:
        """A member and its host."""
        pairs = ((host, each) for host in self.hosts for each in host.members)
        return next((pair for pair in pairs if pair[1].number == member), None)

    def hosts_of(self, members: Iterable[int]) -> Iterator[Host]:
        """Each once."""
        wanted = frozenset(members)
        return (host for host in self.hosts if wanted & host.numbers)

    def with_host(self, host: Host) -> Roll:
        hosts = (host if each.number == host.number else each for each in self.hosts)
        return replace(self, hosts=tuple(hosts))

    def without_hosts(self, numbers: Iterable[int]) -> Roll:
        out = frozenset(numbers)
        hosts = tuple(host for host in self.hosts if host.number not in out)
        return replace(self, hosts=hosts, gone=self.gone | out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What one host's supervisor has to see to."""

    members: tuple[Member, ...]
    """All of its processes that shall run. One that does not yet is started as what it says. One
    that stands by and is no spare any more is activated. Any other that runs is killed."""
    call: Call | None
    """The world to announce to those who do not stand by."""
    last_torn: int
    """Who is in a world of a smaller number leaves it at once, wherever it is."""
    is_out: bool
    """The host has no part in the job: it was given up, has left, or was never let in."""
    end: str | None
    """Why the job is over for all."""


def orders(roll: Roll, host: int) -> Orders:
    """What a host has to do, from the newest roll alone."""
    found = roll.host(host)
    return Orders(
        members=() if found is None else found.members,
        call=roll.call,
        last_torn=roll.last_torn,
        is_out=found is None,
        end=roll.end,
    )
