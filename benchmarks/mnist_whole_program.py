"""The MNIST CNN as a whole program: samples/s from an in-memory data set, order drawn anew.

    python benchmarks/mnist_whole_program.py

Every contender runs as its users run it and feeds itself: Parti from `replica.batches`, DDP with
expert settings by indexing in bulk, default DDP through a DataLoader, TensorFlow through tf.data,
gathering in bulk. All train batches of 128 on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from contenders import all_contenders, variant
from harness import Contender, add_options, compare, effort_of, say
from models import WORKLOADS
from results import Results, Setting, markdown, save, show_failures, times

GOALS = {"parti": 1.3, "parti_bf16": 2.0}
"""How many times as fast as the best of TensorFlow's strategies."""

PEERS = (
    "tf_mirrored", "tf_mirrored_whole", "tf_multi_worker", "tf_one_device",
    "raw_ddp", "default_ddp", "eager",
)  # fmt: skip


def contenders_of(table: dict[str, Contender], processes: int) -> list[Contender]:
    """Parti with a micro-batch for each process, with its default number, and in bf16."""
    feed = ("--feed", "memory")
    pieces = (*feed, "--micro-batches", str(processes))
    parti = table["parti"]
    return [
        variant(parti, "parti", f"Parti, micro_batches={processes}", *pieces),
        variant(parti, "parti_default", "Parti, default micro-batches", *feed),
        variant(
            parti, "parti_bf16", f"Parti, bf16, micro_batches={processes}",
            *pieces, "--precision", "bf16",
        ),
        *(variant(table[name], name, table[name].title, *feed) for name in PEERS),
    ]  # fmt: skip


def best_of(result: Results, names: Iterable[str]) -> str | None:
    """The fastest among those that ran."""
    speeds = {name: result.samples_per_s(name) for name in names}
    ran = {name: speed for name, speed in speeds.items() if speed is not None}
    return max(ran, key=ran.__getitem__) if ran else None


def table(result: Results, best: str | None) -> str:
    """One row for each contender."""
    rows = []
    for name, title in result.titles.items():
        speed = result.samples_per_s(name)
        ratio = None if best is None else result.ratio(name, best)
        rows.append(
            (
                title,
                "did not run" if speed is None else f"{speed:,.0f}",
                times(ratio, GOALS.get(name)),
                times(result.ratio(name, "raw_ddp")),
                times(result.ratio(name, "eager")),
            )
        )
    columns = ("contender", "samples/s", "to the best of TensorFlow", "to raw DDP", "to eager")
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    given = parser.parse_args()
    everyone = all_contenders(given.peers, given.processes)
    workload = WORKLOADS["mnist_cnn"]
    say("MNIST CNN, whole program")
    setting = Setting(
        model=workload.name, batch_size=workload.batch_size, processes=given.processes, window_s=1.0
    )
    result = compare(contenders_of(everyone, given.processes), setting, effort_of(given))
    best = best_of(result, (name for name in PEERS if name.startswith("tf_")))
    print(f"\n{table(result, best)}")
    if best is not None:
        print(f"\nThe best of TensorFlow in this run: {result.titles[best]}.")
    show_failures([result])
    data = {"goals": GOALS, "best_of_tensorflow": best, "comparisons": [result.as_data()]}
    print(f"\nwritten to {save('mnist_whole_program', data, given.output)}")


if __name__ == "__main__":
    main()
