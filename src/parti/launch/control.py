"""The line between a worker and its supervisor, and the board on which a worker shows its progress.

The line is a pair of sockets that keeps messages apart; the board is a page of memory that both
map, so that saying where it is costs a worker no system call. Both are inherited. No torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import tempfile
import time
from enum import IntEnum
from typing import TypeAlias

import msgspec

_MAX_MESSAGE_BYTES = 1 << 20
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
BOARD_BYTES = 4096
_STAND_BY_S = 3600.0
_BEAT, _PHASE, _STEP, _SINCE_NS, _IS_WAITING, _IS_LENIENT, _ORDER = range(7)


class Order(IntEnum):
    """What a supervisor wants of its workers."""

    GO_ON = 0
    STOP = 1
    """Save the state after this step, and end."""
    END = 2
    """End at once; a signal follows."""


class IsHere(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker is ready to be in a world, and can go on when others are lost."""

    patience_s: float


class HasEntered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has settled in a world."""

    generation: int


class HasLost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has found that another of its world is gone."""

    generation: int
    missed: tuple[int, ...] = ()
    """Members on other hosts, as far as it knows whom it has missed."""


class CanStop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has begun a loop whose states are kept, or has ended it. Within it, it can be asked
    to save the state and end."""

    can: bool


class WasAsked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker was asked to stop, by a signal to itself."""

    signal: int


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All workers have saved the state after a step and end now."""

    step: int
    """How many steps have been taken."""
    directory: str
    problem: str
    """Why the state could not be saved; empty if it could."""


class Called(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The next world."""

    generation: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    last_torn: int = 0
    """The newest world that was called because somebody was gone. Members of an older one leave it
    at once, others at the end of their step."""
    is_paused: bool = False


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No world comes after the lost one."""

    generation: int


class Activated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A spare is to take a place."""


FromWorker: TypeAlias = IsHere | HasEntered | HasLost
"""What is said of worlds."""
OfStopping: TypeAlias = CanStop | WasAsked | Stopped
FromSupervisor: TypeAlias = Called | Refused | Activated

_encode = msgspec.msgpack.Encoder().encode
_decode_from_worker = msgspec.msgpack.Decoder(FromWorker | OfStopping).decode
_decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode


def _page() -> int:
    """A descriptor of memory that two processes can map."""
    if sys.platform == "linux":
        return os.memfd_create("parti-board", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Board:
    """What a worker last said of itself, and its orders. Each word is written by one side alone:
    the order by the supervisor, all others by the worker."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BOARD_BYTES)
        self._words = memoryview(self._memory).cast("q")

    def report(self, phase: int, step: int, *, is_lenient: bool) -> None:
        words = self._words
        words[_PHASE] = phase
        words[_STEP] = step
        words[_IS_LENIENT] = is_lenient
        words[_SINCE_NS] = time.monotonic_ns()
        words[_BEAT] += 1

    def waits(self, is_waiting: bool) -> None:
        """Whether it stands still because others have not come yet."""
        self._words[_IS_WAITING] = is_waiting
        self._words[_BEAT] += 1

    @property
    def beat(self) -> int:
        """Grows with every sign of life of the worker's own program."""
        return self._words[_BEAT]

    @property
    def phase(self) -> int:
        return self._words[_PHASE]

    @property
    def step(self) -> int:
        return self._words[_STEP]

    @property
    def since_s(self) -> float:
        return self._words[_SINCE_NS] / 1e9

    @property
    def is_waiting(self) -> bool:
        return bool(self._words[_IS_WAITING])

    @property
    def is_lenient(self) -> bool:
        """It does something now that may take long."""
        return bool(self._words[_IS_LENIENT])

    @property
    def order(self) -> Order:
        return Order(self._words[_ORDER])

    def command(self, order: Order) -> None:
        self._words[_ORDER] = order

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class SupervisorsEnd:
    """One worker's line and board, as its supervisor holds them."""

    def __init__(self) -> None:
        self._line, self._theirs = socket.socketpair(socket.AF_UNIX, _KIND)
        self._line.setblocking(False)
        self._board_fd = _page()
        os.ftruncate(self._board_fd, BOARD_BYTES)
        self.board = Board(self._board_fd)
        self.can_stop = False
        self.was_asked = 0
        """The signal by which the worker itself was asked to stop."""
        self.stopped: Stopped | None = None

    @property
    def inherited(self) -> tuple[int, int]:
        """The descriptors that the worker is started with."""
        return self._theirs.fileno(), self._board_fd

    def started(self) -> None:
        """The worker has them; ours of them close."""
        self._theirs.close()
        os.close(self._board_fd)

    def fileno(self) -> int:
        return self._line.fileno()

    def send(self, message: FromSupervisor) -> None:
        # One that is gone, or reads nothing, will be noticed otherwise.
        with contextlib.suppress(OSError):
            self._line.send(_encode(message))

    def receive(self) -> list[FromWorker] | None:
        """What has come of worlds; None when the worker has closed its end. What it says of
        stopping is kept here."""
        found: list[FromWorker] = []
        while True:
            try:
                data = self._line.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if not data:
                return found or None
            with contextlib.suppress(msgspec.DecodeError):
                match message := _decode_from_worker(data):
                    case CanStop():
                        self.can_stop = message.can
                    case WasAsked():
                        self.was_asked = message.signal
                    case Stopped():
                        self.stopped = message
                    case _:
                        found.append(message)

    def close(self) -> None:
        self._line.close()
        self.board.close()


class WorkersEnd:
    """The same, as the worker holds them."""

    def __init__(self, line_fd: int, board_fd: int) -> None:
        for fd in (line_fd, board_fd):
            os.set_inheritable(fd, False)
        self._line = socket.socket(fileno=line_fd)
        self.board = Board(board_fd)
        os.close(board_fd)

    def wait_for_call(self) -> None:
        """Stand by until this process is needed."""
        while not isinstance(self.receive(_STAND_BY_S), Activated):
            pass

    def send(self, message: FromWorker | OfStopping) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and this process soon
            self._line.send(_encode(message))

    def receive(self, wait_s: float) -> FromSupervisor | None:
        """The next message, None if there is none by then."""
        if wait_s > 0 and not select.select([self._line], [], [], wait_s)[0]:
            return None
        try:
            data = self._line.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        return _decode_from_supervisor(data) if data else None


def read_inherited(value: str) -> WorkersEnd:
    """The worker's end from what its supervisor wrote into PARTI_CONTROL."""
    line_fd, board_fd = map(int, value.split(":"))
    return WorkersEnd(line_fd, board_fd)
