"""Worker processes that read ahead. Owns how they start, how they end, and what they inherit.

Built on torch's DataLoader for its processes and shared memory only: which samples go into a
micro-batch is decided in this process and sent along, so the data does not depend on the number
of workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from parti.data.dealing import Dealer, Share, Shares, Wanted
from parti.data.order import Position
from parti.data.samples import Source
from parti.data.streams import Stream, StreamStep
from parti.errors import DataError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How many processes read ahead; the rest is what a user's own DataLoader asks for."""

    num_workers: int = 0
    init: Callable[[int], None] | None = None
    context: Any = None
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that crossed a process boundary as text: not every exception can be pickled."""

    message: str
    trace: str


class ReadAhead:
    """Has workers read the micro-batches of this rank some steps before they are used."""

    def __init__(
        self, source: Source, dealer: Dealer, num_epochs: int, settings: WorkerSettings
    ) -> None:
        self._source = source
        self._dealer = dealer
        self._num_epochs = num_epochs
        self._settings = settings
        self._loader: DataLoader[Any] | None = None
        self._results: Iterator[Any] = iter(())
        self._asked: deque[tuple[Position, tuple[int, ...]]] = deque()
        self._start = Position()

    def parts(self, position: Position, share: Share) -> list[Any]:
        """The data of the rank's micro-batches at `position`.

        Steps are asked for in order. Where the rank owns other micro-batches by now than when the
        step was sent out, what was read ahead is dropped, and reading starts again from here.
        """
        while self._asked and not self._asked[0][1]:
            self._asked.popleft()
        if not share.numbers:
            return []
        if not self._asked or self._asked[0] != (position, share.numbers):
            self._restart(position, len(share.numbers))
        parts = [_received(self._results) for _ in share.numbers]
        self._asked.popleft()
        return parts

    def close(self) -> None:
        _end(self._results)
        self._results = iter(())
        self._loader = None

    def _restart(self, position: Position, num_parts: int) -> None:
        self._start = position
        self._asked.clear()
        if self._loader is None:
            self._loader = _loader(
                _Reading(self._source),
                self._settings,
                sampler=_Schedule(self._tasks),
                num_ahead=2 * num_parts,
            )
        with _forking_allowed():
            self._results = iter(self._loader)

    def _tasks(self) -> Iterator[Wanted]:
        """What to read, one micro-batch at a time. Runs in this process, ahead of its use."""
        for position in self._dealer.positions(self._start, self._num_epochs):
            epoch, step = position.epoch, position.step_in_epoch
            share = self._dealer.share(step)
            if not share.numbers and share.num_micro_batches == self._dealer.num_micro_batches:
                return  # a spare rank; it may be given work later, and then starts from there
            self._asked.append((position, share.numbers))
            yield from self._dealer.wanted(epoch, step, share).each()


def stream_ahead(
    stream: Stream, shares: Shares, start: Position, settings: WorkerSettings
) -> Iterator[StreamStep]:
    """The steps of a stream, read by one worker.

    The worker knows who owns what as of its start. When that has changed, another takes over at
    the first step that differs; it has to read the stream from the beginning of the epoch.
    """
    while True:
        reading = _StreamReading(stream, shares.frozen(), start)
        with _forking_allowed():
            results = iter(_loader(reading, settings, sampler=None, num_ahead=2))
        try:
            while True:
                try:
                    step: StreamStep = _received(results)
                except StopIteration:
                    return
                if shares.of(step.share.num_samples).numbers != step.share.numbers:
                    start = step.position
                    break
                yield step
        finally:
            _end(results)


class _Reading(Dataset[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, wanted: Wanted) -> Any:
        try:
            return self._source.fetch(wanted)[0]
        except Exception as error:
            return _Failure(str(error), traceback.format_exc())


class _StreamReading(IterableDataset[Any]):
    def __init__(self, stream: Stream, shares: Shares, start: Position) -> None:
        self._stream = stream
        self._shares = shares
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        # A data set that finds itself in a worker gives a part of its samples, or all in another
        # order. This one has to see all, in the order it would give them outside.
        torch_worker._worker_info = None
        try:
            for step in self._stream.steps(self._shares, self._start):
                yield replace(step, group=None)  # what other ranks compute is not sent along
        except Exception as error:
            yield _Failure(str(error), traceback.format_exc())


@dataclass(frozen=True, slots=True)
class _Schedule:
    """torch asks for a sampler that can be iterated anew."""

    tasks: Callable[[], Iterator[Wanted]]

    def __iter__(self) -> Iterator[Wanted]:
        return self.tasks()


def _loader(
    data: Dataset[Any],
    settings: WorkerSettings,
    *,
    sampler: Iterable[Wanted] | None,
    num_ahead: int,
) -> DataLoader[Any]:
    # Fork, as torch does by default: a script without `if __name__ == "__main__"` cannot be
    # imported again by a spawned worker, and data in memory is shared instead of copied. What
    # makes forking a rank dangerous, its connections and handlers, `_init_worker` undoes.
    context = settings.context or ("fork" if sys.platform == "linux" else "spawn")
    return DataLoader(
        data,
        batch_size=None,
        sampler=sampler,
        num_workers=settings.num_workers,
        collate_fn=_as_it_is,
        multiprocessing_context=context,
        worker_init_fn=partial(
            _init_worker,
            os.getpid() if threading.current_thread() is threading.main_thread() else None,
            settings.init,
        ),
        timeout=settings.timeout_s,
        prefetch_factor=max(2, -(-num_ahead // settings.num_workers)),
        persistent_workers=sampler is not None,
        generator=torch.Generator(),  # or it would draw from the model's
    )


def _as_it_is(data: Any) -> Any:
    return data


def _received(results: Iterator[Any]) -> Any:
    try:
        result = next(results)
    except RuntimeError as error:
        raise DataError(
            f"a data worker ended or did not answer: {error} Run with workers=0 to see the error "
            "where it happens; if memory ran out, use fewer workers."
        ) from error
    if isinstance(result, _Failure):
        failure = DataError(result.message)
        failure.add_note(f"In a data worker:\n{result.trace.rstrip()}")
        raise failure
    return result


def _end(results: Iterator[Any]) -> None:
    """End the workers behind an iterator. torch waits until the last reference to it goes, which
    may be a long time: the traceback of an error holds one."""
    end = getattr(results, "_shutdown_workers", None)
    if end is not None:
        end()


@contextmanager
def _forking_allowed() -> Iterator[None]:
    """Python 3.12 and later warn of forking where there are threads. The workers start none of
    their own accord and compute with one, as torch's do."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*use of fork.. may lead to deadlocks", DeprecationWarning
        )
        yield


def _init_worker(parent_pid: int | None, init: Callable[[int], None] | None, worker: int) -> None:
    """First thing in a worker: shed what it has from the rank, then what the user wants done."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        _disconnect()
        if parent_pid is not None:
            _die_with(parent_pid)
    if init is not None:
        init(worker)


def _die_with(parent_pid: int) -> None:
    """Be killed when the rank ends in whatever way. The kernel means the thread that forked, so
    this is for workers of the main thread; the others notice within seconds."""
    if os.getppid() != parent_pid:
        return  # started through a fork server, which is the parent then
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _disconnect() -> None:
    """Let go of network connections of the rank.

    Held open here, they would keep the rank's peers from seeing that it has closed them. The
    numbers stay taken, in case something still refers to them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if _is_network_socket(number):
                os.dup2(nothing, number, inheritable=False)
    finally:
        os.close(nothing)


def _is_network_socket(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        connection = socket.socket(fileno=os.dup(number))
    except OSError:  # closed meanwhile: the listing of the directory itself
        return False
    with connection:
        return connection.family in (socket.AF_INET, socket.AF_INET6)
