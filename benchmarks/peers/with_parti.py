"""Parti, as the bare loop of its own `Replica.step`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runner import Arguments, parse_arguments, serve

import parti

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import NUM_BATCHES, NUM_SAMPLES, loss_of, workload


def batches_for(replica: Any, arguments: Arguments) -> Iterator[Any]:
    """Batches without end: eight that were made once, or a data set read from memory."""
    fixed = arguments.feed == "fixed"
    work = workload(arguments.model)
    samples = work.samples(NUM_BATCHES * arguments.global_batch if fixed else NUM_SAMPLES)
    feed = replica.batches(
        samples,
        batch_size=arguments.global_batch,
        micro_batches=arguments.micro_batches,
        epochs=1 if fixed else 1_000_000,
        shuffle=not fixed,
        drop_last=True,
    )
    return itertools.cycle(list(feed)) if fixed else iter(feed)


def main() -> None:
    arguments = parse_arguments()
    work = workload(arguments.model)
    tuning = parti.Tuning()
    if arguments.parts is not None:
        tuning = replace(parti.Tuning.none(), **dict.fromkeys(arguments.parts, True))
    strategy = parti.MirroredStrategy(
        threads=arguments.threads,
        exact=arguments.exact,
        recovery=arguments.recovery,
        precision=arguments.precision,
        tuning=tuning,
    )
    with strategy.scope():
        model = work.model()
        optimizer = work.make_optimizer(model, True if arguments.tuned else None)
    replica = strategy.bind(model, optimizer)
    if replica.world_size != arguments.processes:
        raise SystemExit(f"{replica.world_size} processes; expected {arguments.processes}")
    batches = batches_for(replica, arguments)

    def run_steps(count: int) -> None:
        for batch in itertools.islice(batches, count):
            replica.step(lambda inputs, targets: loss_of(model(inputs), targets), batch)

    versions = {"torch": torch.__version__, "parti": parti.__version__}
    serve(arguments, run_steps, rank=replica.rank, versions=versions)


if __name__ == "__main__":
    main()
