"""Ranks as threads with a strategy that binds to them, for tests of what stands above a Replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from parti.comm.memory import run_ranks
from parti.comm.protocol import Neighbours
from parti.comm.solo import Solo
from parti.comm.world import World
from parti.data.seeds import derive
from parti.engine.replica import Replica


class OverThreads:
    """A strategy for one rank among the threads of a test."""

    seed = 0

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self.rank = neighbours.index

    @contextmanager
    def scope(self) -> Iterator[None]:
        torch.manual_seed(derive(self.seed, 7))
        yield

    def bind(self, *objects: nn.Module | Optimizer) -> Replica:
        ranks = self._neighbours.ranks
        return Replica(
            strategy=self,
            world=World(
                rank=self.rank, size=len(ranks), neighbours=self._neighbours, order=tuple(ranks)
            ),
            device=torch.device("cpu"),
            models=[each for each in objects if isinstance(each, nn.Module)],
            optimizers=[each for each in objects if isinstance(each, Optimizer)],
            seed=self.seed,
            exact=True,
            precision=nullcontext,
        )

    def __str__(self) -> str:
        return "OverThreads()"


Body = Callable[[Any], Any]


@pytest.fixture
def on_ranks() -> Callable[[int, Body], Sequence[Any]]:
    """on_ranks(n, body): what `body(strategy)` returns on each of n ranks."""

    def run(size: int, body: Body) -> Sequence[Any]:
        if size == 1:
            return [body(OverThreads(Solo()))]
        return run_ranks(size, lambda comm: body(OverThreads(comm)))

    return run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
