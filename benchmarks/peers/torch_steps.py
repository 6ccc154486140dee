"""The training step that every PyTorch contender runs, and what each starts from.

Owns the plain step; must not know how gradients meet. A contender wraps the model or the
optimizer and hands them to `plain_steps`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import WORKLOADS, Batch, Workload, loss_of  # noqa: E402
from runner import Arguments  # noqa: E402

VERSIONS = {"torch": torch.__version__}


def prepared(arguments: Arguments) -> Workload:
    """Set the threads and the products of this process; the model asked for."""
    torch.set_num_threads(arguments.threads)
    return WORKLOADS[arguments.model]


def parts(
    arguments: Arguments, rank: int, *, fused: bool | None
) -> tuple[nn.Module, torch.optim.Optimizer, list[Batch]]:
    """Model, optimizer and batches. With the same tuning for all, all get the fused optimizer."""
    workload = prepared(arguments)
    model = workload.model(tuned=arguments.tuned)
    optimizer = workload.make_optimizer(model, True if arguments.tuned else fused)
    batches = workload.batches(
        batch_size=arguments.batch_size, rank=rank, tuned=arguments.tuned
    )
    return model, optimizer, batches


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Callable[[int], None]:
    """A function that runs as many steps as it is told, round and round the batches."""
    endless = itertools.cycle(batches)

    def run_steps(count: int) -> None:
        for inputs, targets in itertools.islice(endless, count):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            backward(loss)
            optimizer.step()
            # Everybody reads the loss at every step, as a training loop that shows it does.
            loss.item()

    return run_steps
