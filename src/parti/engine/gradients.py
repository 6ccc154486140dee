"""The gradients of a step: gathered into slots while backward runs, then added over all ranks.

A slot holds a sum of whole gradients (see `tree.py` for which). After `add_up`, the chunks that
this rank owns hold the sum over all micro-batches, scaled. Two kinds: `HeldGradients` for a rank
that has no neighbours keeps the tensors autograd made; `SharedGradients` lie in memory that the
neighbours read, and each rank adds up the chunks it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch

from parti.comm.protocol import Neighbours, Region
from parti.engine.layout import CHUNK_BYTES, Chunk, Entry, Layout
from parti.engine.placement import Deal
from parti.engine.tree import Add, combine

Made = Sequence[torch.Tensor | None]
"""What backward left on each parameter, in layout order; None where it did not reach."""


class Gradients(Protocol):
    @property
    def runs(self) -> tuple[range, ...]:
        """For each neighbour, the numbers of the chunks whose sum ends up with it."""
        ...

    @property
    def owned(self) -> range:
        """My own of these runs."""
        ...

    def begin(self, deal: Deal, *, early: bool) -> None:
        """A step begins; what follows is one `put` or `merge` for each op of my share.

        `early`: sums may leave for other hosts before `add_up`.
        """
        ...

    def put(self, slot: int, made: Made, onto: bool) -> None:
        """Start a slot with the gradients of a micro-batch, or add them onto it."""
        ...

    def merge(self, into: int, source: int) -> None:
        """Add one slot onto another."""
        ...

    def add_up(self, scale: float) -> None:
        """Sum over all ranks in tree order, times `scale`. All of them have put everything."""
        ...

    def totals(self) -> list[torch.Tensor]:
        """The owned chunks, flat, in order."""
        ...

    def spread(self) -> list[torch.Tensor]:
        """The whole sum on every rank, one tensor for each parameter of the layout."""
        ...


class HeldGradients:
    """For one rank alone. Nothing is copied: a slot is a list of autograd's own tensors."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._slots: list[list[torch.Tensor]] = []
        self.owned = range(len(layout.chunks))
        self.runs = (self.owned,)
        self._cuts = [_cut(layout, chunk) for chunk in layout.chunks]

    def begin(self, deal: Deal, *, early: bool) -> None:
        self._slots = [[] for _ in range(deal.num_slots)]

    def put(self, slot: int, made: Made, onto: bool) -> None:
        device = next((g.device for g in made if g is not None), torch.device("cpu"))
        kept = [
            _as_laid_out(entry, gradient, device)
            for entry, gradient in zip(self._layout.entries, made, strict=True)
        ]
        if onto:
            torch._foreach_add_(self._slots[slot], kept)
        else:
            self._slots[slot] = kept

    def merge(self, into: int, source: int) -> None:
        torch._foreach_add_(self._slots[into], self._slots[source])

    def add_up(self, scale: float) -> None:
        # Not _foreach_mul_: on CPU it rounds the factor to bfloat16 where the tensors are.
        for total in self._slots[0]:
            total.mul_(scale)

    def totals(self) -> list[torch.Tensor]:
        totals = []
        for entry, low, high in self._cuts:
            whole = flat(self._slots[0][entry])
            totals.append(whole if high is None else whole[low:high])
        return totals

    def spread(self) -> list[torch.Tensor]:
        return self._slots[0]


