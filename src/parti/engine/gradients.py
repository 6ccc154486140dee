"""The gradients of a step: gathered into slots while backward runs, then added over all ranks.

A slot holds a sum of whole gradients (see `tree.py` for which). The chunks that a rank owns are
added up over all ranks, and scaled, in *pieces*: a piece is still in cache when the optimizer uses
it. Two kinds: `HeldGradients` for a rank that has no neighbours keeps the tensors autograd made;
`SharedGradients` lie in memory that the neighbours read, and each rank adds up the chunks it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch

from parti.comm.protocol import Neighbours, Region
from parti.engine.layout import CHUNK_BYTES, Chunk, Entry, Layout
from parti.engine.placement import Deal
from parti.engine.scalar import scalar
from parti.engine.transforms.direct_gradients import homes_of
from parti.engine.tree import Add, combine

Made = Sequence[torch.Tensor | None]
"""What backward left on each parameter, in layout order; None where it did not reach."""

Sums = Iterator[list[torch.Tensor]]
"""The owned chunks of one piece after another, flat, as sums over all ranks."""


class Gradients(Protocol):
    @property
    def runs(self) -> tuple[range, ...]:
        """For each neighbour, the numbers of the chunks whose sum ends up with it."""
        ...

    @property
    def pieces(self) -> tuple[range, ...]:
        """My own of these runs, cut in pieces."""
        ...

    def begin(self, deal: Deal, *, early: bool) -> None:
        """A step begins; what follows is one `put` or `merge` for each op of my share.

        `early`: sums may leave for other hosts before `sums` is called.
        """
        ...

    def homes(self, slot: int, onto: bool) -> Mapping[int, torch.Tensor]:
        """Where the next backward may put gradients by itself, by the id of the parameter."""
        ...

    def put(self, slot: int, made: Made, onto: bool) -> None:
        """Start a slot with the gradients of a micro-batch, or add them onto it."""
        ...

    def merge(self, into: int, source: int) -> None:
        """Add one slot onto another."""
        ...

    def sums(self, scale: float, *, keep: bool) -> Sums:
        """Add up over all ranks in tree order, times `scale`. All of them have put everything.

        With `keep` all pieces stay as they are to the end of the step, else each to the next.
        """
        ...

    def sums_of(self, owner: int, scale: float) -> Sums:
        """What `sums` gives that neighbour, in its pieces; for whoever takes its place."""
        ...

    def whole(self) -> list[torch.Tensor]:
        """After all neighbours have kept their sums and met: a tensor for each parameter."""
        ...

    @property
    def needs_meeting(self) -> bool:
        """Sums of others are whole only when all neighbours have kept theirs and met."""
        ...

    def release(self) -> None:
        """Let go of the parameters."""
        ...


class HeldGradients:
    """For one rank alone. Nothing is copied: a slot is a list of autograd's own tensors."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._slots: list[list[torch.Tensor]] = []
        self.runs = (range(len(layout.chunks)),)
        self.pieces = cut_pieces(layout, self.runs[0])
        self._cuts = [[_cut(layout, layout.chunks[i]) for i in piece] for piece in self.pieces]

    def begin(self, deal: Deal, *, early: bool) -> None:
        self._slots = [[] for _ in range(deal.num_slots)]

    def homes(self, slot: int, onto: bool) -> Mapping[int, torch.Tensor]:
        return {}

    def put(self, slot: int, made: Made, onto: bool) -> None:
        kept = [
            gradient
            if gradient is not None and gradient.stride() == entry.stride
            else self._as_laid_out(entry, gradient)
            for entry, gradient in zip(self._layout.entries, made, strict=True)
        ]
        if onto:
            torch._foreach_add_(self._slots[slot], kept)
        else:
            self._slots[slot] = kept

    def _as_laid_out(self, entry: Entry, gradient: torch.Tensor | None) -> torch.Tensor:
        made = torch.empty_strided(
            entry.shape, entry.stride, dtype=entry.dtype, device=self._device
        )
        return made.zero_() if gradient is None else made.copy_(gradient)

    def merge(self, into: int, source: int) -> None:
        torch._foreach_add_(self._slots[into], self._slots[source])

    def sums(self, scale: float, *, keep: bool) -> Sums:
        held = self._slots[0]
        for cuts in self._cuts:
            piece = []
            for entry, low, high in cuts:
                whole = flat(held[entry])
                piece.append(whole if high is None else whole[low:high])
            scale_all(piece, scale)
            yield piece

    def sums_of(self, owner: int, scale: float) -> Sums:
        raise AssertionError("a rank that is alone takes nobody's place")

    def whole(self) -> list[torch.Tensor]:
        return self._slots[0]

    needs_meeting = False

    def release(self) -> None:
        return None


