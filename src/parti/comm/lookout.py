"""Waiting for many connections at once, and for a bell that any thread can ring.

Owns the selector and the bell. Must not know what is done with a connection that is ready.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import NamedTuple

from parti.comm.links import Link

_RINGS_BYTES = 4096


class Ready(NamedTuple):
    link: Link
    to_read: bool
    to_write: bool


class Lookout:
    """All but `ring` is for one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        # Reentrant: the garbage collector may have a thread ring that is ringing.
        self._pulling = threading.RLock()

    def ring(self) -> None:
        """Have `wait` return."""
        # The bell is full: it rings already. It is gone: so is who would hear it.
        with self._pulling, contextlib.suppress(OSError):
            self._rope.send(b"!")

    def watch(self, link: Link, *, to_read: bool, to_write: bool) -> None:
        """Look for this on the link from now on, and for nothing else."""
        wanted = to_read * selectors.EVENT_READ | to_write * selectors.EVENT_WRITE
        if wanted == link.watched:
            return
        if not link.watched:
            self._selector.register(link, wanted, link)
        elif wanted:
            self._selector.modify(link, wanted, link)
        else:
            # Not watched for nothing: errors would be reported all the time.
            self._selector.unregister(link)
        link.watched = wanted

    def wait(self, timeout_s: float) -> list[Ready]:
        """The links that are ready, at a ring or after the time-out maybe none."""
        found = []
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                self._bell.recv(_RINGS_BYTES)
                continue
            to_read, to_write = events & selectors.EVENT_READ, events & selectors.EVENT_WRITE
            found.append(Ready(key.data, bool(to_read), bool(to_write)))
        return found

    def close(self) -> None:
        # Nobody may be ringing: the number of the rope is soon another file's.
        with self._pulling:
            self.forget()

    def forget(self) -> None:
        """Close what a forked process has inherited; a lock that it inherited may never be free."""
        self._selector.close()
        self._bell.close()
        self._rope.close()