class SharedGradients:
    """For ranks that read one another's memory. Each adds up the chunks it owns."""

    def __init__(
        self, layout: Layout, neighbours: Neighbours, runs: tuple[range, ...] | None = None
    ) -> None:
        self._layout = layout
        self._neighbours = neighbours
        self.runs = runs or layout.own(len(neighbours.ranks))
        self.owned = self.runs[neighbours.index]
        self._num_slots = 0

    def begin(self, deal: Deal, *, early: bool) -> None:
        self._deal = deal
        if deal.num_slots > self._num_slots:
            self._reserve(deal.num_slots)

    def _reserve(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._region = self._neighbours.allocate(num_slots * self._layout.num_bytes)
        me = self._neighbours.index
        self._views = [
            [entry.view(self.block(me, slot)) for entry in self._layout.entries]
            for slot in range(num_slots)
        ]
        self._totals = [
            self.block(me, 0)[chunk.low : chunk.high].view(self._layout.entries[chunk.entry].dtype)
            for chunk in (self._layout.chunks[i] for i in self.owned)
        ]
        self._program = lru_cache(maxsize=64)(self._write_program)

    def put(self, slot: int, made: Made, onto: bool) -> None:
        views = self._views[slot]
        gradients = [
            torch.zeros_like(view) if gradient is None else gradient
            for view, gradient in zip(views, made, strict=True)
        ]
        if onto:
            torch._foreach_add_(views, gradients)
        else:
            torch._foreach_copy_(views, gradients)

    def merge(self, into: int, source: int) -> None:
        torch._foreach_add_(self._views[into], self._views[source])

    def put_entry(self, slot: int, entry: int, gradient: torch.Tensor | None, onto: bool) -> None:
        """`put` for one parameter, while backward still runs for the others."""
        view = self._views[slot][entry]
        if gradient is None:
            gradient = torch.zeros_like(view)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        if onto:
            view.add_(gradient)
        else:
            view.copy_(gradient)

    def merge_entry(self, into: int, source: int, entry: int) -> None:
        """`merge` for one parameter."""
        self._views[into][entry].add_(self._views[source][entry])

    def add_up(self, scale: float) -> None:
        # Block by block, so that a sum is still in cache when it is scaled.
        for adds, result in self._program(self._deal):
            for left, right, into in adds:
                torch.add(left, right, out=into)
            result.mul_(scale)

    def totals(self) -> list[torch.Tensor]:
        return self._totals

    def spread(self) -> list[torch.Tensor]:
        self._neighbours.exchange(b"")  # all sums are there
        me = self._neighbours.index
        spread_runs(self._layout, self.runs, me, [self.block(i, 0) for i in self._everyone()])
        self._neighbours.exchange(b"")  # all have copied them; slots may be written again
        return self._views[0]

    def _write_program(self, deal: Deal) -> list[tuple[list[Addition], torch.Tensor]]:
        """The additions of a step, block by block, with every operand already cut to size."""
        me = self._neighbours.index
        nodes = [deal.nodes[rank] for rank in self._neighbours.ranks]
        held = [
            (neighbour, slot) for neighbour, own in enumerate(nodes) for slot in range(len(own))
        ]
        adds = combine(tuple(node for own in nodes for node in own), (0, deal.num_leaves))
        program = []
        for low, high, dtype in blocks(self._layout, self.owned):
            operands = [self.block(n, slot)[low:high].view(dtype) for n, slot in held]
            result = self.block(me, 0)[low:high].view(dtype)
            program.append((write_additions(adds, operands, result), result))
        return program

    def _everyone(self) -> range:
        return range(len(self._neighbours.ranks))

    def block(self, neighbour: int, slot: int) -> torch.Tensor:
        """A neighbour's slot, as flat bytes."""
        size = self._layout.num_bytes
        return self._region.views[neighbour][slot * size : (slot + 1) * size]

    _region: Region
    _deal: Deal


Addition = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""left, right, and where their sum goes."""


def write_additions(
    adds: Sequence[Add], operands: Sequence[torch.Tensor], result: torch.Tensor
) -> list[Addition]:
    """Put tensors in the places of a plan of additions."""
    temporaries: dict[int, torch.Tensor] = {}
    written: list[Addition] = []
    for add in adds:
        left, right = (operands[o] if o >= 0 else temporaries[~o] for o in (add.left, add.right))
        into = result
        if add.into is not None:
            into = temporaries.setdefault(add.into, torch.empty_like(result))
        written.append((left, right, into))
    if not adds and operands[0].data_ptr() != result.data_ptr():
        # One piece, held elsewhere: it is copied. Adding -0 changes no number, adding 0 does.
        written.append((operands[0], torch.full_like(result[:1], -0.0), result))
    return written


def blocks(layout: Layout, run: range) -> list[tuple[int, int, torch.dtype]]:
    """A run of chunks, joined to pieces of one dtype that fit the cache."""
    joined: list[tuple[int, int, torch.dtype]] = []
    for chunk in layout.chunks[run.start : run.stop]:
        dtype = layout.entries[chunk.entry].dtype
        if joined and joined[-1][2] == dtype and chunk.high - joined[-1][0] <= CHUNK_BYTES:
            joined[-1] = (joined[-1][0], chunk.high, dtype)
        else:
            joined.append((chunk.low, chunk.high, dtype))
    return joined


def spread_runs(
    layout: Layout, runs: Sequence[range], me: int, blocks: Sequence[torch.Tensor]
) -> None:
    """Copy every other owner's run of chunks from its block into mine."""
    for owner, run in enumerate(runs):
        if owner != me and run:
            low, high = layout.chunks[run.start].low, layout.chunks[run.stop - 1].high
            blocks[me][low:high].copy_(blocks[owner][low:high])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order they lie in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def _cut(layout: Layout, chunk: Chunk) -> tuple[int, int, int | None]:
    """A chunk as elements of its parameter; no end where it is all of it."""
    entry = layout.entries[chunk.entry]
    if chunk.high - chunk.low == entry.num_bytes:
        return chunk.entry, 0, None
    size = entry.dtype.itemsize
    return chunk.entry, (chunk.low - entry.offset) // size, (chunk.high - entry.offset) // size


def _as_laid_out(entry: Entry, gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if gradient is not None and gradient.stride() == entry.stride:
        return gradient
    made = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device=device)
    return made.zero_() if gradient is None else made.copy_(gradient)
