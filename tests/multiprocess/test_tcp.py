"""TCP connections between ranks, with real processes and no launcher around them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import cloudpickle
import pytest
import torch

from parti.comm.protocol import Transfer
from parti.comm.rendezvous import Directory, Meeting, meeting_in
from parti.comm.tcp import Tcp
from parti.errors import CommTimeout, PartiError, PeerLost, RankMismatch

from .test_hosts import hosts  # noqa: F401  a fixture

DEADLINE_S = 60.0
HOSTS_OF = {
    2: ((0,), (1,)),
    3: ((0, 1), (2,)),
    4: ((0,), (1,), (2,), (3,)),
}
"""The hosts that so many ranks are told to be on."""

Body = Callable[[Tcp], Any]
Groups = tuple[tuple[int, ...], ...]


def serve(path: Path, rank: int, groups: Groups, patience_s: float, body: Body) -> None:
    """What a process of these tests does: join the others, run the body, leave the outcome."""
    torch.set_num_threads(1)
    outcome: object
    try:
        comm = Tcp(
            rank=rank,
            groups=groups,
            meet=meeting_in(Directory(path), rank, sum(map(len, groups)), patience_s),
            patience_s=patience_s,
        )
        outcome = body(comm)
    except PartiError as error:
        outcome = (error, time.monotonic())
    draft = path / f"draft{rank}"
    draft.write_bytes(cloudpickle.dumps(outcome))
    draft.rename(path / f"outcome{rank}")


class Job:
    """Starts processes that are joined by TCP; none survives the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        groups: Groups,
        body: Body,
        *,
        patience_s: float = 30.0,
        inside: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """`inside[rank]` are words in front of the command."""
        for rank in sorted(rank for group in groups for rank in group):
            call = cloudpickle.dumps((serve, (self.path, rank, groups, patience_s, body)))
            process = subprocess.Popen(
                [
                    *(inside[rank] if inside else ()),
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

    def tell(self, rank: int) -> None:
        """Let a body go on that reads a line."""
        pipe(self._processes[rank].stdin).write(b"\n")
        pipe(self._processes[rank].stdin).flush()

    def signal(self, rank: int, number: int) -> None:
        self._processes[rank].send_signal(number)

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
def job(tmp_path: Path) -> Iterator[Job]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    opened = Job(tmp_path)
    yield opened
    opened.close()
    cloudpickle.unregister_pickle_by_value(module)


def rank_of(comm: Tcp) -> int:
    return comm._rank


def say(word: str) -> None:
    print(word, flush=True)


def read_line() -> None:
    sys.stdin.buffer.readline()


def letter(rank: int, number: int, size: int) -> bytes:
    """Bytes that no other rank sends and no other exchange carries."""
    return bytes([(31 * rank + 7 * number + 1) % 251]) * size


SIZES = (0, 1, 200, 65_537, 3_000_001)


@pytest.mark.parametrize("num_ranks", HOSTS_OF)
def test_letters_of_any_size_arrive_whole(job: Job, num_ranks: int) -> None:
    def body(comm: Tcp) -> bool:
        for number in range(2 * len(SIZES)):
            # Every rank another size in every exchange.
            sent = [
                letter(rank, number, SIZES[(number + 3 * rank) % len(SIZES)])
                for rank in range(num_ranks)
            ]
            if comm.exchange(sent[rank_of(comm)]) != tuple(sent):
                return False
        return True

    job.start(HOSTS_OF[num_ranks], body)
    assert job.outcomes() == [True] * num_ranks


def test_thousands_of_letters_come_in_order(job: Job) -> None:
    def body(comm: Tcp) -> int:
        for number in range(3000):
            expected = tuple(b"%d:%d" % (rank, number) for rank in range(3))
            if comm.exchange(expected[rank_of(comm)]) != expected:
                return number
        return -1

    job.start(HOSTS_OF[3], body)
    assert job.outcomes() == [-1] * 3


class Schedule:
    """Operations on every lane, the same on all ranks, and what each must leave behind.

    Every part is filled with a byte of its own, taken from a table that all ranks draw alike.
    """

    def __init__(self, comm: Tcp, seed: int, sizes: Sequence[int]) -> None:
        self._comm = comm
        self._random = random.Random(seed)
        self._sizes = sizes
        self._members = len(comm.hosts)

    def _draw(self) -> list[list[tuple[int, int]]]:
        """(size, byte) of each part by sender and receiver."""
        return [
            [
                (self._random.choice(self._sizes), self._random.randrange(256))
                for _ in range(self._members)
            ]
            for _ in range(self._members)
        ]

    def begin(self, lane: int) -> Callable[[], bool] | None:
        """Begin the next one, if I stand on the lane; waits and checks when called."""
        gathers = self._random.random() < 0.5
        table = self._draw()
        if rank_of(self._comm) not in self._comm.lanes[lane]:
            return None
        return self._gather(lane, table) if gathers else self._scatter(lane, table)

    def _scatter(self, lane: int, table: list[list[tuple[int, int]]]) -> Callable[[], bool]:
        me = self._comm.host
        sent = filled(table[me])
        expected = filled([row[me] for row in table])
        received = torch.zeros_like(expected)
        transfer = self._comm.scatter_parts(
            lane,
            received,
            sent,
            [row[me][0] for row in table],
            [size for size, _ in table[me]],
        )
        return partial(arrived, transfer, received, expected)

    def _gather(self, lane: int, table: list[list[tuple[int, int]]]) -> Callable[[], bool]:
        size = table[0][0][0]
        parts = [(size, row[0][1]) for row in table]
        expected = filled(parts)
        whole = torch.zeros_like(expected)
        transfer = self._comm.gather_parts(lane, whole, filled([parts[self._comm.host]]))
        return partial(arrived, transfer, whole, expected)


def filled(parts: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.full((size,), byte, dtype=torch.uint8) for size, byte in parts])


def arrived(transfer: Transfer, found: torch.Tensor, expected: torch.Tensor) -> bool:
    transfer.wait()
    return torch.equal(found, expected)


@pytest.mark.parametrize("num_ranks", HOSTS_OF)
def test_parts_of_any_size_arrive_whole(job: Job, num_ranks: int) -> None:
    def body(comm: Tcp) -> list[bool]:
        schedule = Schedule(comm, 5, (0, 0, 1, 4099, 1_000_003))
        checks = [schedule.begin(lane) for _ in range(12) for lane in range(len(comm.lanes))]
        return [check() for check in checks if check is not None]

    job.start(HOSTS_OF[num_ranks], body)
    for outcome in job.outcomes():
        assert len(outcome) >= 12
        assert all(outcome)


def test_many_operations_under_way_while_letters_travel(job: Job) -> None:
    """As in a step: one thread begins transfers and waits for them, another one exchanges."""

    def body(comm: Tcp) -> list[bool]:
        outcome: list[bool] = []

        def transfer() -> None:
            schedule = Schedule(comm, 11, (0, 1, 333, 70_001, 2_000_003))
            waiting: list[Callable[[], bool]] = []
            for number in range(120):
                check = schedule.begin(number % len(comm.lanes))
                if check is not None:
                    waiting.append(check)
                # Ranks are unequally far ahead of what they have waited for.
                if len(waiting) > 3 + 5 * rank_of(comm):
                    outcome.append(waiting.pop(0)())
            outcome.extend(check() for check in waiting)

        thread = threading.Thread(target=transfer)
        thread.start()
        for number in range(200):
            sent = tuple(letter(rank, number, 100 * number) for rank in range(3))
            outcome.append(comm.exchange(sent[rank_of(comm)]) == sent)
        thread.join()
        return outcome

    job.start(HOSTS_OF[3], body)
    found = job.outcomes()
    assert [len(outcome) for outcome in found] == [260, 260, 320]
    assert all(all(outcome) for outcome in found)


def endlessly(comm: Tcp, size: int = 64 << 20) -> None:
    """Large transfers until something happens; a word when they are under way."""
    whole = torch.zeros(size * len(comm.hosts), dtype=torch.uint8)
    part = torch.zeros(size, dtype=torch.uint8)
    comm.gather_parts(0, whole, part).wait()
    say("here")
    while True:
        comm.gather_parts(0, whole, part).wait()


def test_a_rank_that_is_killed_amid_transfers_is_named_at_once(job: Job) -> None:
    job.start(((0,), (1,), (2,)), endlessly)
    for rank in range(3):
        job.await_word(rank)
    killed_s = time.monotonic()
    job.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        error, raised_s = job.outcome(rank)
        assert type(error) is PeerLost
        assert "rank 1 is gone: its connection ended without a farewell" in str(error)
        assert raised_s - killed_s < 0.5


def test_a_killed_rank_is_noticed_though_a_child_of_it_lives(job: Job) -> None:
    def body(comm: Tcp) -> None:
        comm.exchange(b"")
        if rank_of(comm) == 1:
            if os.fork() == 0:
                say("here")
            read_line()  # both, until the test ends
            os._exit(0)
        comm.exchange(b"")

    job.start(HOSTS_OF[2], body)
    job.await_word(1)
    killed_s = time.monotonic()
    job.signal(1, signal.SIGKILL)
    error, raised_s = job.outcome(0)
    assert type(error) is PeerLost
    assert "rank 1 is gone" in str(error)
    assert raised_s - killed_s < 0.5


def test_a_frozen_rank_is_named_after_patience(job: Job) -> None:
    job.start(((0,), (1,), (2,)), endlessly, patience_s=2.0)
    for rank in range(3):
        job.await_word(rank)
    frozen_s = time.monotonic()
    job.signal(2, signal.SIGSTOP)
    for rank in (0, 1):
        error, raised_s = job.outcome(rank)
        assert type(error) is CommTimeout
        assert "rank 2 is silent: no sign of life for " in str(error)
        assert 1.9 < raised_s - frozen_s < 3.0


def test_a_rank_that_lives_and_stays_away_is_named_after_patience(job: Job) -> None:
    def body(comm: Tcp) -> None:
        comm.exchange(b"")
        if rank_of(comm) == 2:
            read_line()
        started_s = time.monotonic()
        try:
            comm.exchange(b"")
        except CommTimeout as error:
            raise CommTimeout(f"{time.monotonic() - started_s:.3f} {error}") from None

    job.start(HOSTS_OF[3], body, patience_s=2.0)
    for rank in (0, 1):
        error, _ = job.outcome(rank)
        assert type(error) is CommTimeout
        waited_s, _, text = str(error).partition(" ")
        assert 1.5 <= float(waited_s) < 3.0
        assert "waited 2.0 s for rank 2: " in text or "waited 1." in text
        assert "rank 2 is alive (heard of " in text
        assert "has not come to exchange 1 within 2 s. Raise `patience_s`" in text


def test_an_abort_ends_what_waits_in_other_threads(job: Job) -> None:
    def body(comm: Tcp) -> Any:
        comm.exchange(b"")
        if rank_of(comm) == 1:
            try:
                return comm.exchange(b"")
            except PeerLost as error:
                return str(error)
        failures: list[tuple[str, float]] = []
        here = threading.Barrier(3)

        def wait_in(operation: Callable[[], object]) -> None:
            here.wait()
            try:
                operation()
            except PeerLost as error:
                failures.append((str(error), time.monotonic()))

        big = torch.zeros(50_000_001, dtype=torch.uint8)
        transfer = comm.gather_parts(0, torch.zeros(2 * len(big), dtype=torch.uint8), big)
        rest = torch.zeros(4, dtype=torch.uint8)
        calls = [transfer.wait, comm.gather_parts(0, rest, rest[:2]).wait]
        threads = [threading.Thread(target=wait_in, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        here.wait()
        started_s = time.monotonic()
        comm.abort("a new world is formed.")
        for thread in threads:
            thread.join()
        return [(text, raised_s - started_s) for text, raised_s in failures]

    job.start(HOSTS_OF[2], body)
    failures = job.outcome(0)
    assert len(failures) == 2
    for text, after_s in failures:
        assert text.endswith("a new world is formed.")
        assert after_s < 0.1
    assert "rank 0 gave up: a new world is formed." in job.outcome(1)


def test_the_memory_of_an_aborted_transfer_is_left_alone(job: Job) -> None:
    def body(comm: Tcp) -> int:
        size = 64 << 20
        whole = torch.zeros(2 * size, dtype=torch.uint8)
        theirs = whole[size:] if rank_of(comm) == 0 else whole[:size]
        transfer = comm.gather_parts(0, whole, torch.ones(size, dtype=torch.uint8))
        if rank_of(comm) == 1:
            with contextlib.suppress(PeerLost):
                transfer.wait()
            say("here")
            return 0
        while theirs[0] == 0:
            time.sleep(0)
        comm.abort("enough.")
        comm.close()
        theirs.zero_()
        read_line()
        return int(theirs.max())

    job.start(HOSTS_OF[2], body)
    job.await_word(1)
    job.tell(0)
    assert job.outcome(0) == 0


def test_ranks_that_disagree_on_sizes_are_told(job: Job) -> None:
    def body(comm: Tcp) -> None:
        size = 1000 + rank_of(comm)
        comm.gather_parts(
            0, torch.zeros(2 * size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        ).wait()

    job.start(HOSTS_OF[2], body)
    for error, _ in job.outcomes():
        assert type(error) is RankMismatch
        assert "of 1000 bytes" in str(error) and "of 1001 bytes" in str(error)


def test_sizes_that_do_not_fill_the_tensor_are_refused(job: Job) -> None:
    def body(comm: Tcp) -> str:
        tensor = torch.zeros(8, dtype=torch.uint8)
        try:
            comm.scatter_parts(0, tensor, tensor, [4, 4], [4, 5])
        except ValueError as error:
            return str(error)
        return "taken"

    job.start(HOSTS_OF[2], body)
    text = "sizes [4, 5] add up to 9 elements; the tensor has 8. Parts must follow one another"
    for said in job.outcomes():
        assert text in said


def with_strangers(meeting: Meeting, guests: list[socket.socket]) -> Meeting:
    """Before this rank comes to the others' listeners, some come who do not belong there."""

    def meet(topic: str, mine: bytes) -> tuple[bytes, ...]:
        words = meeting(topic, mine)
        for word in words:
            host, _, port = word.decode().split()[0].rpartition(":")
            for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"parti/1\n" * 4):
                guest = socket.create_connection((host, int(port)))
                guest.sendall(greeting)
                guests.append(guest)
        return words

    return meet


def test_strangers_at_the_door_do_not_disturb(job: Job) -> None:
    path = job.path

    def body(comm: Tcp) -> bool:
        guests: list[socket.socket] = []
        meeting = partial(meeting_in(Directory(path), rank_of(comm), 3, DEADLINE_S))

        def again(topic: str, mine: bytes) -> tuple[bytes, ...]:
            return meeting(f"again-{topic}", mine)

        visited = Tcp(
            rank=rank_of(comm),
            groups=comm.hosts,
            meet=with_strangers(again, guests),
            patience_s=DEADLINE_S,
        )
        good = visited.exchange(b"%d" % rank_of(comm)) == (b"0", b"1", b"2")
        for guest in guests:
            guest.close()
        return good and len(guests) == 12

    job.start(HOSTS_OF[3], body)
    assert job.outcomes() == [True] * 3


def test_a_rank_that_never_connects_is_named(job: Job) -> None:
    path = job.path

    def body(comm: Tcp) -> None:
        meeting = meeting_in(Directory(path), rank_of(comm), 2, DEADLINE_S)
        if rank_of(comm) == 0:
            meeting("again-tcp", b"127.0.0.1:9 00000000000000000000000000000000")
            read_line()
            return
        Tcp(
            rank=1,
            groups=comm.hosts,
            meet=lambda topic, mine: meeting(f"again-{topic}", mine),
            patience_s=1.0,
        )

    job.start(HOSTS_OF[2], body)
    error, _ = job.outcome(1)
    assert type(error) is CommTimeout
    assert "rank 1 waited 1 s at the start for a connection with rank 0 (no hello)" in str(error)


def test_a_rank_that_ends_before_it_is_joined_is_named(job: Job) -> None:
    path = job.path

    def body(comm: Tcp) -> None:
        meeting = meeting_in(Directory(path), rank_of(comm), 2, DEADLINE_S)
        if rank_of(comm) == 1:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            meeting("again-tcp", b"127.0.0.1:%d 00" % port)
            return
        Tcp(
            rank=0,
            groups=comm.hosts,
            meet=lambda topic, mine: meeting(f"again-{topic}", mine),
            patience_s=DEADLINE_S,
        )

    job.start(HOSTS_OF[2], body)
    error, _ = job.outcome(0)
    assert type(error) is PeerLost
    assert "rank 0 cannot reach rank 1 at 127.0.0.1:" in str(error)
    assert "(connection refused): it ended while the job was starting." in str(error)


def test_everything_is_given_back(job: Job) -> None:
    path = job.path

    def body(comm: Tcp) -> list[tuple[int, int]]:
        meeting = meeting_in(Directory(path), rank_of(comm), 3, DEADLINE_S)

        def count() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        counts = [count()]
        for number in range(20):
            again = Tcp(
                rank=rank_of(comm),
                groups=comm.hosts,
                meet=partial(lambda tag, topic, mine: meeting(f"{tag}-{topic}", mine), number),
                patience_s=DEADLINE_S,
            )
            # The largest is sent last: whoever has all the others' may leave before it is read.
            again.exchange(letter(rank_of(comm), number, 1_000_000))
            if number % 2:
                again.close()
                again.close()
            else:
                del again
        return [*counts, count()]

    job.start(HOSTS_OF[3], body)
    for before, after in job.outcomes():
        assert after == before


def test_a_script_that_ends_early_is_told_from_a_killed_one(job: Job) -> None:
    def body(comm: Tcp) -> None:
        comm.exchange(b"")
        if rank_of(comm) != 1:
            comm.exchange(b"")

    job.start(HOSTS_OF[3], body)
    assert job.outcome(1) is None
    for rank in (0, 2):
        error, _ = job.outcome(rank)
        assert type(error) is PeerLost
        assert "rank 1 has left in good order: the script there ended before that" in str(error)


def test_a_link_that_is_cut_is_named_after_patience(
    job: Job,
    hosts: list[str],  # noqa: F811
) -> None:
    patience_s = 3.0
    inside = [["ip", "netns", "exec", name] for name in hosts]
    job.start(HOSTS_OF[2], partial(endlessly, size=1 << 20), patience_s=patience_s, inside=inside)
    for rank in range(2):
        job.await_word(rank)
    (link,) = [
        each
        for each in subprocess.run(
            ["ip", "netns", "exec", hosts[0], "ls", "/sys/class/net"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        if each != "lo"
    ]
    cut_s = time.monotonic()
    subprocess.run(["ip", "-n", hosts[0], "link", "set", link, "down"], check=True)
    for rank in range(2):
        error, raised_s = job.outcome(rank)
        assert type(error) in (CommTimeout, PeerLost)
        assert f"for rank {1 - rank}: " in str(error)
        assert f"rank {1 - rank} is " in str(error)
        assert raised_s - cut_s < patience_s + 1.0
