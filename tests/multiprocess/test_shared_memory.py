"""The memory that processes of one host share, with real processes and no launcher around them."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import cloudpickle
import pytest
import torch

from parti.comm.protocol import Phase
from parti.comm.rendezvous import Directory, meeting_in
from parti.comm.shared_memory import SharedMemory
from parti.errors import CommError, CommTimeout, PartiError, PeerLost

DEADLINE_S = 60.0
# What one mailbox holds; a payload beyond it travels in several frames.
ROOM_BYTES = 256 * 1024 - 8

Body = Callable[[SharedMemory], Any]


def serve(path: Path, rank: int, size: int, patience_s: float, num_cores: int, body: Body) -> None:
    """What a process of these tests does: join the others, run the body, leave the outcome."""
    torch.set_num_threads(1)
    meeting = meeting_in(Directory(path), rank, size, patience_s)
    outcome: object
    try:
        comm = SharedMemory(
            rank=rank,
            ranks=tuple(range(size)),
            meet=lambda mine: meeting("memory", mine),
            patience_s=patience_s,
            num_cores=num_cores,
        )
        outcome = body(comm)
    except PartiError as error:
        outcome = (error, time.monotonic())
    (path / f"outcome{rank}").write_bytes(cloudpickle.dumps(outcome))


class Host:
    """Starts processes that share memory; none survives the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        size: int,
        body: Body,
        *,
        patience_s: float = 30.0,
        num_cores: int | None = None,
        absent: tuple[int, ...] = (),
    ) -> None:
        for rank in set(range(size)) - set(absent):
            cores = num_cores or len(os.sched_getaffinity(0))
            call = cloudpickle.dumps((serve, (self.path, rank, size, patience_s, cores, body)))
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import cloudpickle, sys\n"
                    "function, arguments = cloudpickle.load(sys.stdin.buffer)\n"
                    "function(*arguments)",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._processes[rank] = process
            pipe(process.stdin).write(call)
            pipe(process.stdin).flush()

    def await_word(self, rank: int) -> None:
        """Wait for a line of output."""
        assert pipe(self._processes[rank].stdout).readline()

    def kill(self, rank: int) -> None:
        """Not waited for: it stays as a zombie, as it does until its launcher looks."""
        self._processes[rank].kill()

    def outcome(self, rank: int) -> Any:
        assert self._processes[rank].wait(DEADLINE_S) == 0
        return cloudpickle.loads((self.path / f"outcome{rank}").read_bytes())

    def outcomes(self) -> list[Any]:
        return [self.outcome(rank) for rank in sorted(self._processes)]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(DEADLINE_S)
            with contextlib.suppress(BrokenPipeError):
                pipe(process.stdin).close()
            pipe(process.stdout).close()


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    opened = Host(tmp_path)
    yield opened
    opened.close()
    cloudpickle.unregister_pickle_by_value(module)


def letter(rank: int, number: int, size: int) -> bytes:
    """Bytes that no other rank sends and no other exchange carries."""
    return bytes([(31 * rank + 7 * number + 1) % 251]) * size


SIZES = (0, 1, ROOM_BYTES - 1, ROOM_BYTES, ROOM_BYTES + 1, 2 * ROOM_BYTES, 3 * ROOM_BYTES + 5)


def test_letters_of_any_size_arrive_whole(host: Host) -> None:
    def body(comm: SharedMemory) -> bool:
        for number in range(2 * len(SIZES)):
            # Every rank another size in every exchange, so empty meets several frames.
            sent = [
                letter(rank, number, SIZES[(number + 3 * rank) % len(SIZES)]) for rank in comm.ranks
            ]
            if comm.exchange(sent[comm.index]) != tuple(sent):
                return False
        return True

    host.start(3, body)
    assert host.outcomes() == [True] * 3


def test_thousands_of_letters_come_in_order(host: Host) -> None:
    def body(comm: SharedMemory) -> int:
        for number in range(5000):
            expected = tuple(b"%d:%d" % (rank, number) for rank in comm.ranks)
            if comm.exchange(expected[comm.index]) != expected:
                return number
        return -1

    host.start(2, body)
    assert host.outcomes() == [-1, -1]


def test_more_processes_than_cores(host: Host) -> None:
    def body(comm: SharedMemory) -> bool:
        region = comm.allocate(8 * 1000)
        mine = region.mine.view(torch.int64)
        good = True
        for number in range(100):
            mine.fill_(comm.index + number)
            comm.exchange(b"")  # written before it, seen after it
            for rank in comm.ranks:
                good &= bool((region.views[rank].view(torch.int64) == rank + number).all())
            comm.exchange(b"")  # read before it, written again after it
        return good

    size = len(os.sched_getaffinity(0)) + 2
    host.start(size, body)
    assert host.outcomes() == [True] * size


