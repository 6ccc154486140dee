"""Ranks as threads with a strategy that binds to them, for tests of what stands above a Replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from parti.comm.world import World
from parti.data.seeds import derive
from parti.engine.replica import Replica
from parti.testing import NO_FAULTS, FaultScript, on_threads


class OverThreads:
    """A strategy for one rank among the threads of a test."""

    seed = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self.rank = world.rank

    @contextmanager
    def scope(self) -> Iterator[None]:
        torch.manual_seed(derive(self.seed, 7))
        yield

    def bind(self, *objects: nn.Module | Optimizer) -> Replica:
        return Replica(
            strategy=self,
            world=self._world,
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
def on_ranks() -> Callable[..., Sequence[Any]]:
    """on_ranks(n, body): what `body(strategy)` returns on each of n ranks."""

    def run(size: int, body: Body, faults: FaultScript = NO_FAULTS) -> Sequence[Any]:
        return on_threads(size, lambda world: body(OverThreads(world)), faults)

    return run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