class SharedGradients:
    """For ranks that read one another's memory. Each adds up the chunks it owns.

    What is added up goes to a buffer of one piece, or where it is to be kept, to memory of its own:
    the slots stay whole to the end of the step, so that any rank can add up what another, who is
    lost, has not.
    """

    needs_meeting = False

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        neighbours: Neighbours,
        runs: tuple[range, ...] | None = None,
    ) -> None:
        """`parameters` in layout order."""
        self._layout = layout
        self._parameters = parameters
        self._neighbours = neighbours
        self.runs = runs or layout.own(len(neighbours.ranks))
        self.pieces = cut_pieces(layout, self.runs[neighbours.index])
        self._num_slots = 0
        self._kept: Region | None = None

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
        self._homes: list[Mapping[int, torch.Tensor]] = [
            homes_of(self._parameters, views) for views in self._views
        ]
        self._buffer = torch.empty(
            max(self._size(piece) for run in self.runs for piece in cut_pieces(self._layout, run))
            if self._layout.chunks
            else 0,
            dtype=torch.uint8,
            device=self._region.mine.device,
        )
        self._program = lru_cache(maxsize=64)(self._write_program)

    def homes(self, slot: int, onto: bool) -> Mapping[int, torch.Tensor]:
        return {} if onto else self._homes[slot]

    def put(self, slot: int, made: Made, onto: bool) -> None:
        views, gradients = [], []
        for view, gradient in zip(self._views[slot], made, strict=True):
            if gradient is not view:  # else it was written here by backward itself
                views.append(view)
                gradients.append(torch.zeros_like(view) if gradient is None else gradient)
        if onto:
            torch._foreach_add_(views, gradients)
        elif views:
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

    def sums(self, scale: float, *, keep: bool) -> Sums:
        if keep and self._kept is None:
            self._kept = self._neighbours.allocate(max(map(self._size, self.runs)))
        return self._add_up(self._neighbours.index, scale, keep)

    def sums_of(self, owner: int, scale: float) -> Sums:
        return self._add_up(owner, scale, False)

    def _add_up(self, owner: int, scale: float, keep: bool) -> Sums:
        for blocks, chunks in self._program(self._deal, owner, keep):
            # Block by block, so that a sum is still in the nearest cache when it is scaled.
            for adds, result in blocks:
                for left, right, into in adds:
                    torch.add(left, right, out=into)
                scale_all((result,), scale)
            yield chunks

    def of_slot_0(self, owner: int) -> Iterator[list[torch.Tensor]]:
        """The chunks that a neighbour owns as they lie in its slot 0, piece by piece."""
        for piece in cut_pieces(self._layout, self.runs[owner]):
            yield self._chunks(piece, self.block(owner, 0), 0)

    def whole(self) -> list[torch.Tensor]:
        assert self._kept is not None
        mine = self.block(self._neighbours.index, 0)
        for run, kept in zip(self.runs, self._kept.views, strict=True):
            if run:
                low, high = extent(self._layout, run)
                mine[low:high].copy_(kept[: high - low])
        return self._views[0]

    def whole_of_slots_0(self) -> list[torch.Tensor]:
        """The same where every owner has its sums in its own slot 0."""
        mine = self.block(self._neighbours.index, 0)
        for owner, run in enumerate(self.runs):
            if owner != self._neighbours.index and run:
                low, high = extent(self._layout, run)
                mine[low:high].copy_(self.block(owner, 0)[low:high])
        return self._views[0]

    def release(self) -> None:
        return None

    def _write_program(self, deal: Deal, owner: int, keep: bool) -> list[_PieceOfWork]:
        """The additions of a step, block by block, with every operand already cut to size."""
        nodes = [deal.nodes[rank] for rank in self._neighbours.ranks]
        held = [
            (neighbour, slot) for neighbour, own in enumerate(nodes) for slot in range(len(own))
        ]
        adds = combine(tuple(node for own in nodes for node in own), (0, deal.num_leaves))
        program = []
        for piece in cut_pieces(self._layout, self.runs[owner]):
            target, start = self._buffer, extent(self._layout, piece)[0]
            if keep:
                assert self._kept is not None
                target, start = self._kept.mine, extent(self._layout, self.runs[owner])[0]
            work = []
            for low, high, dtype in blocks(self._layout, piece):
                operands = [self.block(n, slot)[low:high].view(dtype) for n, slot in held]
                result = target[low - start : high - start].view(dtype)
                work.append((write_additions(adds, operands, result), result))
            program.append((work, self._chunks(piece, target, start)))
        return program

    def _chunks(self, piece: range, block: torch.Tensor, start: int) -> list[torch.Tensor]:
        """Chunks as they lie in a block of bytes that begins `start` bytes into the layout."""
        chunks = [self._layout.chunks[i] for i in piece]
        return [
            block[chunk.low - start : chunk.high - start].view(
                self._layout.entries[chunk.entry].dtype
            )
            for chunk in chunks
        ]

    def _size(self, run: range) -> int:
        if not run:
            return 0
        low, high = extent(self._layout, run)
        return high - low

    def block(self, neighbour: int, slot: int) -> torch.Tensor:
        """A neighbour's slot, as flat bytes."""
        size = self._layout.num_bytes
        return self._region.views[neighbour][slot * size : (slot + 1) * size]

    _region: Region
    _deal: Deal