def test_regions_are_zeroed_separate_and_seen_by_all(host: Host) -> None:
    def body(comm: SharedMemory) -> list[list[int]]:
        regions = [comm.allocate(size) for size in (0, 1, 4096, 5_000_001)]
        found = [[len(view) for view in region.views] for region in regions]
        found.append([int(view.max()) for region in regions[1:] for view in region.views])
        comm.exchange(b"")  # all have read the zeros
        for number, region in enumerate(regions[1:]):
            region.mine.fill_(10 * number + comm.index + 1)
        comm.exchange(b"")
        for region in regions[1:]:
            found += [view.unique().tolist() for view in region.views]
        comm.exchange(b"")
        return found

    host.start(2, body)
    lengths = [[0, 0], [1, 1], [4096, 4096], [5_000_001, 5_000_001]]
    expected = [*lengths, [0] * 6, [1], [2], [11], [12], [21], [22]]
    assert host.outcomes() == [expected, expected]


def test_memory_and_descriptors_are_given_back(host: Host) -> None:
    path = host.path

    def body(comm: SharedMemory) -> tuple[int, int, int]:
        def num_mapped() -> int:
            return Path("/proc/self/maps").read_text().count("memfd:parti")

        def num_open() -> int:
            return len(os.listdir("/proc/self/fd"))

        meeting = meeting_in(Directory(path), comm.index, 2, DEADLINE_S)
        num_before = num_open()
        for number in range(20):
            again = SharedMemory(
                rank=comm.index,
                ranks=comm.ranks,
                meet=partial(meeting, f"again{number}"),
                patience_s=DEADLINE_S,
                num_cores=2,
            )
            for _ in range(5):
                region = again.allocate(100_000)
            num_held = num_open() - num_before
        del region, again
        return num_held, num_open() - num_before, num_mapped()

    before = set(Path("/dev/shm").iterdir())
    host.start(2, body)
    # While there is a comm, one descriptor to watch each peer; after it, the first comm's memory.
    assert host.outcomes() == [(1, 0, 2)] * 2
    assert set(Path("/dev/shm").iterdir()) == before


def test_a_killed_rank_is_named_within_a_second(host: Host) -> None:
    def body(comm: SharedMemory) -> None:
        comm.exchange(b"")
        comm.report(Phase.BACKWARD, 17)
        print("here", flush=True)
        if comm.index == 1:
            sys.stdin.buffer.read()  # until it is killed
        comm.exchange(b"")

    host.start(3, body)
    for rank in range(3):
        host.await_word(rank)
    killed_s = time.monotonic()
    host.kill(1)
    for rank in (0, 2):
        error, raised_s = host.outcome(rank)
        assert type(error) is PeerLost
        assert raised_s - killed_s < 1.0
        text = str(error)
        assert text.startswith(f"rank {rank}: exchange 3 waited ")
        assert "s for rank 1; " in text
        assert "Last report from rank 1: backward of step 17, " in text
        assert "Its process is gone: it was killed, or its script ended before" in text


def test_a_rank_that_stays_away_is_named_after_patience(host: Host) -> None:
    def body(comm: SharedMemory) -> None:
        comm.report(Phase.FORWARD, 4)
        comm.exchange(b"")
        if comm.index == 2:
            sys.stdin.buffer.read()
        started_s = time.monotonic()
        try:
            comm.exchange(b"")
        except CommTimeout as error:
            raise CommTimeout(f"{time.monotonic() - started_s:.3f} {error}") from None

    host.start(3, body, patience_s=2.0)
    for rank in (0, 1):
        error, _ = host.outcome(rank)
        assert type(error) is CommTimeout
        waited_s, _, text = str(error).partition(" ")
        assert 2.0 <= float(waited_s) < 4.0
        assert "s for rank 2; ranks 0 and 1 arrived. " in text
        assert "Last report from rank 2: forward of step 4, " in text
        assert text.endswith("Raise `patience_s` if this is expected.")


def test_a_rank_that_never_started_is_named_after_patience(host: Host) -> None:
    host.start(3, lambda comm: None, patience_s=3.0, absent=(1,))
    for error, _ in host.outcomes():
        assert type(error) is CommTimeout
        assert "waited 3 s at the start for rank 1 of 3" in str(error)


def test_memory_that_is_not_there_is_an_error_of_this_host(host: Host) -> None:
    def body(comm: SharedMemory) -> tuple[str, int]:
        num_before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        try:
            comm.allocate(64 * 2**20)
        except CommError as error:
            return str(error), len(os.listdir("/proc/self/fd")) - num_before
        return "reserved", 0

    host.start(2, body)
    for text, num_left in host.outcomes():
        assert "cannot reserve 64.0 MiB of shared memory: File too large. Free memory" in text
        assert num_left == 0
