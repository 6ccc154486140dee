"""What the tuning of one process gains: plain PyTorch, each part alone, and all of them.

    python benchmarks/single_process.py

One process of one thread. `Tuning.none()` beside plain PyTorch shows what Parti's own step costs
where there is nobody to talk to.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from contenders import all_contenders, variant
from harness import Contender, add_options, compare, effort_of, say
from models import WORKLOADS
from results import Results, Setting, markdown, save, show_failures, times

from parti.engine.tuning import Tuning

PARTS = tuple(each.name for each in fields(Tuning))


def contenders_of(table: dict[str, Contender]) -> list[Contender]:
    """Plain PyTorch, Parti without any part, with one, and with all."""
    return [
        variant(table["eager"], "eager", "plain PyTorch"),
        with_parts(table["parti"], "none", "Parti, Tuning.none()"),
        *(with_parts(table["parti"], part, f"{part} alone", part) for part in PARTS),
        with_parts(table["parti"], "all", "Parti, everything", *PARTS),
    ]


def with_parts(parti: Contender, name: str, title: str, *parts: str) -> Contender:
    """Parti with these parts only. The launcher sets the allocator, unless it is told not to."""
    chosen = variant(parti, name, title, "--micro-batches", "1", "--parts", *parts)
    launcher = ("-m", "parti", "run", "-n", "1")
    keeps = "allocator" in parts
    return replace(chosen, launcher=launcher if keeps else (*launcher, "--no-allocator-tuning"))


def table(results: list[Results]) -> str:
    """One row for each model: milliseconds of a plain step, then how many times as fast."""
    names = ["none", *PARTS, "all"]
    rows = []
    for result in results:
        step_s = result.step_s("eager")
        rows.append(
            (
                WORKLOADS[result.setting.model].title,
                "–" if step_s is None else f"{1000 * step_s:.2f}",
                *(times(result.ratio(name, "eager")) for name in names),
            )
        )
    return markdown(("model", "plain PyTorch, ms", *names), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.set_defaults(processes=1)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given = parser.parse_args()
    contenders = contenders_of(all_contenders(given.peers, given.processes))
    results = []
    for model in given.models:
        say(f"{WORKLOADS[model].title}: one process")
        setting = Setting(
            model=model, batch_size=WORKLOADS[model].batch_size, processes=given.processes
        )
        results.append(compare(contenders, setting, effort_of(given)))
    print(f"\n{table(results)}")
    show_failures(results)
    data = {"comparisons": [result.as_data() for result in results]}
    print(f"\nwritten to {save('single_process', data, given.output)}")


if __name__ == "__main__":
    main()
