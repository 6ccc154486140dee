"""Which rank computes which micro-batches. Pure.

Every rank gets a run of consecutive micro-batches. The largest run is as small as can be; among
such deals the one is taken whose runs fall into the fewest nodes of the tree, because every node
is one whole gradient to be handed around.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from parti.engine.tree import Leaf, Node, Share, cover, share

_SEARCH_LIMIT = 200_000


@dataclass(frozen=True, slots=True)
class Deal:
    """Who computes what in a step. Indexed by rank."""

    num_micro_batches: int
    num_leaves: int
    """Leaves of the tree in which the ranks' nodes are added."""
    shares: tuple[Share, ...]
    nodes: tuple[tuple[Node, ...], ...]
    """What each rank holds when it has computed its share."""
    num_slots: int
    """Slots that the rank with the most of them needs."""


@lru_cache(maxsize=4096)
def deal(num_micro_batches: int, order: tuple[int, ...], exact: bool = True) -> Deal:
    """Deal to ranks in the given order, host by host, so that a host's work is one run as well.

    Not `exact`: every rank adds all it has into one slot, one after the other, and the tree is over
    ranks. That takes less memory, and the numbers depend on how many ranks there are.
    """
    runs = deal_runs(num_micro_batches, len(order))
    busy = sum(1 for run in runs if run)
    shares: list[Share] = [share(0, 0, 1)] * len(order)
    for seat, (rank, run) in enumerate(zip(order, runs, strict=True)):
        if exact:
            shares[rank] = share(run.start, run.stop, num_micro_batches)
        elif run:
            ops = tuple(Leaf(number, 0, onto=number > run.start) for number in run)
            shares[rank] = Share(ops, ((seat, seat + 1),), 1)
    return Deal(
        num_micro_batches=num_micro_batches,
        num_leaves=num_micro_batches if exact else busy,
        shares=tuple(shares),
        nodes=tuple(each.nodes for each in shares),
        num_slots=max(1, *(each.num_slots for each in shares)),
    )


@lru_cache(maxsize=4096)
def deal_runs(num_micro_batches: int, num_ranks: int) -> tuple[range, ...]:
    """The run of each rank, in order. Ranks after the last micro-batch get none: spares."""
    busy = min(num_micro_batches, num_ranks)
    spares = (range(num_micro_batches, num_micro_batches),) * (num_ranks - busy)
    if busy == 0:
        return spares
    most = -(-num_micro_batches // busy)
    if most == 1 or busy * num_micro_batches * most > _SEARCH_LIMIT:
        return _even(num_micro_batches, busy) + spares
    return _fewest_nodes(num_micro_batches, busy, most) + spares


def _even(num_micro_batches: int, num_ranks: int) -> tuple[range, ...]:
    cuts = [num_micro_batches * rank // num_ranks for rank in range(num_ranks + 1)]
    return tuple(range(low, high) for low, high in pairwise(cuts))


def _fewest_nodes(num_micro_batches: int, num_ranks: int, most: int) -> tuple[range, ...]:
    # best[c] = (nodes, runs) for the ranks dealt so far ending at cut c; ties go to the deal that
    # gives earlier ranks more, so the answer is one.
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}
    for rank in range(num_ranks):
        left = num_ranks - rank - 1
        following: dict[int, tuple[int, tuple[range, ...]]] = {}
        for low, (nodes, runs) in best.items():
            for high in range(min(low + most, num_micro_batches), low, -1):
                rest = num_micro_batches - high
                if not left <= rest <= left * most:
                    continue
                candidate = nodes + len(cover(low, high, num_micro_batches))
                if high not in following or candidate < following[high][0]:
                    following[high] = (candidate, (*runs, range(low, high)))
        best = following
    return best[num_micro_batches][1]
