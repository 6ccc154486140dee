"""One process on one GPU: Parti's step against the plain loop that it stands in for.

    python benchmarks/one_gpu.py

Both are in one process and take turns. A batch lies in ordinary memory and is brought to the GPU in
every step, and the loss is read in every step, as most loops do. One micro-batch, so that both
compute the same pieces; the plain loop has the fused optimizer as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from models import WORKLOADS, Workload, loss_of
from results import markdown

import parti

TIMES_THE_BATCH = 8
"""Of what a CPU process gets."""
NUM_ROUNDS = 7
NUM_STEPS = 30
NUM_WARM = 10

Run = Callable[[int], None]


def plain(work: Workload, precision: str) -> Run:
    torch.manual_seed(0)
    model = work.make_model().cuda()
    optimizer = work.make_optimizer(model, True)
    inputs, targets = work.samples(work.batch_size * TIMES_THE_BATCH)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            x, y = inputs.cuda(), targets.cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            loss.item()
        torch.cuda.synchronize()

    return run


def ours(work: Workload, precision: str) -> Run:
    strategy = parti.OneDeviceStrategy(precision=precision)
    with strategy.scope():
        model = work.make_model()
        optimizer = work.make_optimizer(model, None)
    replica = strategy.bind(model, optimizer)
    size = work.batch_size * TIMES_THE_BATCH
    samples = work.samples(size)
    (batch,) = replica.batches(samples, batch_size=size, micro_batches=1, shuffle=False)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            replica.step(lambda x, y: loss_of(model(x), y), batch)
        torch.cuda.synchronize()

    return run


def step_s(runs: tuple[Run, ...]) -> list[float]:
    """The median time of a step of each, taken in turns."""
    for run in runs:
        run(NUM_WARM)
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(NUM_ROUNDS):
        for times, run in zip(taken, runs, strict=True):
            started = time.perf_counter()
            run(NUM_STEPS)
            times.append((time.perf_counter() - started) / NUM_STEPS)
    return [statistics.median(times) for times in taken]


def main() -> None:
    rows = []
    for work in WORKLOADS.values():
        for precision in ("fp32", "bf16"):
            loop_s, parti_s = step_s((plain(work, precision), ours(work, precision)))
            rows.append(
                (
                    work.title, str(work.batch_size * TIMES_THE_BATCH), precision,
                    f"{loop_s * 1e3:.2f}", f"{parti_s * 1e3:.2f}", f"{loop_s / parti_s:.2f} ×",
                )
            )  # fmt: skip
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}\n")
    print(markdown(("model", "batch", "precision", "plain, ms", "Parti, ms", "speed"), rows))


if __name__ == "__main__":
    main()
