"""Parti's TCP connections against gloo, as they are used between hosts, over the loopback.

python benchmarks/between_hosts.py
"""

from __future__ import annotations

import argparse

from harness import Contender, add_options, compare, effort_of, say
from results import Results, Setting, markdown, save, show_failures, times

TRAFFIC = ("exchange-200B", "bucket-4MB", "bucket-25MB")
GOALS = {"exchange-200B": 1.0, "bucket-4MB": 0.9, "bucket-25MB": 0.9}
"""How many times as fast as gloo."""

SCRIPT = "peers/between_hosts.py"
CONTENDERS = (
    Contender(name="tcp", title="Parti's TCP", script=SCRIPT),
    Contender(name="gloo", title="gloo", script=SCRIPT),
)


def table(results: list[Results]) -> str:
    """One row for each kind of traffic."""
    rows = []
    for result in results:
        traffic = result.setting.model
        tcp, gloo = result.step_s("tcp"), result.step_s("gloo")
        rows.append(
            (
                traffic,
                "–" if gloo is None else f"{gloo * 1e3:.3f}",
                "–" if tcp is None else f"{tcp * 1e3:.3f}",
                times(result.ratio("tcp", "gloo"), GOALS.get(traffic), digits=2),
            )
        )
    return markdown(("traffic", "gloo, ms", "TCP, ms", "times as fast"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--traffic", nargs="+", default=list(TRAFFIC), metavar="bucket-4MB")
    given = parser.parse_args()
    results = []
    for traffic in given.traffic:
        say(traffic)
        setting = Setting(
            model=traffic, batch_size=1, processes=given.processes, window_s=0.5, settle_s=0.05
        )
        results.append(compare(CONTENDERS, setting, effort_of(given)))
    print(f"\n{table(results)}")
    show_failures(results)
    data = {"goals": GOALS, "comparisons": [result.as_data() for result in results]}
    print(f"\nwritten to {save('between_hosts', data, given.output)}")


if __name__ == "__main__":
    main()
