"""Ranks as couriers in one process, joined by pairs of sockets: what each hears when one fails."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations

import pytest

from parti.comm.courier import Courier
from parti.comm.links import CONTROL, Frame, Header, Kind, Link, Place
from parti.comm.operations import Operation
from parti.errors import CommError, CommTimeout, PeerLost, RankMismatch

DEADLINE_S = 20.0


class Town:
    """Couriers of some ranks. A rank without one is a bare socket, which does nothing by itself."""

    def __init__(self) -> None:
        self.couriers: dict[int, Courier] = {}
        self.links: dict[int, dict[tuple[int, int], Link]] = {}
        self.bare: dict[tuple[int, int], socket.socket] = {}
        self._pool = ThreadPoolExecutor(16)

    def build(
        self, size: int, *, patience_s: float = DEADLINE_S, bare: tuple[int, ...] = ()
    ) -> None:
        self.links = {rank: {} for rank in range(size) if rank not in bare}
        for low, high in combinations(range(size), 2):
            for lane in (CONTROL, 0):
                for rank, peer, end in zip(
                    (low, high), (high, low), socket.socketpair(), strict=True
                ):
                    if rank in bare:
                        self.bare[lane, peer] = end
                    else:
                        end.setblocking(False)
                        self.links[rank][lane, peer] = Link(end, peer, lane)
        for rank, links in self.links.items():
            self.couriers[rank] = Courier(
                rank=rank, links=list(links.values()), patience_s=patience_s
            )

    def exchange(self, rank: int, payload: bytes = b"") -> Future[dict[int, bytes]]:
        def call() -> dict[int, bytes]:
            letters = self.couriers[rank].exchange(payload)
            return {peer: bytes(letter) for peer, letter in letters.items()}

        return self._pool.submit(call)

    def scatter(self, rank: int, number: int, body: bytes, expected: int) -> Transfer:
        """Send `body` to all others, and expect so many bytes from each."""
        links = [link for (lane, _), link in self.links[rank].items() if lane == 0]
        peers = [link.peer for link in links]
        operation = Operation(f"scatter {number} on lane 0", number, unsent=peers, unreceived=peers)
        memory = {link.peer: bytearray(expected) for link in links}
        self.couriers[rank].begin(
            operation,
            [
                (
                    link,
                    Frame(Kind.SCATTER, number, body, operation),
                    Place(
                        Header(Kind.SCATTER, number, expected),
                        memoryview(memory[link.peer]),
                        operation,
                    ),
                )
                for link in links
            ],
        )
        return Transfer(lambda: self.couriers[rank].wait(operation), memory)

    def wait(self, transfer: Transfer) -> Future[None]:
        return self._pool.submit(transfer.wait)

    def await_begun(self, rank: int, count: int) -> None:
        """Return when so many operations of the rank wait."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(self.couriers[rank]._pending) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0)

    def close(self) -> None:
        for end in self.bare.values():
            end.close()
        for courier in self.couriers.values():
            courier.close()
        self._pool.shutdown()


class Transfer:
    def __init__(self, wait: Callable[[], None], memory: dict[int, bytearray]) -> None:
        self.wait = wait
        self.memory = memory


@pytest.fixture
def town() -> Iterator[Town]:
    built = Town()
    yield built
    built.close()


def letter(number: int, body: bytes = b"") -> bytes:
    """As it is on the wire."""
    return b"".join(Frame(Kind.LETTER, number, body).rest)


def error_of(call: Future[object] | Future[None] | Future[dict[int, bytes]]) -> CommError:
    error = call.exception(DEADLINE_S)
    assert isinstance(error, CommError)
    return error


def test_letters_of_different_sizes_reach_all(town: Town) -> None:
    town.build(3)
    for number in range(50):
        payloads = {rank: bytes([rank + 1]) * (number * rank * 1000) for rank in range(3)}
        calls = [town.exchange(rank, payload) for rank, payload in payloads.items()]
        for rank, call in enumerate(calls):
            others = {peer: each for peer, each in payloads.items() if peer != rank}
            assert call.result(DEADLINE_S) == others


def test_a_transfer_may_begin_long_before_the_others_reach_it(town: Town) -> None:
    town.build(2)
    size = 3_000_000
    early = [town.scatter(0, number, bytes([number]) * size, 1) for number in range(4)]
    late = [town.scatter(1, number, bytes([9]), size) for number in range(4)]
    for each in (*early, *late):
        town.wait(each).result(DEADLINE_S)
    assert [each.memory[0] for each in late] == [bytes([number]) * size for number in range(4)]
    assert [each.memory[1] for each in early] == [bytes([9])] * 4


def test_a_transfer_can_be_waited_for_again(town: Town) -> None:
    town.build(2)
    transfers = [town.scatter(rank, 0, b"x", 1) for rank in range(2)]
    for transfer in transfers * 2:
        town.wait(transfer).result(DEADLINE_S)
    town.couriers[0].abort("enough")
    town.wait(transfers[0]).result(DEADLINE_S)


