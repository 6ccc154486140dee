"""PyTorch's DDP with nothing set: what its tutorial's reader runs."""

from __future__ import annotations

import torch.distributed as dist
from runner import parse_arguments, rank_and_world, serve
from torch.nn.parallel import DistributedDataParallel
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, _ = rank_and_world()
    dist.init_process_group("gloo")
    made = parts(arguments, rank, loader=True)
    model = DistributedDataParallel(made.model)
    steps = plain_steps(model, made.optimizer, made.batches)
    serve(arguments, steps, rank=rank, versions=VERSIONS)
    dist.destroy_process_group()
