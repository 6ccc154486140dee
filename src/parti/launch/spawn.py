"""Starts a worker and holds its process and its streams. The only place that spawns one.

A worker is a session of its own: a Ctrl-C in the terminal reaches the supervisor alone, which ends
the workers in its own way, and the processes that a worker starts (data loaders) end with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parti.launch import lifeline
from parti.launch.control import SupervisorsEnd
from parti.launch.output import Console, Log, Sink

_READ_BYTES = 64 * 1024
_MAX_DRAIN_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Stream:
    """One file descriptor that a worker writes to, and where what it writes goes."""

    fd: int
    log: Log
    sink: Sink
    is_shown: bool
    """The worker is the one that a person sees."""
    tty: int | None = None
    """The terminal this one stands in for."""

    @property
    def is_held_back(self) -> bool:
        """What is written here could not be passed on for now."""
        return self.is_shown and self.sink.is_full

    def pump(self) -> bool:
        """Pass on what is there. False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # EIO: nobody holds the other side of the terminal any more
            return False
        self._pass_on(data)
        return bool(data)

    def _pass_on(self, data: bytes) -> None:
        self.log.write(data)
        if self.is_shown:
            self.sink.write(data)

    def drain(self) -> None:
        """Pass on all that is there after the worker's end. Never waits: a process that left the
        worker's session may hold the stream open for ever."""
        for _ in range(_MAX_DRAIN_BYTES // _READ_BYTES):
            try:
                data = os.read(self.fd, _READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self._pass_on(data)

    def copy_size(self) -> None:
        """Give the worker's terminal the size of the real one."""
        if self.tty is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self.tty, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)


@dataclass(slots=True, kw_only=True)
class Worker:
    """A rank's process, alive or not."""

    member: int
    """The number of this process, which no other of the job gets."""
    rank: int
    """The place it was started for."""
    process: subprocess.Popen[bytes]
    log: Log
    streams: list[Stream]
    control: SupervisorsEnd
    pidfd: int | None
    """Becomes readable when the process ends; None where the system has no such thing."""
    exit_code: int | None = None
    ended_s: float = 0.0
    is_ended_by_us: bool = False
    stuck: str | None = None
    """Why it was found to stand still."""
    is_replaced: bool = False
    """It was lost, and the job goes on without it."""

    @property
    def is_on_console(self) -> bool:
        return any(stream.is_shown for stream in self.streams)

    def show(self, is_shown: bool) -> None:
        """Let a person see what it writes from now on."""
        for stream in self.streams:
            stream.is_shown = is_shown

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int, *, to_group: bool = True) -> None:
        """Signal the worker and the processes it started, or the worker alone."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if to_group else os.kill)(self.process.pid, number)

    def has_ended(self) -> bool:
        """Without collecting the process, whose id thereby stays taken."""
        if sys.platform != "linux":
            return self.process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def collect(self) -> None:
        """Take the exit code of a process that has ended, with all it has started."""
        self.ended_s = time.monotonic()
        self.signal(signal.SIGKILL)  # what it left behind; its own id is safe until the next line
        self.exit_code = self.process.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream.fd)
        self.streams.clear()
        self.control.close()
        self.log.close()


def spawn(
    program: Sequence[str],
    *,
    member: int,
    rank: int,
    environ: Mapping[str, str],
    log: Log,
    console: Console,
    cwd: str | None,
    is_shown: bool,
) -> Worker:
    """Start `program` as the worker `rank`; its output goes to `log`, and to the console as well
    while it is the one that is shown."""
    pipes = _Pipes(log, is_shown)
    control = SupervisorsEnd()
    try:
        out = pipes.open(console.out, console.out_tty)
        err = out if console.err is console.out else pipes.open(console.err, console.err_tty)
        line, board = control.inherited
        process = subprocess.Popen(
            lifeline.command(sys.executable, list(program)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**environ, "PARTI_MEMBER": str(member), "PARTI_CONTROL": f"{line}:{board}"},
            cwd=cwd,
            start_new_session=True,
            pass_fds=(line, board),
        )
    except BaseException:
        pipes.close_ours()
        control.close()
        raise
    finally:
        pipes.close_theirs()
        control.started()
    return Worker(
        member=member,
        rank=rank,
        process=process,
        log=log,
        streams=pipes.streams,
        control=control,
        pidfd=os.pidfd_open(process.pid) if sys.platform == "linux" else None,
    )


class _Pipes:
    """Makes pipes and terminals, and keeps book of which side is whose."""

    def __init__(self, log: Log, is_shown: bool) -> None:
        self.streams: list[Stream] = []
        self._theirs: list[int] = []
        self._log = log
        self._is_shown = is_shown

    def open(self, sink: Sink, tty: int | None) -> int:
        return self._pipe(sink) if tty is None else self._terminal(sink, tty)

    def _pipe(self, sink: Sink) -> int:
        ours, theirs = os.pipe()
        return self._add(ours, theirs, sink, None)

    def _terminal(self, sink: Sink, tty: int) -> int:
        """A terminal for the worker, so that its progress bars know they are seen."""
        ours, theirs = os.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # line ends are made by the real terminal, once
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        return self._add(ours, theirs, sink, tty)

    def _add(self, ours: int, theirs: int, sink: Sink, tty: int | None) -> int:
        os.set_blocking(ours, False)
        stream = Stream(fd=ours, log=self._log, sink=sink, is_shown=self._is_shown, tty=tty)
        stream.copy_size()
        self.streams.append(stream)
        self._theirs.append(theirs)
        return theirs

    def close_theirs(self) -> None:
        for fd in self._theirs:
            os.close(fd)

    def close_ours(self) -> None:
        for stream in self.streams:
            os.close(stream.fd)