Addition = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""left, right, and where their sum goes."""

_PieceOfWork = tuple[list[tuple[list[Addition], torch.Tensor]], list[torch.Tensor]]
"""Blocks to add up, with their results, and the same results as chunks."""


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


def extent(layout: Layout, run: range) -> tuple[int, int]:
    """Where a run of chunks, which must not be empty, begins and ends in the layout."""
    return layout.chunks[run.start].low, layout.chunks[run.stop - 1].high


def cut_pieces(layout: Layout, run: range) -> tuple[range, ...]:
    """A run of chunks in pieces of about the layout's `piece_bytes`."""
    pieces: list[range] = []
    start = run.start
    for i in run:
        low, high = extent(layout, range(start, i + 1))
        if high - low >= layout.piece_bytes or i == run.stop - 1:
            pieces.append(range(start, i + 1))
            start = i + 1
    return tuple(pieces)


def scale_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply in place, each as `tensor.mul_(factor)` does."""
    if tensors and all(tensor.dtype is torch.float32 for tensor in tensors):
        torch._foreach_mul_(list(tensors), scalar(factor, torch.float32, tensors[0].device))
    else:
        # Not in one call: on CPU that rounds the factor to bfloat16 where the tensors are.
        for tensor in tensors:
            tensor.mul_(factor)


def scaled(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """What `scale_all` would make of them, in memory of its own."""
    copies = [tensor.clone() for tensor in tensors]
    scale_all(copies, factor)
    return copies


def square_norms(chunks: Sequence[torch.Tensor]) -> list[float]:
    """One squared norm for each chunk, so that their sum is the same whoever owns them."""
    norms = torch._foreach_norm(list(chunks), 2, dtype=torch.float32) if chunks else ()
    return [norm * norm for norm in torch.stack(list(norms)).tolist()] if norms else []


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
