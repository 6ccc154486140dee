"""Hugging Face Accelerate on CPU processes."""

from __future__ import annotations

import accelerate
from runner import parse_arguments, rank_and_world, serve
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, world_size = rank_and_world()
    accelerator = accelerate.Accelerator(cpu=True)
    if accelerator.num_processes != world_size:
        raise SystemExit(f"Accelerate runs on {accelerator.num_processes} of {world_size} ranks")
    model, optimizer, batches = parts(arguments, rank, fused=None)
    wrapped, wrapped_optimizer = accelerator.prepare(model, optimizer)
    steps = plain_steps(wrapped, wrapped_optimizer, batches, accelerator.backward)
    versions = {**VERSIONS, "accelerate": accelerate.__version__}
    serve(arguments, steps, rank=rank, versions=versions)
    accelerator.end_training()
