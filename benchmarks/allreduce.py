"""Parti's all-reduce in shared memory against gloo's, two processes of one host.

python benchmarks/allreduce.py
"""

from __future__ import annotations

import argparse

from contenders import all_contenders, pick
from harness import add_options, compare, effort_of, say
from results import Results, Setting, markdown, save, show_failures, times

SIZES = ("4KB", "100KB", "1MB", "25MB", "100MB")
GOALS = {"4KB": 30.0, "25MB": 10.0}
"""How many times as fast as gloo."""


def table(results: list[Results]) -> str:
    """One row for each size."""
    rows = []
    for result in results:
        size = result.setting.model
        shared, gloo = result.step_s("shared_reduce"), result.step_s("gloo_reduce")
        rows.append(
            (
                size,
                "–" if gloo is None else f"{gloo * 1e3:.3f}",
                "–" if shared is None else f"{shared * 1e3:.4f}",
                times(result.ratio("shared_reduce", "gloo_reduce"), GOALS.get(size), digits=1),
            )
        )
    return markdown(("size", "gloo, ms", "shared memory, ms", "times as fast"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="4KB")
    given = parser.parse_args()
    contenders = pick(
        all_contenders(given.peers, given.processes), ("gloo_reduce", "shared_reduce")
    )
    results = []
    for size in given.sizes:
        say(f"all-reduce of {size}")
        setting = Setting(
            model=size, batch_size=1, processes=given.processes, window_s=0.3, settle_s=0.05
        )
        results.append(compare(contenders, setting, effort_of(given)))
    print(f"\n{table(results)}")
    show_failures(results)
    data = {"goals": GOALS, "comparisons": [result.as_data() for result in results]}
    print(f"\nwritten to {save('allreduce', data, given.output)}")


if __name__ == "__main__":
    main()