def test_an_abort_is_felt_by_all_who_wait(town: Town) -> None:
    town.build(3)
    calls = {
        "exchange 0": town.exchange(0),
        "scatter 0 on lane 0": town.wait(town.scatter(0, 0, b"x", 1)),
    }
    other = town.exchange(1)
    town.await_begun(0, 2)
    town.await_begun(1, 1)
    started_s = time.monotonic()
    town.couriers[0].abort("the supervisor forms a new world.")
    for name, call in calls.items():
        error = error_of(call)
        assert type(error) is PeerLost
        assert str(error).startswith(f"rank 0: {name} waited 0.")
        assert str(error).endswith(": the supervisor forms a new world.")
    assert time.monotonic() - started_s < 1.0
    with pytest.raises(PeerLost, match="rank 0: exchange 1 cannot begin: the supervisor forms"):
        town.couriers[0].exchange(b"")
    assert "rank 0 gave up: the supervisor forms a new world." in str(error_of(other))


def test_the_first_failure_has_the_word(town: Town) -> None:
    town.build(2)
    town.couriers[0].abort("first")
    town.couriers[0].abort("second")
    town.couriers[0].close()
    with pytest.raises(PeerLost, match="first"):
        town.couriers[0].exchange(b"")


def test_a_lost_rank_ends_operations_on_other_links_too(town: Town) -> None:
    town.build(4, bare=(3,))
    waiting = town.exchange(0)
    town.await_begun(0, 1)
    # Rank 0 has rank 3's letter, and waits for those of the others only.
    town.bare[CONTROL, 0].send(letter(0))
    for end in town.bare.values():
        end.close()
    assert "rank 0: exchange 0 waited 0." in str(error_of(waiting))
    for call in (waiting, town.exchange(1), town.exchange(2)):
        error = error_of(call)
        assert type(error) is PeerLost
        assert "rank 3 is gone: its connection ended without a farewell (" in str(error)


def test_a_rank_that_leaves_in_order_fails_only_what_needs_it(town: Town) -> None:
    town.build(3)
    for _ in range(20):
        calls = [town.exchange(rank) for rank in range(3)]
        for call in calls:
            call.result(DEADLINE_S)
    others = [town.exchange(rank, b"x" * 1_000_000) for rank in (0, 1)]
    town.exchange(2, b"y" * 1_000_000).result(DEADLINE_S)
    town.couriers[2].close()  # at once, wherever the others are with what it sent
    for call in others:
        assert call.result(DEADLINE_S)[2] == b"y" * 1_000_000
    error = error_of(town.exchange(0))
    assert type(error) is PeerLost
    assert "rank 2 has left in good order: the script there ended before" in str(error)


def test_a_rank_that_closes_amid_a_transfer_is_named(town: Town) -> None:
    town.build(2)
    transfers = [town.scatter(0, 0, bytes(20_000_000), 1), town.scatter(0, 1, b"", 0)]
    calls = [town.wait(transfer) for transfer in transfers]
    town.couriers[1].close()
    for call in calls:
        assert "rank 1 has left in good order" in str(error_of(call))


def test_a_rank_that_never_speaks_is_silent(town: Town) -> None:
    town.build(3, patience_s=0.4, bare=(2,))
    started_s = time.monotonic()
    calls = [town.exchange(rank) for rank in range(2)]
    for call in calls:
        error = error_of(call)
        assert type(error) is CommTimeout
        assert "rank 2 is silent: no sign of life for 0." in str(error)
        assert "rank 1 is" not in str(error)
    assert time.monotonic() - started_s < 2.0


def test_a_rank_that_lives_and_does_not_come_is_late(town: Town) -> None:
    town.build(3, patience_s=0.4)
    error = error_of(town.exchange(0))
    assert type(error) is CommTimeout
    assert "rank 0: exchange 0 waited 0.4 s for ranks 1 and 2: " in str(error)
    assert "ranks 1 and 2 are alive (heard of 0." in str(error)
    assert "but have not come to exchange 0 within 0.4 s. Raise `patience_s`" in str(error)


def test_bytes_on_their_way_are_no_reason_to_give_up(town: Town) -> None:
    patience_s = 0.4
    town.build(2, patience_s=patience_s, bare=(1,))
    call = town.exchange(0)
    header, body = letter(0, b"slow letter")[:-11], b"slow letter"
    town.bare[CONTROL, 0].send(header)
    pause = threading.Event()
    for byte in body:
        pause.wait(patience_s / 4)
        town.bare[CONTROL, 0].send(bytes([byte]))
    assert call.result(DEADLINE_S) == {1: body}


def test_ranks_at_different_operations_are_told(town: Town) -> None:
    town.build(2)
    transfers = [town.scatter(0, 0, b"four", 4), town.scatter(1, 0, b"sixsix", 6)]
    errors = [error_of(town.wait(transfer)) for transfer in transfers]
    assert [type(error) for error in errors] == [RankMismatch] * 2
    text = " ".join(map(str, errors))
    assert (
        "rank 1 sent scatter 0 of 6 bytes on lane 0, where scatter 0 of 4 bytes was expected"
        in text
        or "rank 0 sent scatter 0 of 4 bytes on lane 0, where scatter 0 of 6 bytes was" in text
    )


def test_a_letter_out_of_turn_is_told(town: Town) -> None:
    town.build(2, bare=(1,))
    call = town.exchange(0)
    town.bare[CONTROL, 0].send(letter(5, b"x"))
    error = error_of(call)
    assert type(error) is RankMismatch
    assert "rank 1 sent letter 5 of 1 bytes, where letter 0 of 1 bytes was expected" in str(error)


def test_closing_gives_everything_back(town: Town) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for _ in range(20):
        one = Town()
        one.build(3)
        calls = [one.exchange(rank, b"last words") for rank in range(3)]
        for call in calls:
            call.result(DEADLINE_S)
        one.close()
        one.close()
    assert count() == before
