"""The twin without communication: each process trains alone, at the same time, in plain PyTorch.

As `eager` it is one process that trains the whole batch, with the threads of all. In lockstep the
processes wait for the slowest at every step and still tell each other nothing: as fast as training
that agrees on every step can be on this machine.
"""

from __future__ import annotations

from collections.abc import Callable

from runner import Meeting, parse_arguments, rank_and_world, serve
from torch_steps import VERSIONS, parts, plain_steps


def in_lockstep(run_steps: Callable[[int], None], meeting: Meeting) -> Callable[[int], None]:
    """The same steps; nobody begins one before all have ended the last."""

    def run(count: int) -> None:
        for _ in range(count):
            run_steps(1)
            meeting.wait()

    return run


if __name__ == "__main__":
    arguments = parse_arguments()
    rank, num_processes = rank_and_world()
    size = arguments.global_batch // num_processes
    made = parts(arguments, rank, batch_size=size)
    steps = plain_steps(made.model, made.optimizer, made.batches)
    if arguments.lockstep:
        meeting = Meeting(arguments.directory / "lockstep", rank, num_processes)
        steps = in_lockstep(steps, meeting)
    serve(arguments, steps, rank=rank, meet=num_processes, versions=VERSIONS)
