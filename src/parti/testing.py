"""For tests of distributed code, ours and users': ranks as threads or as processes.

    @parti.testing.ranks(4)
    def test_every_rank_gets_the_sum() -> None:
        replica = parti.MirroredStrategy().bind(nn.Linear(2, 1))
        total = replica.reduce(torch.tensor(float(replica.rank)), "sum")
        assert total.item() == 6.0

The body of the test is what every rank runs; a failing rank fails the test with its traceback.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import cloudpickle
import torch
from torch import nn
from torch.optim import Optimizer

from parti.comm.faults import Deed, Fault, FaultScript, with_faults
from parti.comm.memory import Killed, run_ranks
from parti.comm.solo import Solo
from parti.comm.world import World
from parti.engine.replica import Replica
from parti.launch.notebook import launch

NO_FAULTS = FaultScript()

P = ParamSpec("P")
T = TypeVar("T")


def ranks(
    num_processes: int, *, threads: int = 1
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test on that many processes over the real communication."""

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            call = functools.partial(body, *args, **kwargs)
            on_processes(num_processes, call, threads=threads)

        return test

    return decorate


def on_processes(num_processes: int, body: Callable[[], T], *, threads: int = 1) -> T:
    """Run a function on that many processes; the result of rank 0."""
    function = body.func if isinstance(body, functools.partial) else body
    module = sys.modules[function.__module__]
    # Test modules cannot be imported by name in another process.
    cloudpickle.register_pickle_by_value(module)
    try:
        with tempfile.TemporaryDirectory(prefix="parti-test-") as runs:
            return launch(body, num_processes, threads=threads, runs_dir=Path(runs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def on_threads(
    num_ranks: int, body: Callable[[World], T], faults: FaultScript = NO_FAULTS
) -> Sequence[T]:
    """Run a function on ranks that are threads taking turns: quick, and every run is the same.

    One rank runs without communication, as it does in a process of its own. Of ranks that the
    script kills there is no result.
    """
    if num_ranks == 1:
        return [body(World(0, 1, Solo()))]
    killed: set[int] = set()

    def carry_out(fault: Fault) -> None:
        assert fault.deed is Deed.KILL, "threads can be killed, and nothing else"
        killed.add(fault.member)
        raise Killed

    outcomes = run_ranks(num_ranks, lambda world: body(with_faults(world, str(faults), carry_out)))
    assert killed == {fault.member for fault in faults}, (
        f"killed were {killed}, not all of {faults}"
    )
    return [each for rank, each in enumerate(outcomes) if rank not in killed]  # type: ignore[misc]


def fingerprint(*objects: nn.Module | Optimizer) -> str:
    """SHA-256 over weights, buffers and optimizer state, to the last bit."""
    digest = hashlib.sha256()
    for each in objects:
        state = each.state_dict()
        if isinstance(each, Optimizer):
            state = {
                f"{number}.{name}": value
                for number, values in sorted(state["state"].items())
                for name, value in sorted(values.items())
            }
        for name, value in state.items():
            digest.update(name.encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def assert_ranks_equal(replica: Replica, *objects: nn.Module | Optimizer) -> None:
    """Every rank holds the same weights and the same optimizer state, to the last bit."""
    prints = replica.exchange(fingerprint(*objects).encode())
    different = [rank for rank, each in enumerate(prints) if each != prints[0]]
    assert not different, f"ranks {different} hold other values than rank 0"


def _bytes(value: object) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()
