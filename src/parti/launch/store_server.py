"""Serves the key-value store of `parti.launch.store` from one thread.

What the store means is in `Table`, which knows nothing of sockets or clocks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from parti.errors import CommError, ConfigError
from parti.launch.store import (
    Add,
    Answer,
    Change,
    CompareSet,
    Delete,
    End,
    Get,
    Grant,
    Keys,
    Renew,
    Request,
    Set,
    Subscribe,
    Will,
    configure,
    frame,
    take_frames,
)

_READ_BYTES = 256 * 1024
_NEWS_BYTES = 1024 * 1024
"""How much news is put into one frame; one value may be longer."""
_TURN_S = 0.25
"""How often the server looks whether it was held up, while there are leases."""
_HELD_UP_S = 0.1
"""How late it must be to count as held up."""
_decode_request = msgspec.msgpack.Decoder(Request).decode


@dataclass(slots=True, eq=False)
class Client:
    """What the server holds for one connection."""

    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    will: Will | None = None
    waits_for: str | None = None
    waits_until_s: float = 0.0
    prefix: str | None = None
    """Of the keys it subscribed to."""
    changes: dict[str, bytes | None] = field(default_factory=dict)
    """Of these keys, in order, not yet in `to_send`: the last change of each."""

    def answer(self, answer: Answer) -> None:
        self.waits_for = None
        self.to_send += frame(answer)

    def tell(self, key: str, value: bytes | None) -> None:
        if self.prefix is not None and key.startswith(self.prefix):
            self.changes.pop(key, None)
            self.changes[key] = value

    def load(self) -> bool:
        """Whether there is something to send. A slow reader's news wait, and merge, until it has
        read what was sent before."""
        if self.changes and not self.to_send:
            self.to_send += frame(Answer(changes=_take_some(self.changes)))
        return bool(self.to_send)


def _take_some(changes: dict[str, bytes | None]) -> tuple[Change, ...]:
    """Take the first changes, about as many as fit into a frame."""
    taken: list[Change] = []
    num_bytes = 0
    while changes and (not taken or num_bytes < _NEWS_BYTES):
        key = next(iter(changes))
        value = changes.pop(key)
        taken.append((key, value))
        num_bytes += len(key) + len(value or b"")
    return tuple(taken)


@dataclass(slots=True)
class _Lease:
    key: str
    ttl_s: float
    expires_s: float


class Table:
    """The keys and values, who waits for which, who keeps which, and who hears of which."""

    def __init__(self, first_lease: int = 1) -> None:
        """A lease of an earlier table must not pass for one of this."""
        self._values: dict[str, bytes] = {}
        self._waiting: set[Client] = set()
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[str, int] = {}
        self._lease_numbers = itertools.count(first_lease)
        self._subscribers: set[Client] = set()

    def apply(self, client: Client, request: Request, now_s: float) -> None:
        """Carry out a request; the answer goes to the client, now or when its key is set."""
        match request:
            case Set():
                self._set(request.key, request.value)
                client.answer(Answer())
            case Get():
                self._get(client, request, now_s)
            case CompareSet():
                if self._values.get(request.key) == request.expected:
                    self._set(request.key, request.desired)
                client.answer(Answer(value=self._values.get(request.key)))
            case Add():
                client.answer(self._add(request))
            case Delete():
                client.answer(Answer(number=int(self._delete(request.key))))
            case Keys():
                client.answer(Answer(keys=tuple(self._keys(request.prefix))))
            case Will():
                client.will = request
                client.answer(Answer())
            case Grant():
                client.answer(Answer(number=self._grant(request, now_s)))
            case Renew():
                client.answer(Answer(number=int(self._renew(request.lease, now_s))))
            case End():
                client.answer(Answer(number=int(self._end(request.lease))))
            case Subscribe():
                self._subscribe(client, request.prefix)
            case _:
                assert_never(request)

    def expire(self, now_s: float) -> None:
        """Answer those who have waited long enough; end the leases that were not renewed."""
        for client in [c for c in self._waiting if c.waits_until_s <= now_s]:
            self._waiting.discard(client)
            client.answer(Answer())
        for number in [n for n, lease in self._leases.items() if lease.expires_s <= now_s]:
            self._end(number)

    def extend(self, held_up_s: float) -> None:
        """The server was held up, and renewals with it: that is not their owners' fault."""
        for lease in self._leases.values():
            lease.expires_s += held_up_s

    def next_expiry_s(self) -> float | None:
        waits = [client.waits_until_s for client in self._waiting]
        return min(waits + [lease.expires_s for lease in self._leases.values()], default=None)

    @property
    def has_leases(self) -> bool:
        return bool(self._leases)

    def forget(self, client: Client) -> None:
        """A client is gone: carry out its will. Its leases last until they expire."""
        self._waiting.discard(client)
        self._subscribers.discard(client)
        will = client.will
        if will is not None and will.key is not None and will.key not in self._values:
            self._set(will.key, will.value)

    def _set(self, key: str, value: bytes) -> None:
        self._lease_of.pop(key, None)
        self._values[key] = value
        for client in [c for c in self._waiting if c.waits_for == key]:
            self._waiting.discard(client)
            client.answer(Answer(value=value))
        for client in self._subscribers:
            client.tell(key, value)

    def _delete(self, key: str) -> bool:
        self._lease_of.pop(key, None)
        if self._values.pop(key, None) is None:
            return False
        for client in self._subscribers:
            client.tell(key, None)
        return True

    def _keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(prefix))

    def _get(self, client: Client, request: Get, now_s: float) -> None:
        value = self._values.get(request.key)
        if value is not None or request.wait_s <= 0:
            client.answer(Answer(value=value))
        else:
            client.waits_for = request.key
            client.waits_until_s = now_s + request.wait_s
            self._waiting.add(client)

    def _add(self, request: Add) -> Answer:
        try:
            number = int(self._values.get(request.key, b"0")) + request.amount
        except ValueError:
            return Answer(problem=f"the value of {request.key!r} is not a number")
        self._set(request.key, b"%d" % number)
        return Answer(number=number)

    def _grant(self, request: Grant, now_s: float) -> int:
        number = next(self._lease_numbers)
        self._leases[number] = _Lease(request.key, request.ttl_s, now_s + request.ttl_s)
        self._set(request.key, request.value)
        self._lease_of[request.key] = number
        return number

    def _renew(self, number: int, now_s: float) -> bool:
        lease = self._leases.get(number)
        if lease is None:
            return False
        lease.expires_s = now_s + lease.ttl_s
        return True

    def _end(self, number: int) -> bool:
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        if self._lease_of.get(lease.key) == number:
            self._delete(lease.key)
        return True

    def _subscribe(self, client: Client, prefix: str) -> None:
        """Answer with what is there, all of it before anything new."""
        client.prefix = prefix
        self._subscribers.add(client)
        found: dict[str, bytes | None] = {key: self._values[key] for key in self._keys(prefix)}
        while found:
            client.to_send += frame(Answer(changes=_take_some(found)))
        client.answer(Answer())


