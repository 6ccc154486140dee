"""Moves workers' output to their logs and the console, as descriptors become ready.

Rank 0 is read no faster than the console takes it, as if it wrote there itself.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable

from parti.launch.output import Console
from parti.launch.spawn import Stream, Worker


class Feed:
    """The part of the supervisor's selector that is about output."""

    def __init__(self, selector: selectors.BaseSelector, console: Console) -> None:
        self._selector = selector
        self._console = console
        self._held_back: list[Stream] = []
        self._watched: set[int] = set()
        self._workers: list[Worker] = []
        self._has_told = False

    def add(self, worker: Worker) -> None:
        self._workers.append(worker)
        for stream in worker.streams:
            self._read(stream)

    def take_rest(self, worker: Worker) -> None:
        """The worker has ended: what is still in its streams, and then no more."""
        for stream in worker.streams:
            stream.drain()
            self._forget(stream.fd)
            with contextlib.suppress(ValueError):
                self._held_back.remove(stream)

    def copy_terminal_size(self) -> None:
        for worker in self._workers:
            for stream in worker.streams:
                stream.copy_size()

    @property
    def is_flushed(self) -> bool:
        return all(sink.waits_for is None for sink in self._console.sinks)

    def turn(self) -> None:
        """Once in every turn of the loop."""
        for sink in self._console.sinks:
            sink.flush()
            self._await_writable(sink.waits_for)
        if self.is_flushed:
            self._await_nothing()
        for stream in [s for s in self._held_back if not s.is_held_back]:
            self._held_back.remove(stream)
            self._read(stream)
        self._tell_problems()

    def _read(self, stream: Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, self._pumping(stream))

    def _pumping(self, stream: Stream) -> Callable[[], None]:
        def pump() -> None:
            is_open = stream.pump()
            if not is_open or stream.is_held_back:
                self._forget(stream.fd)
            if is_open and stream.is_held_back:
                self._held_back.append(stream)

        return pump

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _await_writable(self, fd: int | None) -> None:
        if fd is not None and fd not in self._watched:
            # A file is always ready, and epoll refuses it.
            with contextlib.suppress(PermissionError):
                self._selector.register(fd, selectors.EVENT_WRITE, lambda: None)
                self._watched.add(fd)

    def _await_nothing(self) -> None:
        for fd in self._watched:
            self._forget(fd)
        self._watched.clear()

    def _tell_problems(self) -> None:
        for worker in self._workers:
            if worker.log.problem is not None and not self._has_told:
                self._has_told = True
                self._console.note(
                    f"{worker.log.path} cannot be written ({worker.log.problem}): training goes "
                    "on, the output from here on is not kept"
                )
