"""Reads the directory of a run: `run.json`, the events of its processes, and their commits."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from parti.doctor.book import Book, read_book

_OF_HOST = ("started", "seen", "lost")
_OF_ALL = (*_OF_HOST, "called", "settled")
"""Where hosts come and go, none of them has seen all worlds."""
STOPPED_CODE = 75
"""With which a run ends that is to be resumed."""


class State(Enum):
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"
    """Its supervisor ended without a word."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a file of events."""

    kind: str
    at_s: float
    """Since the supervisor's start."""
    content: Mapping[str, object]

    def number(self, name: str, default: int = -1) -> int:
        value = self.content.get(name)
        return value if isinstance(value, int) else default

    def seconds(self, name: str) -> float | None:
        value = self.content.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    def text(self, name: str) -> str:
        value = self.content.get(name)
        return value if isinstance(value, str) else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self.content.get(name)
        if not isinstance(value, list):
            return ()
        return tuple(each for each in value if isinstance(each, int))

    def is_true(self, name: str) -> bool:
        return self.content.get(name) is True

    def parts(self, name: str) -> tuple[Event, ...]:
        """A list of objects."""
        value = self.content.get(name)
        found = value if isinstance(value, list) else []
        return tuple(Event(name, self.at_s, each) for each in found if isinstance(each, dict))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The members of a generation, in the order of their ranks."""

    members: tuple[int, ...]
    joining: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that is known of one job; of a directory that was used again, of the last."""

    directory: Path
    facts: Mapping[str, object]
    """What `run.json` says."""
    events: tuple[Event, ...]
    """Of this job, without `began`."""
    began: Event | None
    state: State
    books: Mapping[int, Book]
    """By member."""

    @property
    def exit_code(self) -> int | None:
        """None while it has not ended, or where nobody knows how."""
        ended = next((e for e in self.events if e.kind == "ended"), None)
        value = self.facts.get("exit_code") if ended is None else ended.content.get("exit_code")
        return value if isinstance(value, int) else None

    @property
    def was_stopped(self) -> bool:
        """It saved its state when it was asked to stop, and can be resumed."""
        return self.exit_code == STOPPED_CODE and any(self.of("stopped"))

    @property
    def num_hosts(self) -> int:
        return _num_hosts(self.facts)

    @property
    def worlds(self) -> dict[int, World]:
        """By generation. Where worlds are not called, the first is the only one."""
        size = 0 if self.began is None else self.began.number("world_size", 0)
        worlds = {1: World(members=tuple(range(size)))} if size else {}
        for event in self.of("called"):
            worlds[event.number("generation")] = World(
                members=event.numbers("members"), joining=event.numbers("joining")
            )
        return worlds

    @property
    def lost(self) -> frozenset[int]:
        """Processes that have ended and not as they should, or went with their host."""
        worlds = self.worlds
        newest = worlds[max(worlds)].members if worlds else ()
        called = {member for world in worlds.values() for member in world.members}
        return frozenset(event.number("member") for event in self.of("lost")) | (called - {*newest})

    @property
    def timed_books(self) -> list[Book]:
        """Those whose clock is that of the events: of the first host."""
        elsewhere = {event.number("member") for event in self.of("started") if event.text("host")}
        return [book for member, book in self.books.items() if member not in elsewhere]

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind in kinds)

    def since_start_s(self, at_s: float) -> float:
        """From the host's monotonic clock to the time of the events."""
        start_s = None if self.began is None else self.began.seconds("clock_s")
        return at_s - (start_s or 0.0)

    @property
    def now_s(self) -> float | None:
        """On the clock of the events; None where that clock is not this host's."""
        now_s = self.since_start_s(time.monotonic())
        is_here = self.began is not None and self.began.text("host") == platform.node()
        return now_s if is_here and now_s >= (self.events[-1].at_s if self.events else 0) else None


def read_run(directory: Path) -> Run:
    """What the files of a run say. Those that are not there say nothing."""
    facts = _facts(directory / "run.json")
    path = directory / "events.jsonl"
    began, events = _last_job(_events(path))
    if began is not None and _num_hosts(facts) > 1:
        if facts.get("elastic") is True:
            events = _merged([*events, *_elsewhere(directory, began, _OF_ALL)])
        else:
            elsewhere = _elsewhere(directory, began, _OF_HOST)
            events = [_by_rank(event) for event in [*events, *elsewhere]]
        events.sort(key=lambda event: event.at_s)
    job = None if began is None else began.text("job")
    return Run(
        directory=directory,
        facts=facts,
        events=tuple(events),
        began=began,
        state=_state(path, facts, events, job),
        books=_books(directory, job),
    )


def _num_hosts(facts: Mapping[str, object]) -> int:
    hosts = facts.get("hosts")
    return len(hosts) if isinstance(hosts, list) else 1


def _facts(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _events(path: Path) -> list[Event]:
    """The lines that are whole: a full disk may have cut one."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            at_s, kind = content.get("at_s"), content.get("kind")
            if isinstance(at_s, (int, float)) and isinstance(kind, str):
                found.append(Event(kind, float(at_s), content))
    return found


def _last_job(lines: list[Event]) -> tuple[Event | None, list[Event]]:
    """How the last job of a file began, and what happened in it."""
    starts = [number for number, event in enumerate(lines) if event.kind == "began"]
    return (lines[starts[-1]], lines[starts[-1] + 1 :]) if starts else (None, lines)


def _elsewhere(directory: Path, began: Event, kinds: Sequence[str]) -> Iterator[Event]:
    """What the supervisors of other hosts tell of the same job, by the clock of the first."""
    for path in directory.glob("events-node*.jsonl"):
        there, events = _last_job(_events(path))
        if there is None or there.text("job") != began.text("job"):
            continue
        later_s = (there.seconds("time") or 0.0) - (began.seconds("time") or 0.0)
        for event in events:
            if event.kind in kinds:
                content = {**event.content, "host": there.text("host")}
                yield Event(event.kind, event.at_s + later_s, content)


def _merged(events: Sequence[Event]) -> list[Event]:
    """Worlds that several supervisors tell of, once. One that was gone, or late, knows only some of
    them."""
    found: list[Event] = []
    told: set[tuple[str, int]] = set()
    for event in sorted(events, key=lambda event: event.at_s):
        about = (event.kind, event.number("generation"))
        if event.kind not in ("called", "settled") or about not in told:
            found.append(event)
        told.add(about)
    return found


def _by_rank(event: Event) -> Event:
    """Each of several supervisors counts its own processes; the books there go by ranks."""
    if "member" not in event.content:
        return event
    return Event(event.kind, event.at_s, {**event.content, "member": event.content.get("rank")})


def _state(
    path: Path, facts: Mapping[str, object], events: Sequence[Event], job: str | None
) -> State:
    # A name that is used again has the facts of the run before until its processes are started.
    has_ended = facts.get("ended") is not None and job in (None, facts.get("job"))
    if has_ended or any(event.kind == "ended" for event in events):
        return State.ENDED
    return State.RUNNING if _is_held(path) else State.GONE


def _is_held(path: Path) -> bool:
    """A supervisor holds a lock on its events for as long as it lives."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)


def _books(directory: Path, job: str | None) -> Mapping[int, Book]:
    books = {}
    for path in directory.glob("commits-*.bin"):
        found = re.fullmatch(r"commits-(\d+)\.bin", path.name)
        book = None if found is None else read_book(path, int(found[1]), job)
        if book is not None:
            books[book.member] = book
    return dict(sorted(books.items()))
