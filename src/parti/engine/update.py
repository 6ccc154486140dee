"""The optimizer's part of a step.

`DividedUpdate`: an optimizer that treats each element by itself (Adam, SGD, ...) runs on the chunks
this rank owns, piece by piece, and hands the new weights to the neighbours. Every rank of a host
does a share of the work and keeps a share of the optimizer's state. The user's optimizer object
does the stepping: for the time of a step its parameters are the owned chunks.

`WholeUpdate`: any other optimizer runs in full on every rank, over whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from parti.comm.protocol import Neighbours, Phase
from parti.engine.gradients import Gradients, cut_pieces, extent, flat, scale_all, scaled
from parti.engine.journal import Journal, NoJournal, Progress, SharedJournal
from parti.engine.kernels import NOTHING, Bound, Kernel, bind, kernel_of
from parti.engine.layout import Chunk, Layout
from parti.engine.owned_state import OwnedState, States

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be done in one update; the same on every rank."""

    token: int
    """Tells this update from all others of the training."""
    used: Sequence[bool] | None
    """Which parameters of the layout got a gradient (None: all). The others are left alone,
    momentum and decay included."""
    factor: float | None
    """What clipping multiplies all gradients with."""


class Update(Protocol):
    @property
    def wants_all_sums(self) -> bool:
        """Whether `step` needs the sums of all pieces at once."""
        ...

    @property
    def wants_whole(self) -> bool:
        """Whether it needs those of all ranks, so that they have to meet first."""
        ...

    def step(self, order: Order, sums: Iterable[list[torch.Tensor]]) -> None:
        """Apply the summed gradients.

        All ranks are past their backward, and read no weights until they have met once more.
        """
        ...

    def finish(self, order: Order, lost: int, sums: Iterable[list[torch.Tensor]]) -> None:
        """Do what a neighbour who is lost has not done of this update. One of those who are left
        does so, after all of them are through `step`."""
        ...

    def commit(self) -> None:
        """Every rank has done its part."""
        ...

    def held(self) -> dict[str, Any]:
        """The optimizer's state_dict, in memory that the next step may write to."""
        ...

    def release(self) -> None:
        """Let go of the optimizer; its state is whole again."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Owned chunks that are updated together, while all that belongs to them is in cache."""

    run: range
    chunks: list[torch.Tensor]
    entries: list[int]
    groups: list[list[torch.Tensor]]
    """The same chunks, as the optimizer's groups hold them."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Where they lie with a neighbour, and where they lie with their owner."""
    state: list[torch.Tensor]
    """What is kept for them, as flat bytes."""
    bound: list[Bound | None] = field(default_factory=list)
    """For each group, what a kernel is called with; empty until that is known."""


