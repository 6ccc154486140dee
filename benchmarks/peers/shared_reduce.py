"""Parti's all-reduce in shared memory: the gradients lie there already, every rank gets the sum.

The model's name is the size: 4KB, 25MB. One "step" is one all-reduce: wait until all gradients are
in place, add up the chunks this rank owns, and copy the others' sums.
"""

from __future__ import annotations

import re

import torch
from runner import parse_arguments, serve
from torch import nn

import parti
from parti.engine.gradients import SharedGradients
from parti.engine.layout import lay_out
from parti.engine.placement import deal


def num_floats(size: str) -> int:
    """ "25MB" is 25 times 2**20 bytes."""
    found = re.fullmatch(r"(\d+)(KB|MB)", size)
    if found is None:
        raise SystemExit(f"{size!r} is no size; expected for example 4KB or 25MB")
    return int(found[1]) * {"KB": 1 << 10, "MB": 1 << 20}[found[2]] // 4


def main() -> None:
    arguments = parse_arguments()
    strategy = parti.MirroredStrategy(threads=arguments.threads)
    with strategy.scope():
        model = nn.Linear(1, 1)
    world = strategy.bind(model)._world
    gradient = torch.full((num_floats(arguments.model),), world.rank + 1.0)
    gradients = SharedGradients(lay_out([("gradient", gradient)]), [gradient], world.neighbours)
    gradients.begin(deal(world.size, world.order), early=False)
    gradients.put(0, [gradient], False)
    scale = 1.0 / world.size

    def all_reduce(count: int) -> None:
        for _ in range(count):
            world.neighbours.exchange(b"")
            list(gradients.sums(scale, keep=True))
            world.neighbours.exchange(b"")  # all sums are there
            (total,) = gradients.whole()
        check(total, world.size)

    serve(arguments, all_reduce, rank=world.rank, versions={"parti": parti.__version__})


def check(total: torch.Tensor, world_size: int) -> None:
    """A mean of equal numbers is that number, so every round after the first gives the same."""
    expected = (world_size + 1) / 2
    if total[0] != expected or total[-1] != expected:
        raise SystemExit(f"the sum is {total[0]}, expected {expected}")


if __name__ == "__main__":
    main()
