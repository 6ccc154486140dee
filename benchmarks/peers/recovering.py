"""A training that shows when it has committed which step, for `recovery.py`.

    recovering.py MODEL DIRECTORY PATIENCE_S

Each process maps DIRECTORY/<its number>: step and time of the first step it has committed, and of
the last one. It trains until DIRECTORY/stop is there.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

import torch

import parti

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import loss_of, workload

_WORDS = struct.Struct("<qqqq")


def main(name: str, directory: str, patience_s: str) -> None:
    work = workload(name)
    strategy = parti.MirroredStrategy(threads=1, patience_s=float(patience_s))
    with strategy.scope():
        model = work.model()
        optimizer = work.make_optimizer(model, None)
    replica = strategy.bind(model, optimizer)
    place = Path(directory, os.environ["PARTI_MEMBER"])
    place.write_bytes(bytes(_WORDS.size))
    with place.open("r+b") as file:
        page = mmap.mmap(file.fileno(), _WORDS.size)
    stop = Path(directory, "stop")
    first: tuple[int, int] | None = None
    batch_size = work.batch_size * 2
    torch.manual_seed(0)
    samples = work.samples(8 * batch_size)
    for batch in replica.batches(samples, batch_size=batch_size, micro_batches=2, epochs=10**6):
        replica.step(lambda inputs, targets: loss_of(model(inputs), targets), batch)
        now = replica.step_number, time.monotonic_ns()
        first = first or now
        _WORDS.pack_into(page, 0, *first, *now)
        if replica.step_number % 20 == 0 and any(replica.exchange(b"x" if stop.exists() else b"")):
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
