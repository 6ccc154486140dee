"""The state of a divided optimizer: each rank holds that of its own chunks, its neighbours read it.

The optimizer makes its state on a chunk's first step; it is then moved into a region laid out like
the chunks: one column for each tensor of the parameter's shape ("exp_avg", ...) and a table of
scalars ("step", ...). Between steps nobody writes, so any rank may show the whole state without
asking the others, and a process that dies takes nothing with it: whoever takes its place finds its
state where it was.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from parti.comm.protocol import Neighbours
from parti.engine.layout import Layout

_CELL_BYTES = 8

States = defaultdict[torch.Tensor, dict[str, Any]]
"""What an optimizer keeps for each tensor it steps on."""


class OwnedState:
    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        runs: Sequence[range],
        chunks: Sequence[torch.Tensor],
        neighbours: Neighbours,
    ) -> None:
        """`runs[i]` are the chunk numbers of neighbour i; `chunks` are my own, cut to size."""
        self.of_chunks: States = defaultdict(dict)
        self._parameters = parameters
        self._layout = layout
        self._runs = runs
        self._me = neighbours.index
        self._mine = dict(zip(runs[self._me], chunks, strict=True))
        self._columns, self._scalars = _state_names(optimizer)
        self._starts = [layout.chunks[run.start].low if run else 0 for run in runs]
        self._column_bytes = max(
            layout.chunks[run.stop - 1].high - layout.chunks[run.start].low if run else 0
            for run in runs
        )
        self._table_bytes = _CELL_BYTES * (1 + len(self._scalars)) * len(layout.chunks)
        self._region = neighbours.allocate(
            self._table_bytes + len(self._columns) * self._column_bytes
        )
        self._unsettled = set(self._mine) if self._columns or self._scalars else set()
        self._taken_from: dict[torch.Tensor, dict[str, Any]] = {}
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self.show),
            optimizer.register_state_dict_post_hook(self.hide),
            optimizer.register_load_state_dict_post_hook(self._expect),
        )
        # A state that was loaded, or that the optimizer made at once, is cut up when all ranks are
        # in the next step: nobody reads what is replaced then.
        self._is_waiting = True
        self._shows_views = False

    def _expect(self, optimizer: Optimizer) -> None:
        self._is_waiting = True

    def prepare(self, optimizer: Optimizer) -> bool:
        """At the start of the optimizer's part of a step: take in what was loaded, if anything."""
        if not self._is_waiting:
            return False
        self._take(optimizer)
        self._is_waiting = False
        return True

    def commit(self) -> None:
        """Everybody has taken its part of what was loaded."""
        self._taken_from = {}

    def in_place_of(self, owner: int, chunks: Mapping[int, torch.Tensor], begun: bool) -> States:
        """The state of a lost neighbour's chunks, by tensors that stand for them.

        One that had not `begun` with the update may not have taken in what was loaded.
        """
        if self._taken_from and not begun:
            for number in chunks:
                self._cell(owner, number, 0, torch.int64).zero_()
                state = self._cut_state(number, self._taken_from)
                if state:
                    self._move_in(owner, number, state)
        states: States = defaultdict(dict)
        for number, chunk in chunks.items():
            if self._cell(owner, number, 0, torch.int64):
                states[chunk] = self._homes(owner, number)
        return states

    def bytes_of(self, owner: int, run: range) -> list[torch.Tensor]:
        """All that is held for a run of an owner's chunks, as flat bytes."""
        if not self._columns and not self._scalars:
            return []
        low = self._layout.chunks[run.start].low
        high = self._layout.chunks[run.stop - 1].high
        row_bytes = _CELL_BYTES * (1 + len(self._scalars))
        view = self._region.views[owner]
        held = [view[row_bytes * run.start : row_bytes * run.stop]]
        for column in range(len(self._columns)):
            start = self._table_bytes + column * self._column_bytes - self._starts[owner]
            held.append(view[start + low : start + high])
        return held

    def most_bytes(self, run: range) -> int:
        """What `bytes_of` takes for a run of chunks."""
        if not run:
            return 0
        size = self._layout.chunks[run.stop - 1].high - self._layout.chunks[run.start].low
        return len(self._columns) * size + _CELL_BYTES * (1 + len(self._scalars)) * len(run)

    def release(self, optimizer: Optimizer) -> None:
        """Leave the optimizer with its whole state and without our hooks."""
        self.show(optimizer)
        for hook in self._hooks:
            hook.remove()

    def settle(self, run: range) -> None:
        """Move state that the optimizer has just made to where the neighbours can read it."""
        if not self._unsettled:
            return
        for number in run:
            chunk = self._mine[number]
            if number in self._unsettled and chunk in self.of_chunks:
                self.of_chunks[chunk] = self._move_in(self._me, number, self.of_chunks[chunk])
                self._unsettled.discard(number)

    def settle_for(self, owner: int, chunks: Mapping[int, torch.Tensor], states: States) -> None:
        """The same in the place of a lost neighbour."""
        for number, chunk in chunks.items():
            if chunk in states and not self._cell(owner, number, 0, torch.int64):
                self._move_in(owner, number, states[chunk])

    @contextmanager
    def as_it_lies(self) -> Iterator[None]:
        """For who copies the state at once: what lies in one piece is shown in place."""
        self._shows_views = True
        try:
            yield
        finally:
            self._shows_views = False

    def show(self, optimizer: Optimizer) -> None:
        """Give the user's parameters their state, put together from every owner's chunks."""
        if self._is_waiting:
            return
        if self._shows_views:
            self._show_views(optimizer)
        self._show_copies(optimizer)

    def _show_views(self, optimizer: Optimizer) -> None:
        """The columns of parameters of which all chunks lie with one owner."""
        numbers_of: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for owner, run in enumerate(self._runs):
            for number in run:
                numbers_of[self._layout.chunks[number].entry].append((owner, number))
        for entry, held in numbers_of.items():
            owners = {owner for owner, _ in held}
            first, last = held[0][1], held[-1][1]
            (owner, *others) = owners
            if others or not self._cell(owner, first, 0, torch.int64):
                continue
            whole = self._layout.entries[entry]
            low = self._layout.chunks[first].low
            high = self._layout.chunks[last].high
            state = optimizer.state[self._parameters[entry]]
            for column, name in enumerate(self._columns):
                start = self._table_bytes + column * self._column_bytes - self._starts[owner]
                flat = self._region.views[owner][start + low : start + high].view(whole.dtype)
                state[name] = torch.as_strided(flat, whole.shape, whole.stride)

    def _show_copies(self, optimizer: Optimizer) -> None:
        for owner, run in enumerate(self._runs):
            for number in run:
                if not self._cell(owner, number, 0, torch.int64):
                    continue
                chunk = self._layout.chunks[number]
                entry = self._layout.entries[chunk.entry]
                state = optimizer.state[self._parameters[chunk.entry]]
                for column, name in enumerate(self._columns):
                    if name not in state:
                        state[name] = torch.empty_strided(
                            entry.shape, entry.stride, dtype=entry.dtype, device=self._device
                        )
                    theirs = self._column(owner, number, column)
                    shown = self._slice(number, state[name])
                    if shown.data_ptr() != theirs.data_ptr():
                        shown.copy_(theirs)
                for i, name in enumerate(self._scalars, start=1):
                    state[name] = self._cell(owner, number, i, torch.float32).clone()

    def hide(self, optimizer: Optimizer, *_: object) -> None:
        """The state shown is a copy; do not keep it."""
        if self._is_waiting:
            return
        for parameter in self._parameters:
            optimizer.state.pop(parameter, None)

    def _take(self, optimizer: Optimizer) -> None:
        """Cut the state of the user's parameters, loaded or there from the start, into chunks."""
        self.of_chunks.clear()
        for number, chunk in self._mine.items():
            state = self._cut_state(number, optimizer.state)
            self._cell(self._me, number, 0, torch.int64).zero_()
            if not state:
                if self._columns or self._scalars:
                    self._unsettled.add(number)
                continue
            self.of_chunks[chunk] = self._move_in(self._me, number, state)
            self._unsettled.discard(number)
        self._taken_from = {
            parameter: optimizer.state.pop(parameter)
            for parameter in self._parameters
            if parameter in optimizer.state
        }

    def _cut_state(self, number: int, states: Mapping[torch.Tensor, Any]) -> dict[str, Any]:
        """A chunk's part of the state of its parameter; empty where there is none."""
        whole = states.get(self._parameters[self._layout.chunks[number].entry]) or {}
        return {
            name: self._slice(number, value)
            if name in self._columns and isinstance(value, torch.Tensor)
            else value
            for name, value in whole.items()
        }

    def _move_in(self, owner: int, number: int, state: dict[str, Any]) -> dict[str, Any]:
        homes: dict[str, Any] = dict(state)
        for column, name in enumerate(self._columns):
            if isinstance(state.get(name), torch.Tensor):
                homes[name] = self._column(owner, number, column).copy_(state[name])
        for i, name in enumerate(self._scalars, start=1):
            homes[name] = self._cell(owner, number, i, torch.float32).copy_(
                torch.as_tensor(state[name])
            )
        self._cell(owner, number, 0, torch.int64).fill_(1)
        return homes

    def _homes(self, owner: int, number: int) -> dict[str, Any]:
        homes = {
            name: self._column(owner, number, column) for column, name in enumerate(self._columns)
        }
        for i, name in enumerate(self._scalars, start=1):
            homes[name] = self._cell(owner, number, i, torch.float32)
        return homes

    def _cell(self, owner: int, number: int, i: int, dtype: torch.dtype) -> torch.Tensor:
        low = _CELL_BYTES * ((1 + len(self._scalars)) * number + i)
        return self._region.views[owner][low : low + dtype.itemsize].view(dtype)[0]

    def _column(self, owner: int, number: int, column: int) -> torch.Tensor:
        chunk = self._layout.chunks[number]
        start = self._table_bytes + column * self._column_bytes - self._starts[owner]
        dtype = self._layout.entries[chunk.entry].dtype
        return self._region.views[owner][start + chunk.low : start + chunk.high].view(dtype)

    def _slice(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a chunk in a tensor of the whole parameter's shape."""
        chunk = self._layout.chunks[number]
        entry = self._layout.entries[chunk.entry]
        if whole.stride() != entry.stride:
            whole = torch.empty_strided(
                entry.shape, entry.stride, dtype=whole.dtype, device=whole.device
            ).copy_(whole)
        flat = torch.as_strided(whole, (whole.numel(),), (1,))
        size = entry.dtype.itemsize
        return flat[(chunk.low - entry.offset) // size : (chunk.high - entry.offset) // size]

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device


def _state_names(optimizer: Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ask a copy of the optimizer, on one tiny parameter, what it keeps for each."""
    columns: dict[str, None] = {}
    scalars: dict[str, None] = {}
    accepted = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        probe = torch.zeros(2)
        probe.grad = torch.zeros(2)
        settings = {k: v for k, v in group.items() if k in accepted and k != "params"}
        twin = type(optimizer)([probe], **settings)
        twin.step()
        for name, value in twin.state[probe].items():
            if isinstance(value, torch.Tensor):
                (columns if value.shape == probe.shape else scalars)[name] = None
    return tuple(sorted(columns)), tuple(sorted(scalars))
