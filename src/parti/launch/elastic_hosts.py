"""This host among those of a job that come and go: its part in the roll, and news of the others.

The roll (`parti.elastic.roll`) is one value in a store that all supervisors reach. Whoever has an
event to tell reads it, makes the next, and writes that if nobody else has written meanwhile: so
there is one row of rolls and nobody in charge. A host is known to live by a lease on a key of its
own; who sees it run out tells that the host is lost.

A thread owns the connection: a store that cannot be reached holds up no supervision. What is to be
told waits for it then, in order.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from parti.elastic.membership import (
    Closed,
    Event,
    HostCame,
    HostLeaves,
    HostLost,
    advance,
)
from parti.elastic.roll import Roll, Stage
from parti.errors import CommError, CommTimeout, ConfigError
from parti.launch.agreement import Agreement, Changes, Lease, LeaseLost, connect
from parti.launch.failure import Ending
from parti.launch.peers import Announcement, Kind, Layout
from parti.launch.register import Register
from parti.launch.store import bracketed, parse_url
from parti.launch.store_server import Server

JOIN_S = 600.0
"""How long a host tries to reach the store, and waits for a job to be begun there."""
TTL_S = 5.0
"""A host of which nothing was heard for so long is lost."""
_CALL_S = 4.0
"""How long one request to the store may take."""
_RETRY_S = 0.25
_TOLD_S = 1.0
"""How long the supervisor waits to learn what follows from an event."""
_FAREWELL_S = 3.0
_ROLL, _OVER, _HOST, _DONE, _ENDED = "roll", "over", "host/", "done/", "ended/"
_WORLD = "world/"
"""Where workers meet, by the generation of their world."""


class Sign(msgspec.Struct, frozen=True):
    """What a host says of itself as long as it lives."""

    name: str
    pid: int


class Terms(msgspec.Struct, frozen=True):
    """What is settled by the first host."""

    job: str
    name: str
    """Of the run."""
    min_hosts: int
    max_hosts: int


@dataclass(slots=True, eq=False)
class _Told:
    """An event on its way, and what followed from it."""

    event: Event
    words: tuple[str, ...] = ()
    is_done: threading.Event = field(default_factory=threading.Event)


_encode = msgspec.msgpack.Encoder().encode
_decode_roll = msgspec.msgpack.Decoder(Roll).decode
_decode_sign = msgspec.msgpack.Decoder(Sign).decode
_decode_over = msgspec.msgpack.Decoder(Announcement).decode


def meet(
    url: str,
    *,
    bounds: tuple[int, int] | None,
    job: str,
    name: str,
    num_processes: int,
    num_spares: int,
    give_up_s: float,
    note: Callable[[str], None],
) -> ElasticHosts:
    """Begin a job whose hosts come and go, or join it. Without `bounds` it has been begun by
    others; with them, and an address of this machine, the store is served here. `give_up_s`: how
    long a store that cannot be reached is waited for."""
    server = None
    with contextlib.ExitStack() as on_failure:
        if bounds is not None and url.startswith("tcp://"):
            host, port = parse_url(url)
            server = Server(host, port)
            on_failure.callback(server.close)
            url = f"tcp://{bracketed(host)}:{server.port}"
            note(f"others join with: parti run --join {bracketed(host)}:{server.port} ...")
        store = connect(url, timeout_s=JOIN_S, patience_s=_CALL_S)
        on_failure.callback(store.abandon)
        hosts = ElasticHosts(
            url,
            store,
            _agree(store, bounds, job, name),
            num_processes=num_processes,
            num_spares=num_spares,
            give_up_s=give_up_s,
            note=note,
            server=server,
        )
        on_failure.pop_all()
        return hosts


def _agree(store: Agreement, bounds: tuple[int, int] | None, job: str, name: str) -> Terms:
    """The terms of the job: those of whoever was first."""
    if bounds is None:
        try:
            return msgspec.msgpack.decode(store.get("terms", JOIN_S), type=Terms)
        except TimeoutError:
            raise CommTimeout(
                f"nobody has begun a job there within {JOIN_S:g} s: start `parti run --nodes "
                "MIN:MAX --address ...` on one host"
            ) from None
    if store.look(_OVER) is not None:
        raise ConfigError(
            "the job at that address has come to its end: choose another name for a new one (the "
            "end of etcd://host:port/name), or another port"
        )
    mine = Terms(job=job, name=name, min_hosts=bounds[0], max_hosts=bounds[1])
    found = store.compare_set("terms", None, _encode(mine))
    if found is None:
        return mine
    terms = msgspec.msgpack.decode(found, type=Terms)
    if (terms.min_hosts, terms.max_hosts) != bounds:
        raise ConfigError(
            f"--nodes is {bounds[0]}:{bounds[1]} here, but {terms.min_hosts}:{terms.max_hosts} for "
            "the job at that address. Give the same everywhere, or join with --join; for another "
            "job choose another address"
        )
    return terms


class ElasticHosts:
    """From the moment the host is in the roll until `finish`. A Register and Peers in one: what is
    told of processes, and what of the end of the job."""

    def __init__(
        self,
        url: str,
        store: Agreement,
        terms: Terms,
        *,
        num_processes: int,
        num_spares: int,
        give_up_s: float,
        note: Callable[[str], None],
        server: Server | None,
    ) -> None:
        self._url = url
        self._terms = terms
        self._give_up_s = give_up_s
        self._note = note
        self._server = server
        self._number = store.add("num_hosts", 1) - 1
        self._sign = Sign(name=socket.gethostname(), pid=os.getpid())
        first_rank = store.add("num_places", num_processes) - num_processes
        self.layout = _layout(terms, self._number, first_rank, num_processes, url)
        self._roll = Roll(min_hosts=terms.min_hosts, max_hosts=terms.max_hosts)
        self._signs: dict[int, Sign] = {}
        self._done: set[int] = set()
        self._over: Announcement | None = None
        self._good_end: Announcement | None = None
        self._leaves = False
        self._to_tell: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        self._pending: list[_Told] = []
        self._wake_read, self._wake_write = os.pipe()
        self._news_read, self._news_write = os.pipe()
        for end in (self._wake_read, self._wake_write, self._news_read, self._news_write):
            os.set_blocking(end, False)
        self._unreached_s: float | None = None
        self._reached_since_s = time.monotonic()
        self._is_closing = False
        self._has_heard = False
        """Who is there."""
        self._judges_from_s = 0.0
        self._swept = 0
        """What workers have left behind of worlds before this one is gone from the store."""
        self._link = _Link(store, store.lease(self._key, _encode(self._sign), TTL_S))
        self._come_in(HostCame(self._number, num_processes, num_spares))
        if len(self._roll.hosts) >= terms.min_hosts:
            self._roll, _ = self._apply(store, Closed())
        self._thread = threading.Thread(target=self._run, name="parti-hosts", daemon=True)
        self._thread.start()

    def _come_in(self, came: HostCame) -> None:
        """Into the roll, as soon as there is a place: a host that was lost may hold it a while."""
        store, is_told = self._link.store, False
        while True:
            self._roll, words = self._apply(store, came)
            if self._roll.host(self._number) is not None or self._roll.end is not None:
                return
            if (over := store.look(_OVER)) is not None:
                self._over = _decode_over(over)
                self._tell_news()
                return
            if not is_told:
                is_told = True
                self._note(f"{'; '.join(words)}. It waits for a place")
            time.sleep(_RETRY_S)
            self._renew(self._link)

    @property
    def _key(self) -> str:
        return f"{_HOST}{self._number}"

    can_lose = True

    @property
    def number(self) -> int:
        return self._number

    def register(self, num_spares: int) -> Register:
        return self  # its processes are in the roll since the host is

    # ---- the roll

    @property
    def roll(self) -> Roll:
        return self._roll

    @property
    def reached_since_s(self) -> float:
        return math.inf if self._unreached_s is not None else self._reached_since_s

    def tell(self, event: Event) -> tuple[str, ...]:
        told = _Told(event)
        self._to_tell.put(told)
        self._wake()
        if self._unreached_s is None:
            told.is_done.wait(_TOLD_S)
        return told.words

    def leave(self) -> None:
        if self._server is not None:
            self._note(
                "this host cannot leave: it serves the store that all hosts agree through. With "
                "an etcd (--address etcd://host:port/name) any host can"
            )
            return
        words = self.tell(HostLeaves(self._number))
        for each in words or ("this host leaves at the end of the step, if the others can go on",):
            self._note(each)

    @property
    def has_left(self) -> bool:
        return self._leaves

    @property
    def why_out(self) -> str:
        if self._leaves:
            return "this host has left; the others go on"
        return "the others have gone on without this host; it joins them anew"

    # ---- the end of the job

    @property
    def waits_for(self) -> int | None:
        return self._news_read

    def poll(self) -> Announcement | None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._news_read, 4096):
                pass
        return self._success() if self._over is None else self._over

    def announce(self, announcement: Announcement) -> Announcement:
        if announcement.kind is Kind.OUT:
            return announcement
        try:
            with self._fresh() as store:
                found = store.compare_set(_OVER, None, _encode(announcement))
        except CommError:
            return announcement
        return announcement if found is None else _decode_over(found)

    def succeed(self, announcement: Announcement) -> Announcement | None:
        with contextlib.suppress(CommError), self._fresh() as store:
            store.set(f"{_DONE}{self._number}", b"")
        self._done.add(self._number)
        self._good_end = announcement
        return self._success()

    def _success(self) -> Announcement | None:
        """All hosts that hold the state are through."""
        holding = {host.number for host in self._roll.hosts_of(self._roll.holders)}
        if self._good_end is not None and holding <= self._done:
            return self.announce(self._good_end)
        return None

    def finish(self, failures: Sequence[Ending]) -> tuple[Ending, ...]:
        """Whoever serves the store keeps it open until everybody has had the news."""
        others: list[Ending] = []
        with contextlib.suppress(CommError), self._fresh() as store:
            store.set(f"{_ENDED}{self._number}", _encode(tuple(failures)))
            if self._server is not None:
                others = self._collect(store)
        self._is_closing = True
        self._wake()
        self._thread.join(_CALL_S + _RETRY_S)
        if self._server is not None:
            self._server.close()
        for end in (self._wake_read, self._wake_write, self._news_read, self._news_write):
            os.close(end)
        return tuple(others)

    def _collect(self, store: Agreement) -> list[Ending]:
        deadline_s = time.monotonic() + _FAREWELL_S
        others: list[Ending] = []
        for number in set(self._signs) - {self._number}:
            with contextlib.suppress(TimeoutError):
                wait_s = max(0.001, deadline_s - time.monotonic())
                encoded = store.get(f"{_ENDED}{number}", wait_s)
                others += msgspec.msgpack.decode(encoded, type=list[Ending])
        return others

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[Agreement]:
        """For the supervisor's own thread."""
        store = connect(self._url, timeout_s=_CALL_S, patience_s=_CALL_S)
        try:
            yield store
        finally:
            store.close()

    # ---- the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _tell_news(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._news_write, b"x")

    def _run(self) -> None:
        link: _Link | None = self._link
        while not self._is_closing:
            try:
                if link is None:
                    link = self._connect()
                self._attend(link)
            except CommError as error:
                if link is not None:
                    link.abandon()
                    link = None
                self._wait_for_store(error)
            except Exception as error:  # nothing would be heard of the others any more
                self._end_as_lost(f"the thread that hears of other hosts failed: {error!r}")
                break
        if link is not None:
            link.close()

    def _connect(self) -> _Link:
        store = connect(self._url, timeout_s=_CALL_S, patience_s=_CALL_S)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(store.abandon)
            link = _Link(store, store.lease(self._key, _encode(self._sign), TTL_S))
            on_failure.pop_all()
        # Who went meanwhile is not told of: the first word has all who are there. Others may have
        # been cut off like this host, and are about to sign again.
        self._signs, self._has_heard = {}, False
        self._judges_from_s = time.monotonic() + TTL_S
        return link

    def _wait_for_store(self, error: CommError) -> None:
        now_s = time.monotonic()
        if self._unreached_s is None:
            self._unreached_s = now_s
            self._note(f"{error}; this host waits for the store")
        if now_s - self._unreached_s > self._give_up_s:
            self._end_as_lost(
                f"the store could not be reached for {self._give_up_s:g} s "
                f"(PARTI_STORE_PATIENCE): {error}"
            )
        time.sleep(_RETRY_S)

    def _end_as_lost(self, words: str) -> None:
        if self._over is None:
            layout = self.layout
            name = layout.hosts[layout.node_rank]
            self._over = Announcement(
                kind=Kind.LOST, node_rank=layout.node_rank, host=name, words=words
            )
            self._tell_news()

    def _attend(self, link: _Link) -> None:
        """Keep the lease, tell what is to be told, and hear what happens."""
        changes = link.changes
        if self._unreached_s is not None:
            self._unreached_s, self._reached_since_s = None, time.monotonic()
            self._note("the store is reached again")
        due_s = 0.0
        while not self._is_closing:
            now_s = time.monotonic()
            if now_s >= due_s:
                self._renew(link)
                self._miss(link.store)
                due_s = now_s + TTL_S / 4
            self._tell_pending(link.store)
            self._sweep(link.store)
            ready, _, _ = select.select(
                [changes.fileno(), self._wake_read], [], [], max(0.0, due_s - time.monotonic())
            )
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if changes.fileno() in ready:
                self._hear(link.store, changes.poll())

    def _renew(self, link: _Link) -> None:
        try:
            link.lease.renew()
        except LeaseLost:
            # Others may have gone on without this host, which the roll will say.
            link.lease = link.store.lease(self._key, _encode(self._sign), TTL_S)

    def _tell_pending(self, store: Agreement) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._pending.append(self._to_tell.get(False))
        while self._pending:
            told = self._pending[0]
            roll, told.words = self._apply(store, told.event)
            self._pending.pop(0)
            self._adopt(roll)
            told.is_done.set()

    def _sweep(self, store: Agreement) -> None:
        """All are in the newest world: the host of its first member removes what workers have left
        in the store to find one another in older ones."""
        roll = self._roll
        is_mine = any(host.number == self._number for host in roll.hosts_of(roll.called[:1]))
        if roll.is_settled and is_mine and roll.generation > self._swept:
            self._swept = roll.generation
            for key in store.keys(_WORLD):
                if int(key.split("/")[1]) < roll.generation:
                    store.delete(key)

    def _apply(self, store: Agreement, event: Event) -> tuple[Roll, tuple[str, ...]]:
        """The roll that follows, in the store and here."""
        while True:
            held = store.look(_ROLL)
            roll = self._first_roll() if held is None else _decode_roll(held)
            following, words = advance(roll, event)
            if following == roll:
                return roll, words
            encoded = _encode(following)
            if store.compare_set(_ROLL, held, encoded) == encoded:
                return following, words

    def _first_roll(self) -> Roll:
        return Roll(min_hosts=self._terms.min_hosts, max_hosts=self._terms.max_hosts)

    def _hear(self, store: Agreement, changed: Sequence[tuple[str, bytes | None]]) -> None:
        for key, value in changed:
            if key == _ROLL and value is not None:
                self._adopt(_decode_roll(value))
            elif key == _OVER and value is not None:
                self._over = _decode_over(value)
                self._tell_news()
            elif key.startswith(_DONE):
                self._done.add(int(key.removeprefix(_DONE)))
                self._tell_news()
            elif key.startswith(_HOST):
                number = int(key.removeprefix(_HOST))
                if value is not None:
                    self._signs[number] = _decode_sign(value)
                else:
                    self._signs.pop(number, None)
        self._has_heard = True
        self._miss(store)

    def _miss(self, store: Agreement) -> None:
        """A host signs before it is in the roll: one that is there without a sign is gone."""
        if not self._has_heard or time.monotonic() < self._judges_from_s:
            return
        if self._over is not None:
            return  # they go because there is nothing left to do
        signed = {self._number, *self._signs}
        for number in [host.number for host in self._roll.hosts if host.number not in signed]:
            if store.look(f"{_HOST}{number}") is None:
                roll, _ = self._apply(store, HostLost(number))
                self._adopt(roll)

    def _adopt(self, roll: Roll) -> None:
        before, self._roll = self._roll, roll
        mine = roll.host(self._number)
        if mine is not None:
            self._leaves = mine.stage is not Stage.STAYS
        if roll == before:
            return
        for words in describe(before, roll, self._number, self._signs):
            self._note(words)
        self._tell_news()


