"""One training, three ways: a plain loop, torch's DDP, Parti. The tests beside it compare them.

    loops.py plain|ddp|parti|untuned KIND DTYPE OUT

Writes the weights, the losses and the largest resident size of this process, in bytes, to
OUT.<rank>. KIND is a model of `make`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

BATCH_SIZE = 32
NUM_STEPS = 6

Outcome = tuple[nn.Module, list[float]]


def make(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer, the same wherever it is made."""
    torch.manual_seed(1)
    if kind == "large":
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.Linear(4096, 4096))
        return model.to(dtype), torch.optim.Adam(model.parameters(), 1e-4)
    norm: Callable[[], nn.Module] = nn.Identity if kind == "plain" else lambda: nn.BatchNorm2d(8)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), norm(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    ).to(dtype)
    if kind == "plain":
        return model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def data(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    num_samples = BATCH_SIZE * (2 if kind == "large" else NUM_STEPS)
    images = torch.randn(num_samples, 1, 8, 8, generator=generator, dtype=torch.float64)
    num_classes = 4096 if kind == "large" else 10
    labels = torch.randint(0, num_classes, (num_samples,), generator=generator)
    return images.to(dtype), labels


def plain(kind: str, dtype: torch.dtype) -> Outcome:
    """What a user of torch writes."""
    model, optimizer = make(kind, dtype)
    images, labels = data(kind, dtype)
    losses = []
    for start in range(0, len(images), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def ddp(kind: str, dtype: torch.dtype) -> Outcome:
    """Each process takes its share of every batch, in order."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    model, optimizer = make(kind, dtype)
    wrapped = DistributedDataParallel(model)
    images, labels = data(kind, dtype)
    share = BATCH_SIZE // size
    losses = []
    for start in range(rank * share, len(images), BATCH_SIZE):
        rows = slice(start, start + share)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    dist.destroy_process_group()
    return model, losses


def untuned(kind: str, dtype: torch.dtype) -> Outcome:
    """Parti's distribution alone: each process computes exactly as the plain loop does."""
    import parti

    return with_parti(parti.MirroredStrategy(threads=1, tuning=parti.Tuning.none()), kind, dtype)


def parti(kind: str, dtype: torch.dtype) -> Outcome:
    import parti

    return with_parti(parti.MirroredStrategy(threads=1), kind, dtype)


def with_parti(strategy: Any, kind: str, dtype: torch.dtype) -> Outcome:
    with strategy.scope():
        model, optimizer = make(kind, dtype)
    replica = strategy.bind(model, optimizer)
    losses = []
    for batch in replica.batches(
        data(kind, dtype), batch_size=BATCH_SIZE, micro_batches=2, shuffle=False
    ):
        report = replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
        losses.append(report.loss)
    return model, losses


def main(way: str, kind: str, dtype: str, out: str) -> None:
    torch.set_num_threads(1)
    ways: dict[str, Any] = {"plain": plain, "ddp": ddp, "parti": parti, "untuned": untuned}
    model, losses = ways[way](kind, getattr(torch, dtype))
    rank = os.environ.get("PARTI_RANK") or os.environ.get("RANK") or "0"
    # /proc, not getrusage: that counts what the process was before it became this program.
    with open("/proc/self/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    torch.save(
        {"weights": model.state_dict(), "losses": losses, "resident_bytes": int(peak) * 1024},
        f"{out}.{rank}",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
