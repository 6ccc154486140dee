"""One connection to one rank, and the frames that travel on it.

A frame is a header (what it is, its number, how long it is) and a body. Bodies are sent from the
memory they lie in and received into the memory they are meant for. A frame that comes before
anybody has said where it shall go stays in the kernel, so a sender that is ahead is held back.

Owns one socket and the state of its two directions. Must not know deadlines or failures.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from parti.comm.operations import Operation

CONTROL = -1
"""In the place of a lane: the connection that every pair of ranks has."""

_HEADER = struct.Struct("<BQQ")
_READ_BYTES = 1 << 20
"""What one link may take at a time, so that it does not keep the others waiting."""


class Kind(IntEnum):
    """What a frame is."""

    BEAT = 0
    """A sign of life."""
    LETTER = 1
    SCATTER = 2
    GATHER = 3
    NOTICE = 4
    """The sender gave up; the body says why."""
    FAREWELL = 5
    """The last frame of a connection that ends in good order."""


class Header(NamedTuple):
    kind: int
    number: int
    num_bytes: int

    def __str__(self) -> str:
        known = self.kind in Kind.__members__.values()
        name = Kind(self.kind).name.lower() if known else f"frame of kind {self.kind}"
        return f"{name} {self.number} of {self.num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame that is still to come shall go, and what it has to be."""

    header: Header
    memory: memoryview
    operation: Operation


class Frame:
    """Something to send."""

    __slots__ = ("operation", "rest")

    def __init__(
        self,
        kind: Kind,
        number: int,
        body: bytes | memoryview = b"",
        operation: Operation | None = None,
    ) -> None:
        """`operation` is told when the kernel has taken the whole of it."""
        self.operation = operation
        self.rest = [memoryview(_HEADER.pack(kind, number, len(body)))]
        if len(body):
            self.rest.append(memoryview(body))

    def advance(self, num_bytes: int) -> bool:
        """Drop what was sent; whether that was all."""
        while self.rest and num_bytes >= len(self.rest[0]):
            num_bytes -= len(self.rest.pop(0))
        if self.rest and num_bytes:
            self.rest[0] = self.rest[0][num_bytes:]
        return not self.rest


class Receiver(Protocol):
    """Who knows what is to be done with frames."""

    def find_place(self, link: Link, header: Header) -> memoryview | None:
        """Where the body shall go; None: not known yet."""
        ...

    def take(self, link: Link, header: Header, body: memoryview) -> None:
        """A frame has come whole."""
        ...


class Link:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, peer: int, lane: int) -> None:
        self.peer = peer
        self.lane = lane
        self.places: deque[Place] = deque()
        self.num_letters = 0
        self.is_stalled = False
        """A frame has come that has no place yet."""
        self.is_over = False
        """Nothing more can come."""
        self.has_left = False
        """The peer said farewell."""
        self.heard_s = time.monotonic()
        """When the last bytes came."""
        self.moved_s = 0.0
        """When the last bytes of a body moved, in either direction."""
        self.watched = 0
        """What the lookout looks for."""
        self.problem = ""
        """Why sending failed; receiving finds the end by itself."""
        self._socket = connection
        self._queue: deque[Frame] = deque()
        self._sending = threading.Lock()
        self._head = memoryview(bytearray(_HEADER.size))
        self._header: Header | None = None
        self._body: memoryview | None = None
        self._left = self._head

    def fileno(self) -> int:
        return self._socket.fileno()

    def enqueue(self, frame: Frame) -> None:
        """Leave it for the next `flush`."""
        self._queue.append(frame)

    @property
    def is_waiting_to_send(self) -> bool:
        return bool(self._queue)

    def send(self, frame: Frame) -> None:
        """Send it now as far as the kernel takes it; the rest waits for `flush`."""
        with self._sending:
            self._queue.append(frame)
            self._flush()

    def flush(self) -> list[Operation]:
        """Hand the kernel what it takes; the operations that had a frame sent whole."""
        with self._sending:
            return self._flush()

    def _flush(self) -> list[Operation]:
        done: list[Operation] = []
        try:
            while self._queue:
                frame = self._queue[0]
                num_bytes = self._socket.sendmsg(frame.rest)
                if num_bytes > _HEADER.size:
                    self.moved_s = time.monotonic()
                if not frame.advance(num_bytes):
                    break
                self._queue.popleft()
                if frame.operation is not None:
                    done.append(frame.operation)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            # Not the end yet: what the peer sent before it went may still be there to read.
            self.problem = describe(error)
            self._queue.clear()
        return done

    def read(self, receiver: Receiver) -> None:
        """Take what has come, at most one frame. EOFError or OSError at the end of the stream."""
        while True:
            if self._header is not None and self._body is None:
                self._body = receiver.find_place(self, self._header)
                if self._body is None:
                    self.is_stalled = True
                    return
                self._left = self._body
            if len(self._left) and not self._fill():
                return
            if self._header is None:
                self._header = Header(*_HEADER.unpack(self._head))
                continue
            header, body = self._header, self._body
            self._header, self._body, self._left = None, None, self._head
            assert body is not None
            receiver.take(self, header, body)
            return

    def _fill(self) -> bool:
        """Read into what is left to fill; whether it is full."""
        try:
            num_bytes = self._socket.recv_into(self._left[:_READ_BYTES])
        except (BlockingIOError, InterruptedError):
            return False
        if num_bytes == 0:
            raise EOFError(self.problem or "closed")
        self.heard_s = time.monotonic()
        if self._header is not None:
            self.moved_s = self.heard_s
        self._left = self._left[num_bytes:]
        return not len(self._left)

    def acknowledge(self) -> None:
        """Have the kernel tell the peer at once what has come, not up to 40 ms later."""
        if hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def num_unsent_bytes(self) -> int:
        """Bytes that the peer's host has not confirmed, as far as the system tells."""
        if self.problem or _is_dead(self._socket):
            return 0
        waiting = sum(len(piece) for frame in list(self._queue) for piece in frame.rest)
        return waiting + _unconfirmed_bytes(self._socket)

    def close(self) -> None:
        # Nobody may be sending: the number of the socket is soon another file's.
        with self._sending:
            self._queue.clear()
            self._socket.close()
        self.places.clear()

    def forget(self) -> None:
        """Close what a forked process has inherited."""
        self._socket.close()


def describe(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _is_dead(connection: socket.socket) -> bool:
    """Closed in both directions, so that nothing sent on it arrives any more."""
    look = select.poll()
    look.register(connection, 0)  # errors and hang-ups are always told
    return bool(look.poll(0))


def _unconfirmed_bytes(connection: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    import fcntl
    import termios

    answer = bytearray(4)
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, answer)
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)