class Server:
    """Serves from the time it is made until `close()`."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = _listen(host, port)
        bound_to, self.port = self._listener.getsockname()[:2]
        self.host: str = "127.0.0.1" if bound_to == "0.0.0.0" else bound_to
        """Where this machine reaches it."""
        self._table = Table(first_lease=secrets.randbits(48))
        self._clients: dict[socket.socket, Client] = {}
        self._looked_s = time.monotonic()
        """When this server last looked at the clock, between two turns."""
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="parti-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection, and the thread."""
        os.write(self._wake_write, b"x")
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for connection in [self._listener, *self._clients]:
                connection.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _turn(self) -> bool:
        expiry_s = self._table.next_expiry_s()
        wait_s = None if expiry_s is None else max(0.0, expiry_s - time.monotonic())
        if wait_s is not None and self._table.has_leases:
            wait_s = min(wait_s, _TURN_S)
        ready = self._selector.select(wait_s)
        now_s = time.monotonic()
        held_up_s = now_s - self._looked_s - (wait_s or 0.0)
        self._looked_s = now_s
        if held_up_s > _HELD_UP_S:
            self._table.extend(held_up_s)
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._serve_client(key.fileobj, events)
            else:
                return False
        self._table.expire(now_s)  # not a later time: if held up since, the next turn extends
        num_clients = -1
        while num_clients != len(self._clients):  # a client found dead leaves a will to tell
            num_clients = len(self._clients)
            for connection in [c for c, client in self._clients.items() if client.load()]:
                self._send(connection)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            configure(connection)
            self._clients[connection] = Client()
            self._selector.register(connection, selectors.EVENT_READ)

    def _serve_client(self, connection: socket.socket, events: int) -> None:
        client = self._clients.get(connection)
        if client is None or not events & selectors.EVENT_READ:
            return
        try:
            data = connection.recv(_READ_BYTES)
            client.received += data
            for body in take_frames(client.received):
                self._table.apply(client, _decode_request(body), time.monotonic())
        except BlockingIOError:
            return
        except (OSError, CommError, msgspec.DecodeError):  # gone, or no client of ours
            data = b""
        if not data:
            self._drop(connection)

    def _send(self, connection: socket.socket) -> None:
        client = self._clients[connection]
        to_send = client.to_send
        try:
            del to_send[: connection.send(to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        has_more = bool(to_send or client.changes)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_more else 0)
        self._selector.modify(connection, events)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._table.forget(self._clients.pop(connection))
        connection.close()


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the interface of `host`; on all where that is not an address of this machine's
    own (a service's name, an address behind a gateway)."""
    for family, address in _addresses(host, port):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host} is in use on this machine, by another job perhaps: "
                    "choose another port for all nodes"
                ) from error
            if error.errno == errno.EACCES:
                raise ConfigError(f"port {port} needs privileges: choose one above 1023") from error
        else:
            return listener
    raise ConfigError(f"cannot listen on {host}:{port}, nor on any address of this machine")


def _addresses(host: str, port: int) -> Iterator[tuple[socket.AddressFamily, tuple[str, int]]]:
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            yield family, (str(address[0]), port)
    yield socket.AF_INET, ("", port)
