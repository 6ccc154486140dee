"""The optimizer's part of a step.

`DividedUpdate`: an optimizer that treats each element by itself (Adam, SGD, ...) runs on the chunks
this rank owns, piece by piece, and hands the new weights to the neighbours. Every rank of a host
does a share of the work and keeps a share of the optimizer's state. The user's optimizer object
does the stepping: for the time of a step its parameters are the owned chunks.

`WholeUpdate`: any other optimizer runs in full on every rank, over whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim import Optimizer

from parti.comm.protocol import Neighbours
from parti.engine.gradients import Gradients, extent, flat
from parti.engine.layout import Chunk, Layout
from parti.engine.owned_state import OwnedState

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
)
"""Optimizers whose new weight depends on that weight's own gradient and state only."""


class Update(Protocol):
    @property
    def wants_all_sums(self) -> bool:
        """Whether `step` needs the sums of all pieces at once."""
        ...

    def step(self, used: Sequence[bool] | None, sums: Iterable[list[torch.Tensor]]) -> None:
        """Apply the summed gradients. `used` tells which parameters of the layout got any in this
        step (None: all); the others are left alone, momentum and decay included.

        All ranks are past their backward, and read no weights until this returns.
        """
        ...

    def release(self) -> None:
        """Let go of the optimizer; its state is whole again."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Owned chunks that are updated together, while all that belongs to them is in cache."""

    chunks: list[torch.Tensor]
    entries: list[int]
    groups: list[list[torch.Tensor]]
    """The same chunks, as the optimizer's groups hold them."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Where they lie with a neighbour, and where they lie here."""


class DividedUpdate:
    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        gradients: Gradients,
        neighbours: Neighbours,
    ) -> None:
        """`parameters` in layout order. Their memory moves to a region the neighbours can read."""
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._layout = layout
        self._neighbours = neighbours
        self._weights = _move(parameters, layout, neighbours)
        self._pieces = [self._cut_piece(run) for run in gradients.pieces]
        self._whole = _Piece(
            [chunk for piece in self._pieces for chunk in piece.chunks],
            [entry for piece in self._pieces for entry in piece.entries],
            [
                [chunk for piece in self._pieces for chunk in piece.groups[i]]
                for i in range(len(optimizer.param_groups))
            ],
            [copy for piece in self._pieces for copy in piece.copies],
        )
        self.state = OwnedState(
            optimizer, self._parameters, layout, gradients.runs, self._whole.chunks, neighbours
        )

    @property
    def wants_all_sums(self) -> bool:
        # The user's hooks around a step are called once, and see all gradients.
        optimizer = self._optimizer
        return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)

    def step(self, used: Sequence[bool] | None, sums: Iterable[list[torch.Tensor]]) -> None:
        self.state.prepare(self._optimizer)
        pieces = self._pieces
        if self.wants_all_sums or not pieces:
            pieces, sums = [self._whole], [[total for piece in sums for total in piece]]
        optimizer = self._optimizer
        its_parameters = [group["params"] for group in optimizer.param_groups]
        its_state = optimizer.state
        optimizer.state = self.state.of_chunks
        try:
            for piece, totals in zip(pieces, sums, strict=False):
                self._step_piece(piece, totals, used, is_last=piece is pieces[-1])
        finally:
            optimizer.state = its_state
            for group, parameters in zip(optimizer.param_groups, its_parameters, strict=True):
                group["params"] = parameters
        self.state.settle()
        if self._weights:
            # All have handed out theirs: from here on the user's code may write to its weights.
            self._neighbours.exchange(b"")

    def _step_piece(
        self,
        piece: _Piece,
        totals: Sequence[torch.Tensor],
        used: Sequence[bool] | None,
        *,
        is_last: bool,
    ) -> None:
        optimizer = self._optimizer
        for chunk, entry, total in zip(piece.chunks, piece.entries, totals, strict=True):
            chunk.grad = total if used is None or used[entry] else None
        for group, chunks in zip(optimizer.param_groups, piece.groups, strict=True):
            group["params"] = chunks
        if is_last:
            optimizer.step()  # schedulers, hooks and profilers see one step
        else:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        for theirs, mine in piece.copies:
            theirs.copy_(mine)

    def release(self) -> None:
        self.state.release(self._optimizer)

    def _cut_piece(self, run: range) -> _Piece:
        chunks = [self._cut(self._layout.chunks[i]) for i in run]
        entries = [self._layout.chunks[i].entry for i in run]
        low, high = extent(self._layout, run)
        me = self._neighbours.index
        return _Piece(
            chunks,
            entries,
            self._group(chunks, entries),
            [
                (theirs[low:high], self._weights[me][low:high])
                for i, theirs in enumerate(self._weights)
                if i != me
            ],
        )

    def _cut(self, chunk: Chunk) -> torch.Tensor:
        entry = self._layout.entries[chunk.entry]
        size = entry.dtype.itemsize
        whole = flat(self._parameters[chunk.entry].detach())
        return whole[(chunk.low - entry.offset) // size : (chunk.high - entry.offset) // size]

    def _group(
        self, chunks: Sequence[torch.Tensor], entries: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        place = {id(p): i for i, p in enumerate(self._parameters)}
        chunks_of: dict[int, list[torch.Tensor]] = {}
        for chunk, entry in zip(chunks, entries, strict=True):
            chunks_of.setdefault(entry, []).append(chunk)
        return [
            [chunk for p in group["params"] for chunk in chunks_of.get(place.get(id(p), -1), [])]
            for group in self._optimizer.param_groups
        ]


class WholeUpdate:
    """For optimizers that look at more than one element at a time, or that we do not know."""

    wants_all_sums = True

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: Gradients
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._gradients = gradients

    def step(self, used: Sequence[bool] | None, sums: Iterable[list[torch.Tensor]]) -> None:
        for _ in sums:
            pass  # they are kept, and spread as a whole
        for i, (parameter, total) in enumerate(
            zip(self._parameters, self._gradients.spread(), strict=True)
        ):
            parameter.grad = total if used is None or used[i] else None
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        return None


def _move(
    parameters: Sequence[torch.Tensor], layout: Layout, neighbours: Neighbours
) -> tuple[torch.Tensor, ...]:
    """Let the parameters live in memory that the neighbours can read. Alone, they stay put."""
    if len(neighbours.ranks) == 1:
        return ()
    region = neighbours.allocate(layout.num_bytes)
    for entry, parameter in zip(layout.entries, parameters, strict=True):
        home = entry.view(region.mine)
        home.copy_(parameter.detach())
        parameter.data = home
    return region.views
