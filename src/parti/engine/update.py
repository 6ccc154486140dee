"""The optimizer's part of a step.

`DividedUpdate`: an optimizer that treats each element by itself (Adam, SGD, ...) runs on the chunks
this rank owns, and the neighbours copy the new weights from one another. Every rank of a host does
a share of the work and keeps a share of the optimizer's state. The user's optimizer object does the
stepping: for the time of a step its parameters are the owned chunks.

`WholeUpdate`: any other optimizer runs in full on every rank, over whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.optim import Optimizer

from parti.comm.protocol import Neighbours
from parti.engine.gradients import Gradients, flat, spread_runs
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
    def step(self, used: Sequence[bool] | None) -> None:
        """Apply the summed gradients. `used` tells which parameters of the layout got any in this
        step (None: all); the others are left alone, momentum and decay included."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply the summed gradients, for clipping."""
        ...

    def square_norms(self) -> list[float]:
        """The squared norms of the owned chunks, in order."""
        ...

    def release(self) -> None:
        """Let go of the optimizer; its state is whole again."""
        ...


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
        self._gradients = gradients
        self._neighbours = neighbours
        self._runs = gradients.runs
        self._weights = _move(parameters, layout, neighbours)
        self._chunks = [self._cut(layout.chunks[i]) for i in gradients.owned]
        self._groups = self._group()
        self.state = OwnedState(
            optimizer, self._parameters, layout, self._runs, self._chunks, neighbours
        )

    def step(self, used: Sequence[bool] | None) -> None:
        self.state.prepare(self._optimizer)
        entries = [self._layout.chunks[i].entry for i in self._gradients.owned]
        for chunk, entry, total in zip(
            self._chunks, entries, self._gradients.totals(), strict=True
        ):
            chunk.grad = total if used is None or used[entry] else None
        with self._on_chunks():
            self._optimizer.step()
        self.state.settle()
        if len(self._runs) > 1:
            self._neighbours.exchange(b"")  # all new weights are there
            spread_runs(self._layout, self._runs, self._neighbours.index, self._weights)
            # All have copied them: from here on the user's code may write to its weights.
            self._neighbours.exchange(b"")

    def scale(self, factor: float) -> None:
        scale(self._gradients.totals(), factor)

    def square_norms(self) -> list[float]:
        return square_norms(self._gradients.totals())

    def release(self) -> None:
        self.state.release(self._optimizer)

    @contextmanager
    def _on_chunks(self) -> Iterator[None]:
        optimizer = self._optimizer
        whole = [group["params"] for group in optimizer.param_groups]
        state = optimizer.state
        for group, chunks in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = chunks
        optimizer.state = self.state.of_chunks
        try:
            yield
        finally:
            optimizer.state = state
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

    def _cut(self, chunk: Chunk) -> torch.Tensor:
        entry = self._layout.entries[chunk.entry]
        size = entry.dtype.itemsize
        whole = flat(self._parameters[chunk.entry].detach())
        return whole[(chunk.low - entry.offset) // size : (chunk.high - entry.offset) // size]

    def _group(self) -> list[list[torch.Tensor]]:
        place = {id(p): i for i, p in enumerate(self._parameters)}
        chunks_of: dict[int, list[torch.Tensor]] = {}
        for i, chunk in zip(self._gradients.owned, self._chunks, strict=True):
            chunks_of.setdefault(self._layout.chunks[i].entry, []).append(chunk)
        return [
            [chunk for p in group["params"] for chunk in chunks_of.get(place.get(id(p), -1), [])]
            for group in self._optimizer.param_groups
        ]


class WholeUpdate:
    """For optimizers that look at more than one element at a time, or that we do not know."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: Gradients
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._gradients = gradients

    def step(self, used: Sequence[bool] | None) -> None:
        for i, (parameter, total) in enumerate(
            zip(self._parameters, self._gradients.spread(), strict=True)
        ):
            parameter.grad = total if used is None or used[i] else None
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def scale(self, factor: float) -> None:
        scale(self._gradients.totals(), factor)

    def square_norms(self) -> list[float]:
        return square_norms(self._gradients.totals())

    def release(self) -> None:
        return None


def scale(chunks: Sequence[torch.Tensor], factor: float) -> None:
    # Not _foreach_mul_: on CPU it rounds the factor to bfloat16 where the tensors are.
    for chunk in chunks:
        chunk.mul_(factor)


def square_norms(chunks: Sequence[torch.Tensor]) -> list[float]:
    """One squared norm for each chunk, so that their sum is the same whoever owns them."""
    norms = torch._foreach_norm(list(chunks), 2, dtype=torch.float32) if chunks else ()
    return [norm * norm for norm in torch.stack(list(norms)).tolist()] if norms else []


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
