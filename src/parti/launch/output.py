"""Where workers' output goes: log files, and the console. Knows nothing of processes.

Training never stops for its output: a full disk or a closed console is told once and then the
output is dropped. A console that is only slow holds back rank 0, and nobody else.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
import time
from pathlib import Path
from typing import Protocol, TextIO

_MAX_TAIL_BYTES = 64 * 1024
_MAX_BACKLOG_BYTES = 1024 * 1024
_MAX_HELD_BYTES = 64 * 1024

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CUT_OFF = re.compile(rb"(?:\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|\][^\x07\x1b]{0,1024}\x1b?)?|\r)\Z")


class PlainText:
    """Makes a log of what was meant for a screen: no colours, no states of a bar but its last.

    What is not overwritten passes at once. After a carriage return, text waits until its line
    ends, since more states may follow.
    """

    def __init__(self) -> None:
        self._carry = b""
        self._state: bytes | None = None
        """What follows the last carriage return of this line; None where there is none yet."""
        self._last_state = b""
        """The last one before it that was not empty."""
        self._is_line_open = False

    def feed(self, data: bytes) -> bytes:
        data = self._carry + data
        self._carry = b""
        cut = _CUT_OFF.search(data)  # half an escape sequence, or a \r whose \n is still to come
        if cut is not None:
            data, self._carry = data[: cut.start()], data[cut.start() :]
        pieces = _ESCAPES.sub(b"", data).replace(b"\r\n", b"\n").split(b"\n")
        lines = [self._extend(piece) + self._end_line() + b"\n" for piece in pieces[:-1]]
        rest = self._extend(pieces[-1])
        if self._state is not None and len(self._state) > _MAX_HELD_BYTES:
            rest += self._end_line()
            self._is_line_open = True
        return b"".join(lines) + rest

    def close(self) -> bytes:
        """What is still held."""
        self._carry = b""
        return self._end_line()

    def _extend(self, piece: bytes) -> bytes:
        """Take in a part of a line; return what of it can pass already."""
        first, *later = piece.split(b"\r")
        passed = b""
        if self._state is None:
            passed = first
            self._is_line_open = self._is_line_open or bool(first)
        else:
            self._state += first
        for state in later:
            self._last_state = self._state or self._last_state
            self._state = state
        return passed

    def _end_line(self) -> bytes:
        final = self._state or self._last_state
        start = b"\n" if final and self._is_line_open else b""
        self._state, self._last_state, self._is_line_open = None, b"", False
        return start + final


class Log:
    """A rank's log file and the end of its output, in memory, for the failure's story."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the file is not written any more."""
        self._plain = PlainText()
        self._tail = bytearray()
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.problem = error.strerror

    def write(self, data: bytes) -> None:
        self._write(self._plain.feed(data))

    def close(self) -> None:
        self._write(self._plain.close())
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def tail(self) -> str:
        return self._tail[-_MAX_TAIL_BYTES:].decode(errors="replace")

    def _write(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * _MAX_TAIL_BYTES:
            del self._tail[:-_MAX_TAIL_BYTES]
        while data and self._file is not None:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                self.problem = error.strerror
                os.close(self._file)
                self._file = None


class Sink(Protocol):
    """One of the two outputs of the console. `write` never waits."""

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Write what can be written without waiting."""

    @property
    def waits_for(self) -> int | None:
        """The file descriptor that has to become writable before more can be written."""

    @property
    def is_full(self) -> bool:
        """Whoever feeds this sink has to stop until it is not full any more."""

    @property
    def is_at_line_start(self) -> bool: ...


class FileSink:
    """A file descriptor that may be slow: a terminal, a pipe, a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._backlog = bytearray()
        self._is_broken = False
        self._last = b"\n"
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> None:
        if data and not self._is_broken:
            self._last = data[-1:]
            self._backlog += data
            self.flush()

    def flush(self) -> None:
        # A pipe that polls as writable takes PIPE_BUF bytes without blocking. O_NONBLOCK would
        # change the terminal for every process that shares it.
        while self._backlog and self._poll.poll(0):
            try:
                written = os.write(self._fd, self._backlog[: select.PIPE_BUF])
            except OSError:
                self._is_broken = True
                self._backlog.clear()
                return
            del self._backlog[:written]

    @property
    def waits_for(self) -> int | None:
        return self._fd if self._backlog else None

    @property
    def is_full(self) -> bool:
        return len(self._backlog) > _MAX_BACKLOG_BYTES

    @property
    def is_at_line_start(self) -> bool:
        return self._last == b"\n"


class TextSink:
    """A text stream of this process, such as a notebook's `sys.stdout`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last = "\n"

    def write(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if text:
            self._last = text[-1]
            self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def waits_for(self) -> int | None:
        return None

    @property
    def is_full(self) -> bool:
        return False

    @property
    def is_at_line_start(self) -> bool:
        return self._last == "\n"


class Console:
    """What a person looks at: rank 0's output, and the supervisor's own few words."""

    def __init__(self, out: Sink, err: Sink, *, out_tty: int | None, err_tty: int | None) -> None:
        self.out = out
        self.err = err
        self.out_tty = out_tty
        """The terminal behind `out`, where there is one: rank 0 then gets a terminal too."""
        self.err_tty = err_tty

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return (self.out,) if self.out is self.err else (self.out, self.err)

    def note(self, text: str) -> None:
        """A word of the supervisor's, beginning on a line of its own."""
        at_start = self.err.is_at_line_start and (self.err_tty is None or self.out.is_at_line_start)
        self.err.write(b"" if at_start else b"\n")
        self.err.write(f"parti: {text.rstrip()}\n".encode())

    def end_echo(self) -> None:
        """The terminal has just shown the ^C that was typed: begin a line after it."""
        if self.err_tty is not None:
            self.err.write(b"\n")

    def flush(self, timeout_s: float) -> None:
        """Wait for what is written to be shown, up to a limit."""
        deadline_s = time.monotonic() + timeout_s
        for sink in self.sinks:
            sink.flush()
            while sink.waits_for is not None and time.monotonic() < deadline_s:
                select.select([], [sink.waits_for], [], deadline_s - time.monotonic())
                sink.flush()


def terminal_console() -> Console:
    """The console of a process that was started from a shell or a scheduler."""
    sys.stdout.flush()
    sys.stderr.flush()
    out_tty = 1 if os.isatty(1) else None
    err_tty = 2 if os.isatty(2) else None
    out = FileSink(1)
    # Two terminals are taken for the same one: rank 0's streams then share a terminal, in order.
    err = out if out_tty and err_tty else FileSink(2)
    return Console(out, err, out_tty=out_tty, err_tty=err_tty)


def notebook_console() -> Console:
    """Output goes through `sys.stdout`, which IPython and others replace."""
    return Console(TextSink(sys.stdout), TextSink(sys.stderr), out_tty=None, err_tty=None)
