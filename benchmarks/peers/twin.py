"""The twin without communication: each process trains alone, at the same time, in plain PyTorch.

As `eager` it is one process that trains the whole batch, with the threads of all.
"""

from __future__ import annotations

from runner import parse_arguments, rank_and_world, serve
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, num_processes = rank_and_world()
    size = arguments.global_batch // num_processes
    made = parts(arguments, rank, batch_size=size)
    steps = plain_steps(made.model, made.optimizer, made.batches)
    serve(arguments, steps, rank=rank, meet=num_processes, versions=VERSIONS)
