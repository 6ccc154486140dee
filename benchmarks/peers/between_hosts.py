"""What travels between hosts, over one implementation of `Across`: `tcp` or `gloo`.

The model's name says what a "step" is. "exchange-200B": one exchange of so many bytes.
"bucket-4MB": what a bucket of gradients of that size does, a scatter of its parts and a gather of
the sums. Every rank is a host of its own; all are on this machine, so the wire is the loopback.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from runner import parse_arguments, rank_and_world, serve

import parti
from parti.comm.process_group import ProcessGroup
from parti.comm.protocol import Across
from parti.comm.rendezvous import Directory, meeting_in
from parti.comm.tcp import Tcp

PATIENCE_S = 60.0
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def main() -> None:
    arguments = parse_arguments()
    rank, world_size = rank_and_world()
    torch.set_num_threads(arguments.threads)
    meet = meeting_in(Directory(arguments.directory), rank, world_size, PATIENCE_S)
    groups = [[each] for each in range(world_size)]
    across: Tcp | ProcessGroup
    if arguments.contender == "tcp":
        across = Tcp(rank=rank, groups=groups, meet=meet, patience_s=PATIENCE_S)
    else:
        across = ProcessGroup(
            rank=rank,
            groups=groups,
            meet=meet,
            device=torch.device("cpu"),
            patience_s=PATIENCE_S,
        )
    found = re.fullmatch(r"(exchange|bucket)-(\d+)(B|KB|MB)", arguments.model)
    if found is None:
        raise SystemExit(f"{arguments.model!r} is unknown; expected exchange-200B or bucket-4MB")
    make = {"exchange": exchanges, "bucket": buckets}[found[1]]
    steps = make(across, rank, world_size, int(found[2]) * UNITS[found[3]])
    serve(arguments, steps, rank=rank, versions={"parti": parti.__version__})


def exchanges(across: Across, rank: int, world_size: int, size: int) -> Callable[[int], None]:
    expected = tuple(bytes([each + 1]) * size for each in range(world_size))

    def run(count: int) -> None:
        for _ in range(count):
            came = across.exchange(expected[rank])
        if came != expected:
            raise SystemExit("the letters are not those that were sent")

    return run


def buckets(across: Across, rank: int, world_size: int, size: int) -> Callable[[int], None]:
    part_size = size // world_size
    sizes = [part_size] * world_size
    sent = torch.full((part_size * world_size,), rank + 1, dtype=torch.uint8)
    received, whole = torch.zeros_like(sent), torch.zeros_like(sent)
    part = received[rank * part_size : (rank + 1) * part_size]

    def run(count: int) -> None:
        for _ in range(count):
            across.scatter_parts(0, received, sent, sizes, sizes).wait()
            across.gather_parts(0, whole, part).wait()
        for each in range(world_size):
            for place in (each * part_size, (each + 1) * part_size - 1):
                if not received[place] == whole[place] == each + 1:
                    raise SystemExit(f"byte {place} is not that of rank {each}")

    return run


if __name__ == "__main__":
    main()
