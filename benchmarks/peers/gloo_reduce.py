"""gloo's all-reduce through torch.distributed, in place, on one tensor.

The model's name is the size: 4KB, 25MB. One "step" is one all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from runner import parse_arguments, rank_and_world, serve
from shared_reduce import num_floats

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, _ = rank_and_world()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    # Zeros stay zeros however often they are summed.
    gradient = torch.zeros(num_floats(arguments.model))

    def all_reduce(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(gradient)

    serve(arguments, all_reduce, rank=rank, versions={"torch": torch.__version__})
    dist.destroy_process_group()
