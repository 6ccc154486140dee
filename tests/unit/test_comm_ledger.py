"""Who is left after a loss is through the same number of exchanges, with the same letters.

Worlds are rows of threads that exchange through a fake which lets some of them have all letters and
others none: whatever a connection may do as a host vanishes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.comm.ledger import Ledger
from parti.errors import PeerLost

WAIT_S = 10.0


class Fabric:
    """One world's exchanges, in their order; each with those that get the letters."""

    def __init__(self, size: int, passes: Sequence[frozenset[int]]) -> None:
        """`passes[n]`: the ranks that exchange n works for. Later ones work for all."""
        self._size = size
        self._passes = passes
        self._barrier = threading.Barrier(size)
        self._letters: dict[int, list[bytes]] = {}
        self._lock = threading.Lock()

    def end(self, rank: int) -> End:
        return End(self, rank)

    def exchange(self, number: int, rank: int, payload: bytes) -> tuple[bytes, ...]:
        if 0 < number <= len(self._passes) and len(self._passes[number - 1]) < self._size:
            raise PeerLost("who has missed the one before does not come to this one")
        with self._lock:
            self._letters.setdefault(number, [b""] * self._size)[rank] = payload
        self._barrier.wait(WAIT_S)
        if number < len(self._passes) and rank not in self._passes[number]:
            raise PeerLost(f"rank {rank} misses exchange {number}")
        return tuple(self._letters[number])


@dataclass
class End:
    fabric: Fabric
    rank: int
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        return self.fabric.exchange(next(self.numbers), self.rank, payload)


def together(bodies: Sequence[Callable[[], bytes]]) -> list[bytes]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [each.result(WAIT_S) for each in [pool.submit(body) for body in bodies]]


def play(
    size: int,
    passes: Sequence[frozenset[int]],
    left: Sequence[int],
    *,
    commits: bool,
    fails_again: Sequence[frozenset[int]] = (),
    newcomers: int = 0,
) -> list[bytes]:
    """Exchange letters until one is missed, and once more in the world of those who are left: how
    many were through each time, and with what, as each of them sees it. `fails_again`: a world
    between, where they are still comparing as they have to leave it."""
    first = Fabric(size, passes)
    between = Fabric(len(left), fails_again)
    second = Fabric(len(left) + newcomers, ())
    is_new = (False,) * len(left) + (True,) * newcomers

    def survive(rank: int) -> bytes:
        ledger, here = Ledger(), left.index(rank)
        end, seen = first.end(rank), []

        def go_on(lost: PeerLost) -> None:
            if fails_again:
                with contextlib.suppress(PeerLost):
                    ledger.compare(between.end(here), is_new[: len(left)], here)
            ledger.compare(second.end(here), is_new, here)
            world.append(second)

        world: list[Fabric] = []
        for number in range(len(passes)):
            payload = b"%d of %d" % (number, rank)
            try:
                seen.append(ledger.exchange(end, payload, commits=commits, go_on=go_on))
            except PeerLost:
                break
        if not world:
            go_on(PeerLost("somebody else says so"))
        return repr(seen).encode()

    def come(rank: int) -> bytes:
        Ledger().compare(second.end(rank), is_new, rank)
        return b""

    def die(rank: int) -> bytes:
        ledger, end = Ledger(), first.end(rank)
        for number in range(len(passes)):
            payload = b"%d of %d" % (number, rank)
            try:
                ledger.exchange(end, payload, commits=commits, go_on=_dies)
            except PeerLost:
                break
        return b""

    bodies = [lambda rank=rank: (survive if rank in left else die)(rank) for rank in range(size)]
    bodies += [lambda rank=rank: come(rank) for rank in range(len(left), len(is_new))]
    found = together(bodies)
    return [found[rank] for rank in left]


def _dies(lost: PeerLost) -> None:
    raise lost


@pytest.mark.parametrize("commits", [False, True])
@given(data=st.data())
def test_all_who_are_left_have_been_through_the_same(commits: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    everyone = frozenset(range(size))
    num_good = data.draw(st.integers(0, 2))
    lucky = data.draw(st.frozensets(st.sampled_from(sorted(everyone))))
    left = sorted(data.draw(st.frozensets(st.sampled_from(sorted(everyone)), min_size=1)))
    newcomers = data.draw(st.integers(0, 2))
    seen = play(
        size, [everyone] * num_good + [lucky], left, commits=commits, newcomers=newcomers
    )  # fmt: skip
    assert len(set(seen)) == 1, seen
    # Nobody has been through something that another may not know of, or everybody has.
    num_through = len(eval(seen[0]))
    if commits or lucky & set(left):
        assert num_through == num_good + 1
    else:
        assert num_through == num_good


@pytest.mark.parametrize("commits", [False, True])
@given(data=st.data())
def test_notes_may_be_compared_twice(commits: bool, data: st.DataObject) -> None:
    """One more is lost as they compare, and some have heard all and others not."""
    size, left = 4, [1, 2, 3]
    lucky = data.draw(st.frozensets(st.sampled_from(left)))
    heard = [data.draw(st.frozensets(st.sampled_from([0, 1, 2]))) for _ in range(2)]
    seen = play(size, [lucky], left, commits=commits, fails_again=heard)
    assert len(set(seen)) == 1, seen


def test_who_comes_anew_has_not_been_through_what_it_missed() -> None:
    """A newcomer was in a world that was given up, and is called again as the others have gone on:
    it takes over the number, and begins again."""
    ahead, again = Ledger(), Ledger()
    fabric = Fabric(1, ())
    alone = fabric.end(0)
    for _ in range(3):
        ahead.exchange(alone, b"x", commits=False, go_on=_dies)
    nothing = Fabric(1, [frozenset()])
    world = Fabric(2, ())

    def holder() -> bytes:
        end = world.end(0)
        ahead.compare(end, (False, True), 0)
        return ahead.exchange(end, b"old", commits=False, go_on=_dies)[1]

    def newcomer() -> bytes:
        end = world.end(1)

        def go_on(lost: PeerLost) -> None:
            again.compare(end, (False, True), 1)

        with pytest.raises(PeerLost):
            again.exchange(nothing.end(0), b"stale", commits=False, go_on=go_on)
        return again.exchange(end, b"new", commits=False, go_on=_dies)[0]

    assert together([holder, newcomer]) == [b"new", b"old"]
