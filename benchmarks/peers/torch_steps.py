"""The training step that every PyTorch contender runs, and what each starts from.

Owns the plain step and the plain feed; must not know how gradients meet. A contender wraps the
model or the optimizer and hands them to `plain_steps`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import NUM_SAMPLES, Batch, loss_of, tuned, workload
from runner import Arguments

VERSIONS = {"torch": str(torch.__version__)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a script holds before anything is distributed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    """Without end."""


def parts(
    arguments: Arguments,
    rank: int,
    *,
    fused: bool | None = None,
    batch_size: int | None = None,
    loader: bool = False,
) -> Parts:
    """Model, optimizer and batches of this process, its threads and products set.

    With the same tuning for all, all get the fused optimizer; `loader` feeds an in-memory data set
    through torch's DataLoader, as its users do, in place of indexing in bulk.
    """
    work = workload(arguments.model)
    size = arguments.batch_size if batch_size is None else batch_size
    num_ranks = arguments.global_batch // size
    # A process that stands for several has the threads of all.
    torch.set_num_threads(arguments.threads * arguments.processes // num_ranks)
    model = tuned(work.model()) if arguments.tuned else work.model()
    optimizer = work.make_optimizer(model, True if arguments.tuned else fused)
    if arguments.feed == "fixed":
        fixed = work.batches(batch_size=size, rank=rank)
        return Parts(model=model, optimizer=optimizer, batches=itertools.cycle(fixed))
    samples = work.samples(NUM_SAMPLES)
    feed = through_loader if loader else in_bulk
    return Parts(model=model, optimizer=optimizer, batches=feed(samples, size, rank, num_ranks))


def in_bulk(samples: Batch, size: int, rank: int, num_ranks: int) -> Iterator[Batch]:
    """A new order for every epoch; each step takes this rank's part of it at once."""
    inputs, targets = samples
    for epoch in itertools.count():
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        mine = order[: len(order) // (size * num_ranks) * size * num_ranks][rank::num_ranks]
        for picked in torch.split(mine, size):
            yield inputs[picked], targets[picked]


def through_loader(samples: Batch, size: int, rank: int, num_ranks: int) -> Iterator[Batch]:
    """The feed of DDP's tutorial."""
    data = TensorDataset(*samples)
    sampler: DistributedSampler[Batch] = DistributedSampler(data, num_ranks, rank)
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Callable[[int], None]:
    """A function that runs as many steps as it is told."""

    def run_steps(count: int) -> None:
        for inputs, targets in itertools.islice(batches, count):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            backward(loss)
            optimizer.step()
            # Everybody reads the loss at every step, as a training loop that shows it does.
            loss.item()

    return run_steps
