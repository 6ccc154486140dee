"""What equal bits cost: `exact=True` against `exact=False`, two processes.

python benchmarks/exact.py
"""

from __future__ import annotations

import argparse

from contenders import all_contenders, variant
from harness import add_options, compare, effort_of, say
from models import WORKLOADS
from results import Results, Setting, markdown, save, show_failures, times

GOAL = 0.97
"""At most 3 % slower."""


def table(results: list[Results]) -> str:
    """One row for each model."""
    rows = []
    for result in results:
        exact, free = result.samples_per_s("exact"), result.samples_per_s("not_exact")
        rows.append(
            (
                WORKLOADS[result.setting.model].title,
                "–" if exact is None else f"{exact:,.0f}",
                "–" if free is None else f"{free:,.0f}",
                times(result.ratio("exact", "not_exact"), GOAL),
            )
        )
    return markdown(("model", "exact, samples/s", "not exact, samples/s", "ratio"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given = parser.parse_args()
    parti = all_contenders(given.peers, given.processes)["parti"]
    pieces = ("--micro-batches", str(given.processes))
    contenders = [
        variant(parti, "exact", "exact=True", "--exact", "1", *pieces),
        variant(parti, "not_exact", "exact=False", "--exact", "0", *pieces),
    ]
    results = []
    for model in given.models:
        say(f"{WORKLOADS[model].title}: exact against not exact")
        setting = Setting(
            model=model, batch_size=WORKLOADS[model].batch_size, processes=given.processes
        )
        results.append(compare(contenders, setting, effort_of(given)))
    print(f"\n{table(results)}")
    show_failures(results)
    data = {"goal": GOAL, "comparisons": [result.as_data() for result in results]}
    print(f"\nwritten to {save('exact', data, given.output)}")


if __name__ == "__main__":
    main()
