"""How long until the first step is done: one small model, in plain PyTorch or under Parti.

    first_step.py plain | parti | parti_run <result file>

Rank 0 writes the monotonic clock's time, which all processes of a host share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def plain(images: torch.Tensor, labels: torch.Tensor) -> bool:
    """The step of a script for one device."""
    torch.manual_seed(0)
    model, optimizer = built()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return True


def with_parti(images: torch.Tensor, labels: torch.Tensor) -> bool:
    """The same on two processes; true on the one that reports."""
    import parti

    strategy = parti.MirroredStrategy(devices=2)
    with strategy.scope():
        model, optimizer = built()
    replica = strategy.bind(model, optimizer)
    batch = next(iter(replica.batches((images, labels), batch_size=64, micro_batches=2)))
    replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
    return replica.is_chief


if __name__ == "__main__":
    how, result = sys.argv[1:]
    data = torch.zeros(64, 64), torch.zeros(64, dtype=torch.int64)
    if (plain if how == "plain" else with_parti)(*data):
        Path(result).write_text(str(time.monotonic()))
