"""The client of the small key-value store that the processes of several hosts agree through.

Keys are strings, values bytes. The supervisor of node 0 serves the store (`store_server`), so it
outlives workers. Every wait has a deadline. No torch, so that a supervisor starts fast.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from parti.errors import CommError, CommTimeout, ConfigError, PeerLost
from parti.launch.agreement import PATIENCE_S, TIMEOUT_S, LeaseLost, check_ttl


class Set(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str
    value: bytes


class Get(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str
    wait_s: float
    """For how long the server holds the answer back for the key to appear."""


class CompareSet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str
    expected: bytes | None
    desired: bytes


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str
    amount: int


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


class Keys(msgspec.Struct, frozen=True, array_like=True, tag=True):
    prefix: str


class Will(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str | None
    """Set by the server, unless it is there, when the connection ends; None takes a will back."""
    value: bytes


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A lease of a key; answered with its number."""

    key: str
    value: bytes
    ttl_s: float


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lease: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lease: int


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered with what is there, as changes, and an empty answer; later changes follow."""

    prefix: str


Request: TypeAlias = (
    Set | Get | CompareSet | Add | Delete | Keys | Will | Grant | Renew | End | Subscribe
)
Change: TypeAlias = tuple[str, bytes | None]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    value: bytes | None = None
    number: int = 0
    keys: tuple[str, ...] = ()
    problem: str = ""
    changes: tuple[Change, ...] = ()


_HEADER = struct.Struct(">I")
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_WATCH_S = 86_400.0
_RETRY_S = 0.05
_USER_TIMEOUT_MS = 10_000

_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def configure(connection: socket.socket) -> None:
    """Send small frames at once, and notice a host that lost its power within ten seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def frame(message: Request | Answer) -> bytes:
    body = _encode(message)
    return _HEADER.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames out of what has been received."""
    while len(buffer) >= _HEADER.size:
        (length,) = _HEADER.unpack_from(buffer)
        if length > _MAX_FRAME_BYTES:
            raise CommError(f"a frame of {length} bytes; a store sends {_MAX_FRAME_BYTES} at most")
        end = _HEADER.size + length
        if len(buffer) < end:
            return
        body = bytes(buffer[_HEADER.size : end])
        del buffer[:end]
        yield body


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an address: {error}; expected host:port") from error
    if parts.scheme != "tcp" or not host or port is None:
        raise ConfigError(f"{url!r} is not an address; expected tcp://host:port")
    return host, port


class _Refused(CommError):
    """The server answered that it cannot do that."""


def bracketed(host: str) -> str:
    """As it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class _Connection:
    """One request at a time, each with a deadline."""

    def __init__(self, address: tuple[str, int], timeout_s: float, patience_s: float) -> None:
        """A server that is not there may be still to come; for `timeout_s` of 0 it has been."""
        self.name = f"{address[0]}:{address[1]}"
        self._patience_s = patience_s
        self._received = bytearray()
        if timeout_s > 0:
            self._socket = _reach(*address, timeout_s)
        else:
            try:
                self._socket = socket.create_connection(address, timeout=patience_s)
            except OSError as error:
                if error.errno is None:
                    raise self._silent(patience_s) from error
                raise self._lost(error) from error
        configure(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: Request) -> None:
        try:
            self._socket.settimeout(self._patience_s)
            self._socket.sendall(frame(request))
        except OSError as error:
            if error.errno is None:
                raise self._silent(self._patience_s) from error
            raise self._lost(error) from error

    def receive(self, wait_s: float) -> Answer | None:
        """The next answer; None if it has not come within `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            for body in take_frames(self._received):
                return self._decode(body)
            self._socket.settimeout(max(0.0, deadline_s - time.monotonic()))
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                if error.errno in (None, errno.EAGAIN):  # not ETIMEDOUT: a link that was cut
                    return None
                raise self._lost(error) from error
            if not data:
                raise self._lost(None)
            self._received += data

    def ask(self, request: Request, wait_s: float = 0.0) -> Answer:
        """The next answer, or an error if the server takes longer than it was asked to wait."""
        self.send(request)
        return self.expect(wait_s)

    def expect(self, wait_s: float = 0.0) -> Answer:
        answer = self.receive(wait_s + self._patience_s)
        if answer is None:
            raise self._silent(wait_s + self._patience_s)
        return answer

    def _silent(self, wait_s: float) -> CommTimeout:
        return CommTimeout(
            f"the store at {self.name} did not answer within {wait_s:g} s: the supervisor of "
            "node 0 is held up, the way to it is cut, or what listens there is no store"
        )

    def close(self) -> None:
        self._socket.close()

    def _decode(self, body: bytes) -> Answer:
        try:
            answer = _decode_answer(body)
        except msgspec.DecodeError as error:
            raise CommError(f"what answers at {self.name} is not a Parti store: {error}") from error
        if answer.problem:
            raise _Refused(f"the store at {self.name} refused a request: {answer.problem}")
        return answer

    def _lost(self, error: OSError | None) -> PeerLost:
        reason = "it closed the connection" if error is None else str(error)
        return PeerLost(
            f"the store at {self.name} is gone ({reason}): the supervisor of node 0 has ended, "
            "or its host cannot be reached"
        )


def _reach(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect, trying again until the deadline: the server, or its name, may be still to come."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(0.001, left_s))
        except OSError as error:
            if time.monotonic() + _RETRY_S >= deadline_s:
                raise CommTimeout(
                    f"no store at {host}:{port} within {timeout_s:g} s ({error}); "
                    "is node 0 started, and is this its address?"
                ) from error
        time.sleep(_RETRY_S)


class Store:
    """A client of the store. One thread at a time may use it; let each thread connect its own.

    After an answer that did not come, the next request is sent over a new connection, unless
    there is a will: that was bound to the old one.
    """

    def __init__(
        self, host: str, port: int, timeout_s: float, patience_s: float = PATIENCE_S
    ) -> None:
        self._address = (host, port)
        self._patience_s = patience_s
        self._connection = _Connection(self._address, timeout_s, patience_s)
        self._is_broken = False
        self._has_will = False
        self._is_ended = False

    def set(self, key: str, value: bytes) -> None:
        self._ask(Set(key, value))

    def get(self, key: str, deadline_s: float) -> bytes:
        """The value, waiting up to `deadline_s` seconds for it to be set; then a TimeoutError."""
        value = self._ask(Get(key, deadline_s), deadline_s).value
        if value is None:
            raise TimeoutError(
                f"{key!r} was not set in the store at {self._connection.name} "
                f"within {deadline_s:g} s"
            )
        return value

    def look(self, key: str) -> bytes | None:
        """The value now."""
        return self._ask(Get(key, 0.0)).value

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set the key if its value is `expected` (None: it has none); the value it has then."""
        return self._ask(CompareSet(key, expected, desired)).value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; its new value."""
        return self._ask(Add(key, amount)).number

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        return self._ask(Delete(key)).number == 1

    def keys(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        return self._ask(Keys(prefix)).keys

    def leave_will(self, key: str, value: bytes) -> None:
        """Have the key set, unless it is there, when this client ends without `close()`."""
        self._ask(Will(key, value))
        self._has_will = True

    def watch(self, key: str, *, timeout_s: float) -> Watch:
        return Watch(_Connection(self._address, timeout_s, self._patience_s), key)

    def lease(self, key: str, value: bytes, ttl_s: float) -> StoreLease:
        """Set a key that is gone `ttl_s` after its owner was last heard of."""
        check_ttl(ttl_s)
        return StoreLease(self._ask, self._ask(Grant(key, value, ttl_s)).number, key, ttl_s)

    def changes(self, prefix: str) -> StoreChanges:
        """What happens to the keys that begin with `prefix`, from what is there now on."""
        connection = _Connection(self._address, 0.0, self._patience_s)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close)
            changes = StoreChanges(connection, prefix)
            on_failure.pop_all()
        return changes

    def close(self) -> None:
        """Take the will back and end the connection."""
        if self._has_will and not self._is_broken:
            with contextlib.suppress(CommError):
                self._ask(Will(None, b""))
        self.abandon()

    def abandon(self) -> None:
        """End the connection; the will is carried out."""
        self._is_ended = True
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: Request, wait_s: float = 0.0) -> Answer:
        if self._is_broken and not (self._has_will or self._is_ended):
            self._connection = _Connection(self._address, 0.0, self._patience_s)
            self._is_broken = False
        is_answered = False
        try:
            answer = self._connection.ask(request, wait_s)
            is_answered = True
        except _Refused:
            is_answered = True
            raise
        finally:
            if not is_answered:  # an answer that comes later would be taken for the next one's
                self._is_broken = True
                self._connection.close()
        return answer


class StoreLease:
    """A key that exists for as long as its owner renews it."""

    def __init__(
        self, ask: Callable[[Request], Answer], number: int, key: str, ttl_s: float
    ) -> None:
        self._ask = ask
        self._number = number
        self._key = key
        self._ttl_s = ttl_s

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def renew(self) -> None:
        """LeaseLost where the server has not heard of it for `ttl_s`."""
        if self._ask(Renew(self._number)).number == 0:
            raise LeaseLost(
                f"the lease of {self._key!r} was not renewed within {self._ttl_s:g} s, and has "
                "expired; take a new one"
            )

    def end(self) -> None:
        self._ask(End(self._number))


class StoreChanges:
    """What happens to the keys with one prefix; for those who wait for other things too."""

    def __init__(self, connection: _Connection, prefix: str) -> None:
        self._connection = connection
        self._found: list[Change] = []
        answer = connection.ask(Subscribe(prefix))
        while answer.changes:
            self._found += answer.changes
            answer = connection.expect()
        # What is there has been taken from the socket. The answer to this makes it readable.
        connection.send(Get("", 0.0))

    def fileno(self) -> int:
        """Becomes readable when `poll()` has something to say."""
        return self._connection.fileno()

    def poll(self) -> list[Change]:
        """What is new, in order. PeerLost where the store is gone."""
        found, self._found = self._found, []
        try:
            while (answer := self._connection.receive(0.0)) is not None:
                found += answer.changes
        except PeerLost:  # comes again at the next poll
            if not found:
                raise
        return found

    def close(self) -> None:
        self._connection.close()


class Watch:
    """Waits for a key in the background; for those who wait for other things too."""

    def __init__(self, connection: _Connection, key: str) -> None:
        self._connection = connection
        self._request = Get(key, _WATCH_S)
        self._connection.send(self._request)

    def fileno(self) -> int:
        """Becomes readable when `poll()` has something to say."""
        return self._connection.fileno()

    def poll(self) -> bytes | None:
        """The value, or None so far. PeerLost where the store is gone."""
        answer = self._connection.receive(0.0)
        if answer is not None and answer.value is None:
            self._connection.send(self._request)
            return None
        return None if answer is None else answer.value

    def close(self) -> None:
        self._connection.close()


def connect(url: str, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S) -> Store:
    """A client of the store at `tcp://host:port` (a worker finds it in `Place.rendezvous`)."""
    host, port = parse_url(url)
    return Store(host, port, timeout_s, patience_s)
