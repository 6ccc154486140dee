"""The client of the small key-value store that the processes of several hosts agree through.

Keys are strings, values bytes. The supervisor of node 0 serves the store (`store_server`), so it
outlives workers. Every wait has a deadline. No torch, so that a supervisor starts fast.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from parti.errors import CommError, CommTimeout, ConfigError, PeerLost


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


Request: TypeAlias = Set | Get | CompareSet | Add | Delete | Keys | Will


class Answer(msgspec.Struct, frozen=True, array_like=True):
    value: bytes | None = None
    number: int = 0
    keys: tuple[str, ...] = ()
    problem: str = ""


_HEADER = struct.Struct(">I")
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_GRACE_S = 15.0
"""How much longer than asked a client waits for the server itself."""
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


class _Connection:
    """One request at a time, each with a deadline."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.name = f"{host}:{port}"
        self._received = bytearray()
        self._socket = _reach(host, port, timeout_s)
        configure(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: Request) -> None:
        try:
            self._socket.settimeout(_GRACE_S)
            self._socket.sendall(frame(request))
        except OSError as error:
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
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise self._lost(None)
            self._received += data

    def close(self) -> None:
        self._socket.close()

    def _decode(self, body: bytes) -> Answer:
        try:
            answer = _decode_answer(body)
        except msgspec.DecodeError as error:
            raise CommError(f"what answers at {self.name} is not a Parti store: {error}") from error
        if answer.problem:
            raise CommError(f"the store at {self.name} refused a request: {answer.problem}")
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
    """A client of the store. One thread at a time may use it; let each thread connect its own."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = (host, port)
        self._connection = _Connection(host, port, timeout_s)

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

    def watch(self, key: str, *, timeout_s: float) -> Watch:
        return Watch(_Connection(*self._address, timeout_s), key)

    def close(self) -> None:
        """Take the will back and end the connection."""
        with contextlib.suppress(CommError):
            self._ask(Will(None, b""))
        self.abandon()

    def abandon(self) -> None:
        """End the connection; the will is carried out."""
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
        answer = None
        try:
            self._connection.send(request)
            answer = self._connection.receive(wait_s + _GRACE_S)
        finally:
            if answer is None:  # an answer that comes later would be taken for the next one's
                self._connection.close()
        if answer is None:
            raise CommTimeout(
                f"the store at {self._connection.name} did not answer "
                f"within {wait_s + _GRACE_S:g} s"
            )
        return answer


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


def connect(url: str, *, timeout_s: float = 60.0) -> Store:
    """A client of the store at `tcp://host:port` (a worker finds it in `Place.rendezvous`)."""
    host, port = parse_url(url)
    return Store(host, port, timeout_s)
