"""The tree, the deal and the layout: pure, so proved by properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parti.engine.layout import LINE_BYTES, difference, lay_out
from parti.engine.placement import Deal, deal, deal_runs
from parti.engine.tree import Leaf, children, combine, cover, tree_sum

counts = st.integers(1, 40)
numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: x * 1.1)


def compute(dealt: Deal, values: Sequence[float]) -> float:
    """Do what the ranks do, with plain numbers for gradients."""
    pieces, held = [], []
    for rank, share in enumerate(dealt.shares):
        slots = [math.nan] * share.num_slots
        for op in share.ops:
            if isinstance(op, Leaf):
                value = values[op.micro_batch]
                slots[op.slot] = slots[op.slot] + value if op.onto else value
            else:
                slots[op.into] += slots[op.source]
        pieces += dealt.nodes[rank]
        held += slots[: len(share.nodes)]
    temporaries: dict[int, float] = {}
    result = held[0]
    for add in combine(tuple(pieces), (0, dealt.num_leaves)):
        left, right = (held[o] if o >= 0 else temporaries[~o] for o in (add.left, add.right))
        if add.into is None:
            result = left + right
        else:
            temporaries[add.into] = left + right
    return result


@given(values=st.lists(numbers, min_size=1, max_size=40), num_ranks=counts)
def test_the_sum_has_the_same_bits_for_any_number_of_ranks(
    values: list[float], num_ranks: int
) -> None:
    dealt = deal(len(values), tuple(range(num_ranks)))
    assert compute(dealt, values) == compute(deal(len(values), (0,)), values) == tree_sum(values)


@given(
    values=st.lists(numbers, min_size=1, max_size=24), num_ranks=st.integers(1, 8), data=st.data()
)
def test_the_order_of_hosts_does_not_change_the_sum(
    values: list[float], num_ranks: int, data: st.DataObject
) -> None:
    order = tuple(data.draw(st.permutations(range(num_ranks))))
    dealt = deal(len(values), order)
    seats = [dealt.shares[rank].micro_batches for rank in order]
    assert [number for seat in seats for number in seat] == list(range(len(values)))


@given(num_micro_batches=counts, num_ranks=counts)
def test_every_micro_batch_is_dealt_once_and_evenly(num_micro_batches: int, num_ranks: int) -> None:
    runs = deal_runs(num_micro_batches, num_ranks)
    assert len(runs) == num_ranks
    assert [number for run in runs for number in run] == list(range(num_micro_batches))
    assert max(map(len, runs)) == -(-num_micro_batches // min(num_ranks, num_micro_batches))


def test_an_aligned_deal_holds_one_node_a_rank() -> None:
    assert [len(nodes) for nodes in deal(8, (0, 1, 2, 3)).nodes] == [1, 1, 1, 1]
    assert [len(nodes) for nodes in deal(6, (0, 1, 2)).nodes] == [1, 1, 1]


def test_surplus_ranks_are_spares() -> None:
    dealt = deal(2, (0, 1, 2, 3))
    assert [share.micro_batches for share in dealt.shares] == [(0,), (1,), (), ()]


@given(num_leaves=counts, data=st.data())
def test_a_cover_is_exact_and_made_of_tree_nodes(num_leaves: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, num_leaves - 1))
    high = data.draw(st.integers(low + 1, num_leaves))
    nodes = cover(low, high, num_leaves)
    assert nodes[0][0] == low
    assert nodes[-1][1] == high
    assert all(a[1] == b[0] for a, b in pairwise(nodes))
    everything = {(0, num_leaves)}
    frontier = [(0, num_leaves)]
    while frontier:
        node = frontier.pop()
        if node[1] - node[0] > 1:
            everything.update(children(node))
            frontier += children(node)
    assert set(nodes) <= everything


def test_the_shape_of_a_node_depends_on_its_size_only() -> None:
    # `buffers.py` relies on it, to add up values of micro-batches that wrote nothing.
    for node in ((0, 6), (8, 14), (16, 22)):
        left, right = children(node)
        assert (left[1] - left[0], right[1] - right[0]) == (4, 2)


def test_without_exactness_each_rank_adds_into_one_slot() -> None:
    dealt = deal(8, (0, 1, 2), exact=False)
    assert dealt.num_slots == 1
    assert dealt.num_leaves == 3
    assert compute(dealt, [1.0] * 8) == 8.0


shapes = st.lists(
    st.tuples(
        st.lists(st.integers(1, 700), min_size=0, max_size=2),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ),
    min_size=1,
    max_size=12,
)


@given(shapes=shapes, num_owners=st.integers(1, 9))
def test_chunks_cover_every_parameter_once_and_owners_share_them(
    shapes: list[tuple[list[int], torch.dtype]], num_owners: int
) -> None:
    named = [
        (f"p{i}", torch.empty(shape, dtype=dtype, device="meta"))
        for i, (shape, dtype) in enumerate(shapes)
    ]
    layout = lay_out(named)
    for number, entry in enumerate(layout.entries):
        assert entry.offset % LINE_BYTES == 0
        pieces = [chunk for chunk in layout.chunks if chunk.entry == number]
        assert pieces[0].low == entry.offset
        assert pieces[-1].high == entry.offset + entry.num_bytes
        assert all(a.high == b.low for a, b in pairwise(pieces))
    runs = layout.own(num_owners)
    assert len(runs) == num_owners
    assert [i for run in runs for i in run] == list(range(len(layout.chunks)))


def test_owners_get_about_equal_shares() -> None:
    layout = lay_out([(f"p{i}", torch.empty(1 << 20, device="meta")) for i in range(10)])
    sizes = [
        sum(layout.chunks[i].high - layout.chunks[i].low for i in run) for run in layout.own(4)
    ]
    assert max(sizes) / min(sizes) < 1.2


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (["a [1]", "b [2]"], ["a [1]", "b [3]"], "'b [2]' here, 'b [3]' there"),
        (["a [1]", "b [2]"], ["a [1]"], "'b [2]' only here"),
        (["a [1]"], ["a [1]", "b [2]"], "'b [2]' only there"),
    ],
)
def test_the_first_difference_of_two_layouts_is_named(
    mine: list[str], theirs: list[str], said: str
) -> None:
    assert difference(mine, theirs) == said