class _Link:
    """A connection to the store, with all that hangs on it."""

    def __init__(self, store: Agreement, lease: Lease) -> None:
        self.store = store
        self.lease = lease
        self.changes: Changes = store.changes("")

    def abandon(self) -> None:
        self.changes.close()
        self.store.abandon()

    def close(self) -> None:
        self.changes.close()
        with contextlib.suppress(CommError):
            self.lease.end()
            self.store.close()


def describe(before: Roll, after: Roll, mine: int, signs: dict[int, Sign]) -> list[str]:
    """What a person should know of a change in the roll."""

    def name(number: int) -> str:
        sign = signs.get(number)
        return f"host {number}" + (f" ({sign.name})" if sign else "")

    old = {host.number for host in before.hosts}
    new = {host.number for host in after.hosts}
    count = "1 host is" if len(new) == 1 else f"{len(new)} hosts are"
    words = [f"{name(number)} has come; {count} there" for number in sorted(new - old - {mine})]
    words += [f"{name(number)} is gone; {count} left" for number in sorted(old - new - {mine})]
    was_paused = before.call is not None and before.call.is_paused
    is_paused = after.call is not None and after.call.is_paused
    if is_paused and not was_paused:
        num_left = len(list(after.hosts_of(after.holders)))
        left = f"{num_left} host{' has' if num_left == 1 else 's have'}"
        words.append(
            f"training stands still: {left} the state, expected at least {after.min_hosts}. It "
            "goes on when others join"
        )
    if was_paused and not is_paused:
        words.append("training goes on")
    return words


def _layout(terms: Terms, number: int, first_rank: int, num_processes: int, url: str) -> Layout:
    """Ranks are only names here: no two processes that run at the same time have the same."""
    num_nodes = max(terms.max_hosts, number + 1)
    before = (first_rank, *(0 for _ in range(number - 1))) if number else ()
    names = [f"host {other}" for other in range(num_nodes)]
    names[number] = socket.gethostname()
    return Layout(
        job=terms.job,
        name=terms.name,
        node_rank=number,
        hosts=tuple(names),
        local_counts=(*before, num_processes, *(1 for _ in range(num_nodes - number - 1))),
        rendezvous=url,
        is_elastic=True,
    )
