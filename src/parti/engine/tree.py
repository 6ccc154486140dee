"""The one binary tree in which micro-batches are added. Pure.

Leaves are the numbers of the micro-batches, 0 to n - 1. A node is the half-open range of leaves
under it. A node is split at the largest power of two smaller than its size, so sub-trees of aligned
powers of two are whole nodes, and the shape depends on n only: where the leaves are computed never
changes which additions are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Node = tuple[int, int]


def children(node: Node) -> tuple[Node, Node]:
    """The two halves of a node of at least two leaves."""
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def cover(low: int, high: int, num_leaves: int) -> tuple[Node, ...]:
    """The fewest nodes of the tree over `num_leaves` leaves that together are [low, high)."""
    return tuple(_cover((0, num_leaves), low, high))


def _cover(node: Node, low: int, high: int) -> Iterator[Node]:
    if low >= node[1] or high <= node[0]:
        return
    if low <= node[0] and node[1] <= high:
        yield node
        return
    left, right = children(node)
    yield from _cover(left, low, high)
    yield from _cover(right, low, high)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Compute a micro-batch; its gradient starts a slot, or is added onto it."""

    micro_batch: int
    slot: int
    onto: bool


@dataclass(frozen=True, slots=True)
class Merge:
    """slot `into` += slot `source`."""

    into: int
    source: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does in a step: its ops in order, and the nodes it ends up holding.

    Node `nodes[i]` lies in slot i.
    """

    ops: tuple[Leaf | Merge, ...]
    nodes: tuple[Node, ...]
    num_slots: int

    @property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(op.micro_batch for op in self.ops if isinstance(op, Leaf))


@lru_cache(maxsize=1024)
def share(low: int, high: int, num_leaves: int) -> Share:
    """How a rank that owns micro-batches [low, high) adds what lies within its reach."""
    nodes = cover(low, high, num_leaves)
    ops: list[Leaf | Merge] = []
    top = [0]

    def emit(node: Node, slot: int) -> None:
        top[0] = max(top[0], slot + 1)
        if node[1] - node[0] == 1:
            ops.append(Leaf(node[0], slot, onto=False))
            return
        left, right = children(node)
        emit(left, slot)
        if right[1] - right[0] == 1:
            # A right leaf is added by backward itself: no slot, no extra pass over memory.
            ops.append(Leaf(right[0], slot, onto=True))
        else:
            emit(right, slot + 1)
            ops.append(Merge(slot, slot + 1))

    for slot, node in enumerate(nodes):
        emit(node, slot)
    return Share(tuple(ops), nodes, top[0])


@dataclass(frozen=True, slots=True)
class Add:
    """temporary `into` = operand `left` + operand `right`; an operand >= 0 is a piece, < 0 is
    temporary ~operand. `into` None is the result."""

    into: int | None
    left: int
    right: int


@lru_cache(maxsize=1024)
def combine(pieces: tuple[Node, ...], root: Node) -> tuple[Add, ...]:
    """The additions that turn the pieces into node `root`, in tree order.

    The result is written by the last addition only, so it may lie where one of the pieces lay.
    No addition at all means that the only piece is the result.
    """
    where: Mapping[Node, int] = {node: i for i, node in enumerate(pieces)}
    adds: list[Add] = []

    def emit(node: Node, temporary: int) -> int:
        if node in where:
            return where[node]
        left, right = children(node)
        a = emit(left, temporary)
        b = emit(right, temporary + (a < 0))
        adds.append(Add(temporary, a, b))
        return ~temporary

    emit(root, 0)
    if not adds:
        return ()
    last = adds[-1]
    return (*adds[:-1], Add(None, last.left, last.right))


def tree_sum(values: Sequence[float]) -> float:
    """The same tree over plain numbers."""

    def add(node: Node) -> float:
        if node[1] - node[0] == 1:
            return values[node[0]]
        left, right = children(node)
        return add(left) + add(right)

    return add((0, len(values))) if values else 0.0
