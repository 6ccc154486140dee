"""Hugging Face Accelerate on CPU processes."""

from __future__ import annotations

import accelerate
from runner import parse_arguments, rank_and_world, serve
from torch.nn.parallel import DistributedDataParallel
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, _ = rank_and_world()
    accelerator = accelerate.Accelerator(cpu=True)
    made = parts(arguments, rank, loader=True)
    model, optimizer = accelerator.prepare(made.model, made.optimizer)
    if not isinstance(model, DistributedDataParallel):
        raise SystemExit(f"Accelerate made a {type(model).__name__}: its ranks train alone")
    steps = plain_steps(model, optimizer, made.batches, accelerator.backward)
    versions = {**VERSIONS, "accelerate": accelerate.__version__}
    serve(arguments, steps, rank=rank, versions=versions)
    accelerator.end_training()