class DividedUpdate:
    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        gradients: Gradients,
        neighbours: Neighbours,
        *,
        journaled: bool,
    ) -> None:
        """`parameters` in layout order. Their memory moves to a region the neighbours can read."""
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._layout = layout
        self._gradients = gradients
        self._neighbours = neighbours
        self._weights = _move(parameters, layout, neighbours)
        me = neighbours.index
        mine = [self._cut(me, self._layout.chunks[i]) for i in gradients.runs[me]]
        self.state = OwnedState(
            optimizer, self._parameters, layout, gradients.runs, mine, neighbours
        )
        chunks = dict(zip(gradients.runs[me], mine, strict=True))
        self._pieces = [self._cut_piece(me, run, chunks) for run in gradients.pieces]
        self._journal: Journal = NoJournal()
        if journaled and self._weights:
            # Room for the largest piece of any rank; for a whole run where hooks want all at once.
            runs = gradients.runs if self.wants_all_sums else _all_pieces(layout, gradients.runs)
            self._journal = SharedJournal(neighbours, max(map(self.state.most_bytes, runs)))

    @property
    def wants_all_sums(self) -> bool:
        # The user's hooks around a step are called once, and see all gradients.
        optimizer = self._optimizer
        return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)

    wants_whole = False

    def step(self, order: Order, sums: Iterable[list[torch.Tensor]]) -> None:
        if self.state.prepare(self._optimizer):
            for piece in self._pieces:
                piece.bound.clear()
        pieces, sums = self._dealt(self._pieces, sums)
        kernel = (
            None if self.wants_all_sums or order.used is not None else kernel_of(self._optimizer)
        )
        self._journal.begin(order.token)
        me = self._neighbours.index
        with self._on_chunks(self.state.of_chunks):
            for number, (piece, totals) in enumerate(zip(pieces, sums, strict=False)):
                self._journal.log(me, number, piece.state)
                self._neighbours.report(Phase.UPDATE, order.token - 1)
                is_last = piece is pieces[-1]
                if kernel is not None and self._bind(piece, kernel):
                    self._run_kernel(kernel, piece, totals, order, is_last=is_last)
                else:
                    self._step_piece(piece, totals, order, is_last=is_last)
                    self.state.settle(piece.run)
                self._journal.updated(me, number)
                self._neighbours.report(Phase.HAND_OUT, order.token - 1)
                for theirs, its in piece.copies:
                    theirs.copy_(its)
                self._journal.handed(me, number)

    def finish(self, order: Order, lost: int, sums: Iterable[list[torch.Tensor]]) -> None:
        run = self._gradients.runs[lost]
        if not run:
            return
        chunks = {i: self._cut(lost, self._layout.chunks[i]) for i in run}
        if self.wants_all_sums:
            sums = [[total.clone() for total in piece] for piece in sums]
        pieces, sums = self._dealt(
            [self._cut_piece(lost, piece, chunks) for piece in cut_pieces(self._layout, run)], sums
        )
        journal = self._journal
        done = journal.progress(lost, order.token)
        if done is None:
            journal.adopt(lost, order.token)
        elif done.logged > done.updated:
            journal.restore(lost, pieces[done.updated].state)
        states = self.state.in_place_of(lost, chunks, begun=done is not None)
        progress = done or Progress(0, 0, 0)
        with self._on_chunks(states):
            for number, (piece, totals) in enumerate(zip(pieces, sums, strict=False)):
                if number >= progress.updated:
                    self._change_for(lost, piece, totals, order, number, progress)
                    self.state.settle_for(lost, {i: chunks[i] for i in piece.run}, states)
                    journal.updated(lost, number)
                if number >= progress.handed:
                    for theirs, its in piece.copies:
                        theirs.copy_(its)
                    journal.handed(lost, number)

    def _change_for(
        self,
        lost: int,
        piece: _Piece,
        totals: Sequence[torch.Tensor],
        order: Order,
        number: int,
        progress: Progress,
    ) -> None:
        """Change a lost neighbour's piece in its own memory."""
        low, high = extent(self._layout, piece.run)
        # Mine are as they were: nothing of this piece has been handed out.
        mine = self._weights[self._neighbours.index]
        self._weights[lost][low:high].copy_(mine[low:high])
        if number >= progress.logged:
            self._journal.log(lost, number, piece.state)
        self._neighbours.report(Phase.UPDATE, order.token - 1)
        self._step_piece(piece, totals, order, is_last=self.wants_all_sums)

    def _dealt(
        self, pieces: list[_Piece], sums: Iterable[list[torch.Tensor]]
    ) -> tuple[list[_Piece], Iterable[list[torch.Tensor]]]:
        """Piece by piece, or where the optimizer is to be called once, all as one."""
        if self.wants_all_sums or not pieces:
            all_sums = [[total for piece in sums for total in piece]]
            return [_join(pieces, len(self._optimizer.param_groups))], all_sums
        return pieces, sums

    @contextmanager
    def _on_chunks(self, states: States) -> Iterator[None]:
        """The user's optimizer with chunks in place of its parameters."""
        optimizer = self._optimizer
        its_parameters = [group["params"] for group in optimizer.param_groups]
        its_state = optimizer.state
        optimizer.state = states
        try:
            yield
        finally:
            optimizer.state = its_state
            for group, parameters in zip(optimizer.param_groups, its_parameters, strict=True):
                group["params"] = parameters

    def _bind(self, piece: _Piece, kernel: Kernel) -> bool:
        """Whether a kernel can do the piece, as it has had its first step."""
        groups = self._optimizer.param_groups
        if not piece.bound:
            states = self.state.of_chunks
            piece.bound.extend(
                bind(kernel, group, chunks, states) if chunks else NOTHING
                for group, chunks in zip(groups, piece.groups, strict=True)
            )
        if any(
            one is None or (one.tensors and len(one.columns) != len(kernel.columns(group)))
            for one, group in zip(piece.bound, groups, strict=True)
        ):
            piece.bound.clear()
            return False
        return True

    def _run_kernel(
        self,
        kernel: Kernel,
        piece: _Piece,
        totals: Sequence[torch.Tensor],
        order: Order,
        *,
        is_last: bool,
    ) -> None:
        """The same as `_step_piece`."""
        if order.factor is not None:
            totals = scaled(totals, order.factor)
        groups = self._optimizer.param_groups
        gradient_of = dict(zip(map(id, piece.chunks), totals, strict=True))
        for group, bound in zip(groups, piece.bound, strict=True):
            if bound is not None and bound.tensors:
                kernel(group, bound, [gradient_of[id(chunk)] for chunk in bound.tensors])
        if is_last:
            for group in groups:
                group["params"] = []
            self._optimizer.step()  # schedulers and profilers see one step

    def _step_piece(
        self, piece: _Piece, totals: Sequence[torch.Tensor], order: Order, *, is_last: bool
    ) -> None:
        optimizer = self._optimizer
        if order.factor is not None:
            totals = scaled(totals, order.factor)
        used = order.used
        for chunk, entry, total in zip(piece.chunks, piece.entries, totals, strict=True):
            chunk.grad = total if used is None or used[entry] else None
        for group, chunks in zip(optimizer.param_groups, piece.groups, strict=True):
            group["params"] = chunks
        if is_last:
            optimizer.step()  # schedulers, hooks and profilers see one step
        else:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]

    def commit(self) -> None:
        self.state.commit()

    def held(self) -> dict[str, Any]:
        with self.state.as_it_lies():
            return self._optimizer.state_dict()

    def release(self) -> None:
        self.state.release(self._optimizer)

    def _cut_piece(self, owner: int, run: range, chunks: Mapping[int, torch.Tensor]) -> _Piece:
        entries = [self._layout.chunks[i].entry for i in run]
        low, high = extent(self._layout, run)
        mine = [chunks[i] for i in run]
        copies = [
            (theirs[low:high], self._weights[owner][low:high])
            for i, theirs in enumerate(self._weights)
            if i != owner
        ]
        state = self.state.bytes_of(owner, run)
        return _Piece(run, mine, entries, self._group(mine, entries), copies, state)

    def _cut(self, owner: int, chunk: Chunk) -> torch.Tensor:
        """A chunk of the owner's weights."""
        entry = self._layout.entries[chunk.entry]
        if self._weights:
            return self._weights[owner][chunk.low : chunk.high].view(entry.dtype)
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
    """For optimizers that look at more than one element at a time, or that we do not know.

    Every rank holds all of its state and changes nothing of anybody else's, so there is nothing to
    finish for one who is lost.
    """

    wants_all_sums = True
    wants_whole = True

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: Gradients
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._gradients = gradients

    def step(self, order: Order, sums: Iterable[list[torch.Tensor]]) -> None:
        totals = self._gradients.whole()
        if order.factor is not None:
            scale_all(totals, order.factor)
        for i, (parameter, total) in enumerate(zip(self._parameters, totals, strict=True)):
            parameter.grad = total if order.used is None or order.used[i] else None
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, order: Order, lost: int, sums: Iterable[list[torch.Tensor]]) -> None:
        return None

    def commit(self) -> None:
        return None

    def held(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def release(self) -> None:
        return None


def _join(pieces: Sequence[_Piece], num_groups: int) -> _Piece:
    """Neighbouring pieces as one."""
    return _Piece(
        range(pieces[0].run.start, pieces[-1].run.stop) if pieces else range(0),
        [chunk for piece in pieces for chunk in piece.chunks],
        [entry for piece in pieces for entry in piece.entries],
        [[chunk for piece in pieces for chunk in piece.groups[i]] for i in range(num_groups)],
        [copy for piece in pieces for copy in piece.copies],
        [state for piece in pieces for state in piece.state],
    )


def _all_pieces(layout: Layout, runs: Sequence[range]) -> list[range]:
    return [piece for run in runs for piece in cut_pieces(layout, run)]


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
