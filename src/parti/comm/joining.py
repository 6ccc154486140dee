"""How ranks find each other over TCP: one listener a rank, and a hello at both ends.

Of two ranks the lower one connects. Both say who they are, which connection this is, and a token
that only those at the meeting know; whoever says anything else is dropped. Owns sockets until they
are links; when all are made the listener is closed, so no stranger can come later.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from parti.comm.hosts import own_address
from parti.comm.links import CONTROL, Link, describe
from parti.comm.rendezvous import Meeting
from parti.comm.wait import name_ranks
from parti.errors import CommError, CommTimeout, PeerLost

_HELLO = struct.Struct("<8s16sii")
_MAGIC = b"parti/1\n"
_TOKEN_BYTES = 16
_SPARE_BACKLOG = 16
_LOOK_S = 0.05

Wanted: TypeAlias = tuple[int, int]
"""A peer and a lane, or CONTROL in its place."""


def join(
    *,
    rank: int,
    wanted: Sequence[Wanted],
    meet: Meeting,
    patience_s: float,
    check: Callable[[], None] | None = None,
) -> list[Link]:
    """Connect to everyone who is wanted. Every rank calls it, wanting those who want it. `check`
    is called again and again; it raises where there is nobody to wait for any more."""
    with _Hall(rank, patience_s, len(wanted), check or _go_on) as hall:
        hall.meet(meet)
        for peer, lane in wanted:
            if peer > rank:
                hall.connect(peer, lane)
        hall.gather(wanted)
        return hall.links()


def _go_on() -> None:
    return None


class _Newcomer:
    """A connection whose other end has not said its hello yet."""

    def __init__(self, connection: socket.socket, expected: Wanted | None) -> None:
        """`expected` is known where we connected, and said by those who connect to us."""
        self.connection = connection
        self.expected = expected
        self.heard = b""

    def listen(self) -> bool:
        """Whether all of the hello is there. OSError where it cannot come any more."""
        try:
            data = self.connection.recv(_HELLO.size - len(self.heard))
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("closed before its hello")
        self.heard += data
        return len(self.heard) == _HELLO.size


class _Hall:
    """The listener, those who came, and those who are known."""

    def __init__(
        self, rank: int, patience_s: float, num_wanted: int, check: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._patience_s = patience_s
        self._check = check
        self._deadline_s = time.monotonic() + patience_s
        self._host = own_address()
        self._listener = socket.create_server((self._host, 0), backlog=num_wanted + _SPARE_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._newcomers: set[_Newcomer] = set()
        self._known: dict[Wanted, socket.socket] = {}

    def __enter__(self) -> _Hall:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        self._listener.close()
        for newcomer in self._newcomers:
            newcomer.connection.close()
        for connection in self._known.values():  # those that became links are not here any more
            connection.close()

    def meet(self, meet: Meeting) -> None:
        port = self._listener.getsockname()[1]
        word = f"{self._host}:{port} {secrets.token_hex(_TOKEN_BYTES)}"
        words = [each.decode().split() for each in meet("tcp", word.encode())]
        self._addresses = [address for address, _ in words]
        # One token for all is enough: it was handed around where only this job's ranks can read.
        self._token = bytes.fromhex(words[0][1])

    def connect(self, peer: int, lane: int) -> None:
        """Waits for the peer's system only: it accepts before the peer itself does."""
        host, _, port = self._addresses[peer].rpartition(":")
        try:
            connection = self._reach(host, int(port))
            connection.sendall(self._hello(lane))
        except TimeoutError as error:
            raise self._late([peer], str(error)) from error
        except ConnectionError as error:
            raise _blaming(
                PeerLost(
                    f"rank {self._rank} cannot reach rank {peer} at {host}:{port} "
                    f"({describe(error)}): it ended while the job was starting."
                ),
                [peer],
            ) from error
        except OSError as error:
            raise _blaming(
                CommError(
                    f"rank {self._rank} cannot reach rank {peer} at {host}:{port} "
                    f"({describe(error)}). The hosts of a job must reach one another on all ports."
                ),
                [peer],
            ) from error
        newcomer = _Newcomer(connection, (peer, lane))
        self._newcomers.add(newcomer)
        self._selector.register(connection, selectors.EVENT_READ, newcomer)

    def _reach(self, host: str, port: int) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with contextlib.ExitStack() as on_failure:
            connection = socket.socket(family, kind, protocol)
            on_failure.callback(connection.close)
            connection.setblocking(False)
            code = connection.connect_ex(address)
            while code == errno.EINPROGRESS:
                if select.select([], [connection], [], min(_LOOK_S, self._left_s()))[1]:
                    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                elif time.monotonic() > self._deadline_s:
                    raise TimeoutError("no answer")
                else:
                    self._check()
            if code:
                raise OSError(code, os.strerror(code))
            on_failure.pop_all()
        return connection

    def gather(self, wanted: Sequence[Wanted]) -> None:
        """Hear every hello; answer those who came to us."""
        missing = set(wanted)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while missing:
            ready = self._selector.select(min(_LOOK_S, self._left_s()))
            self._check()
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                elif (name := self._hear(key.data, missing)) is not None:
                    missing.discard(name)
            if time.monotonic() > self._deadline_s:
                raise self._late(sorted({peer for peer, _ in missing}), "no hello")

    def links(self) -> list[Link]:
        found = []
        for (peer, lane), connection in self._known.items():
            _configure(connection, self._patience_s, lane)
            found.append(Link(connection, peer, lane))
        self._known.clear()
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            newcomer = _Newcomer(connection, None)
            self._newcomers.add(newcomer)
            self._selector.register(connection, selectors.EVENT_READ, newcomer)

    def _hear(self, newcomer: _Newcomer, missing: set[Wanted]) -> Wanted | None:
        """The name of a peer that said its hello; strangers are dropped."""
        name = None
        try:
            if not newcomer.listen():
                return None
            name = self._name(newcomer.heard)
            if name not in missing or newcomer.expected not in (None, name):
                name = None
            elif newcomer.expected is None:
                newcomer.connection.sendall(self._hello(name[1]))
        except OSError as error:
            if newcomer.expected is not None:
                raise _blaming(
                    PeerLost(
                        f"rank {self._rank}: rank {newcomer.expected[0]} ended while the job was "
                        f"starting ({describe(error)})."
                    ),
                    [newcomer.expected[0]],
                ) from error
            name = None
        self._selector.unregister(newcomer.connection)
        self._newcomers.discard(newcomer)
        if name is None:
            newcomer.connection.close()
        else:
            self._known[name] = newcomer.connection
        return name

    def _hello(self, lane: int) -> bytes:
        return _HELLO.pack(_MAGIC, self._token, self._rank, lane)

    def _name(self, hello: bytes) -> Wanted | None:
        magic, token, peer, lane = _HELLO.unpack(hello)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            return None
        return peer, lane

    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.001)

    def _late(self, peers: list[int], reason: str) -> CommError:
        return _blaming(
            CommTimeout(
                f"rank {self._rank} waited {self._patience_s:g} s at the start for a connection "
                f"with {name_ranks(peers)} ({reason}). The hosts of a job must reach one another "
                f"on all ports; this one listens at {self._host}. Raise `patience_s` if they are "
                "only slow."
            ),
            peers,
        )


def _blaming(error: CommError, peers: list[int]) -> CommError:
    error.ranks = tuple(peers)
    return error


def _configure(connection: socket.socket, patience_s: float, lane: int) -> None:
    """Send small frames at once, and have the system notice a host that is gone."""
    for level, name, value in _options(patience_s, lane):
        if hasattr(socket, name):
            connection.setsockopt(level, getattr(socket, name), value)


def _options(patience_s: float, lane: int) -> Iterator[tuple[int, str, int]]:
    tcp = socket.IPPROTO_TCP
    yield tcp, "TCP_NODELAY", 1
    yield socket.SOL_SOCKET, "SO_KEEPALIVE", 1
    seconds = max(1, math.ceil(patience_s / 4))
    yield tcp, "TCP_KEEPIDLE", seconds
    yield tcp, "TCP_KEEPINTVL", seconds
    yield tcp, "TCP_KEEPCNT", 3
    if lane == CONTROL:
        # Not on lanes: there it would also count the time that a receiver is allowed to lag behind.
        yield tcp, "TCP_USER_TIMEOUT", math.ceil(patience_s * 1000)
