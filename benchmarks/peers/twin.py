"""The twin without communication: each process trains alone, at the same time, in plain PyTorch."""

from __future__ import annotations

from runner import parse_arguments, rank_and_world, serve
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, _ = rank_and_world()
    steps = plain_steps(*parts(arguments, rank, fused=True))
    serve(arguments, steps, rank=rank, versions=VERSIONS)
