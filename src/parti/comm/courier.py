"""The thread that moves a rank's bytes to and from all others.

One thread drives every connection, so a rank that waits for one peer hears all of them: whoever
sees a connection break knows at once, and so does every operation under way here. A rank that gives
up for any reason tells the others why. Ranks show one another that they live by a few bytes now and
then; these come from this thread, so a rank that computes for long is not taken for a frozen one.

Owns the connections, what is under way on them, and the first failure, which ends them all: frames
have an order, and what was cut off cannot be taken up again. Must not know what bytes mean.

After a failure the memory of operations is not touched any more once `close()` has returned.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

from parti.comm.links import CONTROL, Frame, Header, Kind, Link, Place, describe
from parti.comm.lookout import Lookout
from parti.comm.operations import (
    KINDS,
    Failure,
    Operation,
    describe_late,
    describe_left,
    describe_lost,
    describe_mismatch,
    describe_silent,
)
from parti.comm.wait import name_ranks
from parti.errors import CommError, CommTimeout, PeerLost, RankMismatch

_MAX_INTERVAL_S = 1.0
_SILENT_INTERVALS = 3
"""So many signs of life may be missing before a sentence calls a rank silent."""
_FAREWELL_S = 2.0
"""How long the others may take no bytes before a rank leaves without having sent all it had."""
_NAP_S = 0.001


class Courier:
    def __init__(
        self,
        *,
        rank: int,
        links: Sequence[Link],
        patience_s: float,
        silence_s: float | None = None,
    ) -> None:
        """`silence_s`: after so long without a sign of life a rank counts as lost."""
        self._rank = rank
        self._links = tuple(links)
        self._controls = {link.peer: link for link in links if link.lane == CONTROL}
        self._patience_s = patience_s
        self._silence_s = patience_s if silence_s is None else silence_s
        self._silence = CommTimeout if silence_s is None else PeerLost
        self._interval_s = min(self._silence_s / 4, _MAX_INTERVAL_S)
        # Guards the next four. Reentrant: the garbage collector may call `close` at any point.
        self._lock = threading.RLock()
        self._pending: set[Operation] = set()
        self._failure: Failure | None = None
        self._letters: dict[int, dict[int, memoryview]] = {}
        self._exchange: Operation | None = None
        self._num_exchanges = 0
        self._touched: deque[Link] = deque()
        self._is_ending = False
        self._says_farewell = False
        self._is_forgotten = False
        # From here on the thread's own.
        self._beat_s = time.monotonic() + self._interval_s
        self._lost: dict[int, OSError | EOFError] = {}
        self._notices: dict[int, tuple[type[CommError], str]] = {}
        self._has_given_up = False
        self._lookout = Lookout()
        for link in self._links:
            self._watch(link)
        self._thread = threading.Thread(target=self._run, name="parti-courier", daemon=True)
        _couriers.add(self)
        self._thread.start()

    # Called by those who have something to move.

    def begin(self, operation: Operation, work: Sequence[tuple[Link, Frame, Place]]) -> None:
        """Start an operation: on each link one frame goes and one comes."""
        with self._lock:
            self._refuse_after_failure(operation)
            self._pending.add(operation)
            for link, frame, place in work:
                link.places.append(place)
                link.enqueue(frame)
                self._touched.append(link)
            needs_left = any(link.has_left for link, _, _ in work)
        if needs_left:
            self._give_up_on_left()
        self._settle(operation)
        self._lookout.ring()

    def exchange(self, payload: bytes) -> dict[int, memoryview]:
        """Give all others mine and get theirs."""
        with self._lock:
            number = self._num_exchanges
            operation = Operation(
                f"exchange {number}",
                number,
                unsent=(),
                unreceived=self._controls.keys() - self._letters.get(number, {}).keys(),
            )
            self._refuse_after_failure(operation)
            self._num_exchanges += 1
            self._pending.add(operation)
            self._exchange = operation
            needs_left = any(self._controls[peer].has_left for peer in operation.unreceived)
        if needs_left:
            self._give_up_on_left()
        # From this thread, and not by way of the courier's: a letter is small and saves the hop.
        for link in self._controls.values():
            link.send(Frame(Kind.LETTER, number, payload))
            if link.is_waiting_to_send:
                self._touched.append(link)
        if self._touched:
            self._lookout.ring()
        self._settle(operation)
        self.wait(operation)
        with self._lock:
            return self._letters.pop(number, {})

    def wait(self, operation: Operation) -> None:
        """Return when it has finished; give up when nothing of it has moved for `patience_s`."""
        started_s = time.monotonic()
        deadline_s = started_s + self._patience_s
        while not operation.gate.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            missing = operation.missing
            moved_s = [link.moved_s for link in self._links if link.peer in missing]
            deadline_s = max(started_s, *moved_s, 0.0) + self._patience_s
            if deadline_s <= time.monotonic():
                self._expire(operation)
        operation.gate.release()  # for whoever asks again
        if not operation.finished:
            assert self._failure is not None
            raise self._failure.error(self._rank, operation, time.monotonic() - started_s)

    def fail(
        self,
        kind: type[CommError],
        fact: str,
        *,
        is_told: bool = True,
        ranks: Iterable[int] = (),
    ) -> bool:
        """End every operation, now and from now on. Whether it was the first to: the others' words
        are not heard any more."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = Failure(kind=kind, fact=fact, is_told=is_told, ranks=tuple(ranks))
            for operation in self._pending:
                operation.gate.release()
            self._pending.clear()
        self._lookout.ring()
        return True

    def abort(self, reason: str) -> None:
        """`fail` from outside, and the end of the connections. From any thread; does not wait."""
        self.fail(PeerLost, reason)
        self._is_ending = True
        self._lookout.ring()

    def close(self) -> None:
        """Take leave of the others and end. Again: nothing."""
        if self._is_forgotten:
            return
        with self._lock:
            under_way = sorted(operation.name for operation in self._pending)
        if under_way:
            self.fail(PeerLost, f"rank {self._rank} closed in the middle of {under_way[0]}.")
        else:
            fact = f"rank {self._rank} has closed its connections."
            self._says_farewell = self.fail(PeerLost, fact, is_told=False)
        self._is_ending = True
        self._lookout.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _refuse_after_failure(self, operation: Operation) -> None:
        if self._failure is not None:
            raise self._failure.error(self._rank, operation, None)

    def _settle(self, operation: Operation) -> None:
        """Let its waiter go when nothing of it is left to move."""
        with self._lock:
            if operation in self._pending and not operation.missing:
                self._pending.discard(operation)
                operation.finished = True
                operation.gate.release()

    def _expire(self, operation: Operation) -> None:
        now = time.monotonic()
        ages_s = self._ages_s(operation.missing, now)
        limit_s = _SILENT_INTERVALS * self._interval_s
        silent = {peer: age_s for peer, age_s in ages_s.items() if age_s > limit_s}
        if silent:
            self.fail(self._silence, describe_silent(silent), ranks=silent)
        elif ages_s:
            self.fail(CommTimeout, describe_late(operation, ages_s, self._patience_s))

    def _give_up_on_left(self) -> None:
        self.fail(PeerLost, describe_left({link.peer for link in self._links if link.has_left}))

    def _ages_s(self, peers: Iterable[int], now: float) -> dict[int, float]:
        """How long ago each was heard of, on any connection."""
        heard_s = dict.fromkeys(peers, 0.0)
        for link in self._links:
            if link.peer in heard_s:
                heard_s[link.peer] = max(heard_s[link.peer], link.heard_s)
        return {peer: max(0.0, now - at_s) for peer, at_s in heard_s.items()}

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._turn()
            self._take_leave()
        except BaseException as error:
            self.fail(
                CommError, f"the thread that moves bytes failed: {error!r}. Please report it."
            )
        finally:
            self._release()

    def _turn(self) -> None:
        ready = self._lookout.wait(self._beat_s - time.monotonic())
        now = time.monotonic()
        for link, to_read, to_write in ready:
            if to_read:
                self._read(link)
            if to_write:
                self._flush(link)
            self._watch(link)
        while self._touched:
            link = self._touched.popleft()
            if link.is_stalled:
                # What it waits for may all be here, and the selector would not say so.
                link.is_stalled = False
                self._read(link)
            self._flush(link)
            self._watch(link)
        self._judge()
        if now >= self._beat_s:
            self._beat(now)
        if self._failure is not None and not self._has_given_up:
            self._give_up(self._failure)

    def _watch(self, link: Link) -> None:
        can_read = not (link.is_stalled or link.is_over or self._has_given_up)
        can_write = link.is_waiting_to_send and not link.is_over
        if self._has_given_up and link.lane != CONTROL:
            can_write = False
        self._lookout.watch(link, to_read=can_read, to_write=can_write)

    def _read(self, link: Link) -> None:
        try:
            link.read(self)
        except (EOFError, OSError) as error:
            link.is_over = True
            self._lost[link.peer] = error

    def _flush(self, link: Link) -> None:
        for operation in link.flush():
            operation.unsent.discard(link.peer)
            self._settle(operation)

    def find_place(self, link: Link, header: Header) -> memoryview | None:
        """Of `links.Receiver`."""
        if header.kind not in (Kind.SCATTER, Kind.GATHER):
            return memoryview(bytearray(header.num_bytes))
        if not link.places:
            return None
        place = link.places[0]
        if header == place.header:
            return place.memory
        self._mismatch(link, header, place.header)
        return None

    def take(self, link: Link, header: Header, body: memoryview) -> None:
        """Of `links.Receiver`."""
        if header.kind == Kind.LETTER:
            self._take_letter(link, header, body)
        elif header.kind in (Kind.SCATTER, Kind.GATHER):
            operation = link.places.popleft().operation
            operation.unreceived.discard(link.peer)
            self._settle(operation)
        elif header.kind == Kind.NOTICE:
            self._notices[link.peer] = (KINDS[header.number], str(body, "utf-8", "replace"))
        elif header.kind == Kind.FAREWELL:
            self._take_farewell(link)

    def _take_letter(self, link: Link, header: Header, body: memoryview) -> None:
        if header.number != link.num_letters:
            self._mismatch(link, header, Header(Kind.LETTER, link.num_letters, header.num_bytes))
            return
        link.num_letters += 1
        with self._lock:
            self._letters.setdefault(header.number, {})[link.peer] = body
            operation = self._exchange
        if operation is not None and operation.number == header.number:
            operation.unreceived.discard(link.peer)
            self._settle(operation)

    def _take_farewell(self, link: Link) -> None:
        link.acknowledge()
        link.is_over = True
        with self._lock:
            link.has_left = True
            waits = link.lane == CONTROL and any(
                link.peer in operation.unreceived
                for operation in self._pending
                if operation is self._exchange
            )
        if waits or link.places or (link.lane != CONTROL and link.is_waiting_to_send):
            self._give_up_on_left()

    def _mismatch(self, link: Link, came: Header, expected: Header) -> None:
        where = "" if link.lane == CONTROL else f" on lane {link.lane}"
        self.fail(RankMismatch, describe_mismatch(link.peer, f"{came}{where}", str(expected)))

    def _judge(self) -> None:
        """What the end of connections means, when all that came together has been read.

        A rank that gave up says so before it goes: then its word counts, not that it went.
        """
        lost = {peer: error for peer, error in self._lost.items() if peer not in self._notices}
        if lost and self._failure is None:
            late = [peer for peer, error in lost.items() if isinstance(error, TimeoutError)]
            if late:
                ages_s = self._ages_s(late, time.monotonic())
                self.fail(self._silence, describe_silent(ages_s), ranks=late)
            else:
                reasons = {peer: _reason(error) for peer, error in lost.items()}
                self.fail(PeerLost, describe_lost(reasons), ranks=lost)
        for peer, (kind, fact) in self._notices.items():
            # Everyone hears it from the rank that gave up, so it is not told again.
            self.fail(kind, f"{name_ranks([peer])} gave up: {fact}", is_told=False)

    def _beat(self, now: float) -> None:
        """Give a sign of life, and look who gives none."""
        held_up_s = now - self._beat_s
        self._beat_s = now + self._interval_s
        for link in self._controls.values():
            if not (link.is_over or link.is_waiting_to_send):
                link.send(Frame(Kind.BEAT, 0))
                self._watch(link)
        if held_up_s > self._interval_s:
            # This process stood still itself; what came meanwhile is still to be read.
            for link in self._links:
                link.heard_s += held_up_s
        with self._lock:
            missing = {peer for operation in self._pending for peer in operation.missing}
        ages_s = self._ages_s(missing, now)
        silent = {peer: age_s for peer, age_s in ages_s.items() if age_s > self._silence_s}
        if silent:
            self.fail(self._silence, describe_silent(silent), ranks=silent)

    def _give_up(self, failure: Failure) -> None:
        """Tell the others why, and leave the memory of operations alone from now on."""
        self._has_given_up = True
        if failure.is_told:
            kind, fact = KINDS.index(failure.kind), failure.fact.encode()
            for link in self._controls.values():
                link.send(Frame(Kind.NOTICE, kind, fact))
        for link in self._links:
            self._watch(link)

    def _take_leave(self) -> None:
        assert self._failure is not None
        if not self._has_given_up:
            self._give_up(self._failure)
        if not self._says_farewell:
            return
        links = [link for link in self._links if not link.is_over]
        for link in links:
            link.send(Frame(Kind.FAREWELL, 0))
        # A connection that is closed too early drops what the peer's system has not confirmed.
        left, since_s = -1, time.monotonic()
        while (now_left := sum(link.num_unsent_bytes() for link in links)) > 0:
            now = time.monotonic()
            if now_left != left:
                left, since_s = now_left, now
            elif now - since_s > _FAREWELL_S:
                return
            time.sleep(_NAP_S)
            for link in links:
                link.flush()
                link.acknowledge()  # the others are leaving too, and wait for us

    def _release(self) -> None:
        self._lookout.close()
        for link in self._links:
            link.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's connections, so that they end when it does."""
        # Without locks: a thread that is not in the child may have held them.
        self._is_forgotten = True
        self._lookout.forget()
        for link in self._links:
            link.forget()


def _reason(error: OSError | EOFError) -> str:
    return describe(error) if isinstance(error, OSError) else str(error)


_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


def _forget_all() -> None:
    for courier in _couriers:
        courier.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
