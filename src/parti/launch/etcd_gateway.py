"""Speaks to an etcd cluster through its JSON gateway: one request, or a stream of answers.

Owns endpoints, deadlines, authentication, and which failure is which. What is said is `etcd`'s
business. Standard library and msgspec only.
"""

from __future__ import annotations

import enum
import http.client
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from parti.errors import CommError, CommTimeout, ConfigError, PeerLost
from parti.launch.store import configure

_READ_BYTES = 256 * 1024
_NAP_S = 0.05
_EXPECTED = "expected etcd://[user:password@]host:port[,host:port...]/prefix"

Reply = TypeVar("Reply")


class Code(enum.IntEnum):
    """Of gRPC: those that mean something here."""

    INVALID = 3
    DEADLINE = 4
    NOT_FOUND = 5
    DENIED = 7
    NO_AUTHENTICATION = 9
    UNAVAILABLE = 14
    STALE_TOKEN = 16


_NOT_NOW = (Code.UNAVAILABLE, Code.DEADLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a job keeps its keys."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    user: str
    password: str = field(repr=False)

    @property
    def name(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)


def parse_url(url: str) -> Address:
    """What `etcd://[user:password@]host:port[,host:port...]/prefix` says."""
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    credentials, at, hosts = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    shown = f"{scheme}://{f'{user}:***@' if at else ''}{hosts}/{path}"  # no password in messages
    endpoints = []
    for place in hosts.split(","):
        try:
            parts = urlsplit(f"//{place}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{shown!r} is not an address: {error}; {_EXPECTED}") from error
        if scheme != "etcd" or not host or port is None:
            raise ConfigError(f"{shown!r} is not an address; {_EXPECTED}")
        endpoints.append((host, port))
    if not path.strip("/") or set("?#") & set(path):
        raise ConfigError(
            f"{shown!r} names no prefix; {_EXPECTED}: jobs that share an etcd are kept apart by it"
        )
    if at and not (user and password):
        raise ConfigError(f"{shown!r} lacks a user or a password; {_EXPECTED}")
    return Address(
        endpoints=tuple(endpoints),
        prefix=f"/{path.strip('/')}/",
        user=unquote(user),
        password=unquote(password),
    )


class Refused(CommError):
    """etcd understood the request, and refuses it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Problem(msgspec.Struct):
    """As a gateway tells it, in place of an answer, of all versions."""

    error: str | _Problem = ""
    message: str = ""
    code: int = 0
    grpc_code: int = 0

    def flat(self) -> tuple[int, str]:
        if isinstance(self.error, _Problem):
            return self.error.flat()
        return self.code or self.grpc_code, self.message or self.error


class _Version(msgspec.Struct):
    etcdserver: str


class _Credentials(msgspec.Struct):
    name: str
    password: str


class _Token(msgspec.Struct):
    token: str = ""


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(wait_s))


def _decode(body: bytes, kind: type[Reply]) -> Reply:
    return msgspec.json.decode(body, type=kind, strict=False)  # numbers come as strings


class Gateway:
    """Asks the endpoints in turn, beginning with the one that answered last."""

    def __init__(self, address: Address, patience_s: float) -> None:
        self.address = address
        self._patience_s = patience_s
        self._current = 0
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""

    def another(self) -> Gateway:
        """With a connection of its own, and what this one has learned."""
        gateway = Gateway(self.address, self._patience_s)
        gateway._current, gateway._token = self._current, self._token
        return gateway

    def meet(self, timeout_s: float) -> None:
        """Find an endpoint, which may be still to come, and tell it who asks."""
        self._find(timeout_s)
        self._authenticate()

    def ask(
        self, path: str, body: msgspec.Struct, kind: type[Reply], *, is_repeatable: bool = True
    ) -> Reply:
        """What etcd answers. Only what is repeatable is sent again when an answer is lost.

        Silence of an endpoint makes it the next one's turn. When none is left, the error says why
        the last could not be used; a cluster that answers but has no leader is asked again.
        """
        encoded = msgspec.json.encode(body)
        deadline_s = time.monotonic() + self._patience_s
        has_new_token = False
        while True:
            try:
                return self._ask_each(path, encoded, kind, deadline_s, is_repeatable)
            except Refused as refused:
                if refused.code == Code.STALE_TOKEN and self.address.user and not has_new_token:
                    has_new_token = True
                    self._authenticate()
                elif (
                    refused.code in _NOT_NOW
                    and is_repeatable
                    and time.monotonic() + _NAP_S < deadline_s
                ):
                    time.sleep(_NAP_S)
                else:
                    raise self._explained(refused) from refused

    def open_stream(self, path: str, body: msgspec.Struct) -> Stream:
        """A request with many answers; the first has come, but has not been read, when this
        returns."""
        encoded = msgspec.json.encode(body)
        deadline_s = time.monotonic() + self._patience_s
        failures: list[tuple[str, Exception]] = []
        for _ in self.address.endpoints:
            try:
                return self._open(path, encoded, self._share_s(deadline_s))
            except OSError as error:
                failures.append((self._here, error))
                self._next()
        raise self._failed(failures)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _find(self, timeout_s: float) -> None:
        """Find an endpoint that answers, and see that it is etcd."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                status, body = self._exchange("GET", "/version", b"", self._share_s(deadline_s))
            except OSError as error:
                if time.monotonic() + _NAP_S >= deadline_s:
                    if not isinstance(error, _NotSent | TimeoutError):  # behind a proxy, perhaps
                        raise self._stranger(str(error)) from error
                    raise CommTimeout(
                        f"no etcd at {self.address.name} within {timeout_s:g} s ({error}); is it "
                        "started, and is this the address for its clients?"
                    ) from error
                self._next()
            except http.client.HTTPException as error:
                raise self._stranger(type(error).__name__) from error
            else:
                try:
                    _decode(body, _Version)
                except msgspec.DecodeError as error:
                    raise self._stranger(f"status {status}") from error
                return
            time.sleep(_NAP_S)

    def _authenticate(self) -> None:
        self._token = ""
        if not self.address.user:
            return
        credentials = _Credentials(self.address.user, self.address.password)
        try:
            self._token = self.ask("/v3/auth/authenticate", credentials, _Token).token
        except Refused as refused:
            if refused.code != Code.NO_AUTHENTICATION:  # else it asks nobody who he is
                raise

    def _ask_each(
        self, path: str, body: bytes, kind: type[Reply], deadline_s: float, is_repeatable: bool
    ) -> Reply:
        failures: list[tuple[str, Exception]] = []
        refusal: Refused | None = None
        for _ in self.address.endpoints:
            try:
                return self._ask_one(path, body, kind, deadline_s)
            except Refused as refused:
                if refused.code not in _NOT_NOW or not is_repeatable:
                    raise
                refusal = refused
            except (OSError, http.client.HTTPException) as error:
                failures.append((self._here, error))
                if not (is_repeatable or isinstance(error, _NotSent)):
                    raise self._failed(failures) from error
            self._next()
        raise refusal or self._failed(failures)

    def _ask_one(self, path: str, body: bytes, kind: type[Reply], deadline_s: float) -> Reply:
        status, answer = self._exchange("POST", path, body, self._share_s(deadline_s))
        try:
            if status == 200:
                return _decode(answer, kind)
            code, message = _decode(answer, _Problem).flat()
        except msgspec.DecodeError as error:
            raise self._stranger(f"status {status} for {path}") from error
        raise Refused(f"etcd at {self._here} refused {path}: {message}", code)

    def _exchange(self, method: str, path: str, body: bytes, wait_s: float) -> tuple[int, bytes]:
        """One request over the connection that is kept open. Closes it if there is no answer."""
        deadline_s = time.monotonic() + wait_s
        is_done = False
        try:
            connection = self._connected(wait_s)
            assert connection.sock is not None
            connection.sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.request(method, path, body, self._headers())
            response = connection.getresponse()
            answer = response.read()
            is_done = True
        finally:
            if not is_done:
                self.close()
        return response.status, answer

    def _connected(self, wait_s: float) -> http.client.HTTPConnection:
        kept = self._connection
        if kept is not None and kept.sock is not None:
            if not _is_readable(kept.sock, 0.0):  # or the other end has closed it
                return kept
            kept.close()
        host, port = self.address.endpoints[self._current]
        made = http.client.HTTPConnection(host, port, timeout=wait_s)
        try:
            made.connect()
        except OSError as error:
            raise _NotSent(error) from error
        configure(made.sock)
        self._connection = made
        return made

    def _open(self, path: str, body: bytes, wait_s: float) -> Stream:
        host, port = self.address.endpoints[self._current]
        connection = socket.create_connection((host, port), timeout=wait_s)
        try:
            configure(connection)
            headers = self._headers() | {
                "Host": self._here,
                "Content-Length": str(len(body)),
                "Grpc-Metadata-hasleader": "true",  # an end, where the member has lost the others
            }
            lines = [f"POST {path} HTTP/1.0", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
            connection.sendall("\r\n".join(lines).encode() + body)
            if not _is_readable(connection, wait_s):
                raise TimeoutError("timed out")
        except OSError:
            connection.close()
            raise
        return Stream(connection, self._here)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _share_s(self, deadline_s: float) -> float:
        """How long one endpoint may take, so that there is time for the others."""
        at_most_s = self._patience_s / len(self.address.endpoints)
        return max(0.001, min(at_most_s, deadline_s - time.monotonic()))

    def _next(self) -> None:
        self.close()
        self._current = (self._current + 1) % len(self.address.endpoints)

    @property
    def _here(self) -> str:
        host, port = self.address.endpoints[self._current]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _failed(self, failures: list[tuple[str, Exception]]) -> CommError:
        """One that is silent may be only held up; those that are all gone are gone."""
        if len({str(error) for _, error in failures}) == 1:
            reasons = str(failures[0][1])
        else:
            reasons = "; ".join(f"{place}: {error}" for place, error in failures)
        if any(isinstance(_cause(error), TimeoutError) for _, error in failures):
            return CommTimeout(
                f"etcd at {self.address.name} did not answer within {self._patience_s:g} s "
                f"({reasons}): it is held up, or the way to it is cut"
            )
        return PeerLost(
            f"etcd at {self.address.name} is gone ({reasons}): it has ended, or cannot be reached"
        )

    def _stranger(self, what: str) -> CommError:
        return CommError(
            f"what answers at {self._here} is not etcd ({what}); expected the address for clients "
            "of an etcd of version 3.4 or later, with its JSON gateway and without TLS"
        )

    def _explained(self, refused: Refused) -> Exception:
        """What its user can do something about is told as that."""
        if refused.code == Code.DENIED:
            return ConfigError(
                f"{refused}: give the role of user {self.address.user!r} the right to read and "
                f"write the prefix {self.address.prefix!r}"
            )
        if refused.code == Code.INVALID and self.address.user and "auth" in str(refused):
            return ConfigError(f"{refused}: user {self.address.user!r} or the password is wrong")
        if refused.code == Code.INVALID and "user name is empty" in str(refused):
            return ConfigError(f"{refused}: it wants to know who asks; {_EXPECTED}")
        return refused


class _NotSent(OSError):
    """There was no connection, so nothing can have been carried out."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, _NotSent) else error


class Stream:
    """Answers as they come, each one line of JSON. Never waits."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._received = bytearray()
        self._has_headers = False
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def lines(self) -> Iterator[bytes]:
        """Those that are there. PeerLost at the stream's end."""
        while True:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerLost(f"etcd at {self._name} is gone ({error})") from error
            if not data:
                raise PeerLost(f"etcd at {self._name} ended a watch")
            self._received += data
            if not self._has_headers:
                head, end, rest = self._received.partition(b"\r\n\r\n")
                if not end:
                    continue
                if head.split(maxsplit=2)[1:2] != [b"200"]:
                    status = head.split(b"\r\n")[0].decode(errors="replace")
                    raise PeerLost(f"etcd at {self._name} refused a watch: {status}")
                self._has_headers, self._received = True, rest
            *whole, self._received = self._received.split(b"\n")
            yield from (bytes(line) for line in whole if line)

    def close(self) -> None:
        self._connection.close()
