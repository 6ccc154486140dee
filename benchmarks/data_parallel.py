"""Parti against its peers and against the twin without communication, on four models.

    python benchmarks/data_parallel.py                       everything; about twenty minutes
    python benchmarks/data_parallel.py --models gpt mlp --contenders twin parti raw_ddp

Two processes of one thread each. Two comparisons for each model:

*same tuning*: every contender gets the allocator settings, the layout, the matrix products and the
fused optimizer that Parti chooses by itself, and computes as many samples in one piece; the ratio
shows what distribution costs. Goals are set here.

*as users run it*: Parti with its defaults, the others with theirs; the ratio shows what a user
gains.
"""

from __future__ import annotations

import argparse

from contenders import all_contenders, pick, variant
from harness import ALLOCATOR, Contender, add_options, compare, effort_of, say
from models import WORKLOADS, Workload
from results import Results, Setting, markdown, save, show_failures, times

DEFAULT_CONTENDERS = (
    "twin", "lockstep", "parti", "raw_ddp", "default_ddp", "accelerate", "fabric",
    "tf_mirrored", "tf_mirrored_whole", "tf_multi_worker",
)  # fmt: skip

GOALS = {
    "mnist_cnn": {"twin": 0.97, "raw_ddp": 1.15},
    "gpt": {"twin": 0.98, "raw_ddp": 1.05},
    "mlp": {"twin": 0.95, "raw_ddp": 1.4},
    "resnet18": {"twin": 0.98, "raw_ddp": 1.03},
}
"""How many times as fast as these Parti shall be, with the same tuning for all."""

HEADINGS = {
    "same": "Same tuning for all: the cost of distribution",
    "users": "As users run it: what a user gains",
}


def setting_for(workload: Workload, tuning: str, processes: int) -> Setting:
    """What all contenders of one comparison get."""
    return Setting(
        model=workload.name,
        batch_size=workload.batch_size,
        processes=processes,
        tuning=tuning,
        environment=ALLOCATOR if tuning == "same" else {},
    )


def same_pieces(contenders: list[Contender], processes: int) -> list[Contender]:
    """Parti with one micro-batch for each process: all compute the same batch in one piece."""
    return [
        variant(each, each.name, each.title, "--micro-batches", str(processes))
        if each.name == "parti"
        else each
        for each in contenders
    ]


def table(results: list[Results], tuning: str) -> str:
    """One row for each contender and model, with its ratio to the twin and to raw DDP."""
    rows = []
    for result in results:
        model = result.setting.model
        for name, title in result.titles.items():
            speed = result.samples_per_s(name)
            if speed is None:
                if name in result.failures:
                    rows.append((WORKLOADS[model].title, title, "did not run", "–", "–", "–"))
                continue
            goals = GOALS[model] if name == "parti" and tuning == "same" else {}
            rows.append(
                (
                    WORKLOADS[model].title, title, f"{speed:,.0f}",
                    times(result.ratio(name, "twin"), goals.get("twin")),
                    times(result.ratio(name, "raw_ddp"), goals.get("raw_ddp")),
                    times(result.ratio(name, "lockstep")),
                )
            )  # fmt: skip
    headings = ("model", "contender", "samples/s", "to the twin", "to raw DDP", "to waiting twin")
    return markdown(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT_CONTENDERS))
    parser.add_argument("--tunings", nargs="+", choices=list(HEADINGS), default=list(HEADINGS))
    given = parser.parse_args()
    contenders = pick(all_contenders(given.peers, given.processes), given.contenders)
    effort = effort_of(given)
    everything: dict[str, list[Results]] = {tuning: [] for tuning in given.tunings}
    for model in given.models:
        for tuning in given.tunings:
            say(f"{WORKLOADS[model].title}: {HEADINGS[tuning]}")
            setting = setting_for(WORKLOADS[model], tuning, given.processes)
            chosen = same_pieces(contenders, given.processes) if tuning == "same" else contenders
            everything[tuning].append(compare(chosen, setting, effort))
    for tuning, results in everything.items():
        print(f"\n### {HEADINGS[tuning]}\n\n{table(results, tuning)}")
        show_failures(results)
    data = {
        "goals": GOALS,
        "comparisons": [r.as_data() for results in everything.values() for r in results],
    }
    print(f"\nwritten to {save('data_parallel', data, given.output)}")


if __name__ == "__main__":
    main()
