"""What the library itself costs: in a step, and when it is imported.

    python benchmarks/overhead.py

A model so small that almost nothing is computed. The library's time in a step is Parti's step less
the plain step (the user's forward and backward, and the optimizer) and less one all-reduce of the
same size, all measured in one run. The import is timed inside a process that has torch already.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import replace

from contenders import all_contenders, pick, variant
from harness import ALLOCATOR, Effort, add_options, clean, compare, effort_of, say
from results import Results, Setting, markdown, save

STEP_GOAL_S = 150e-6
IMPORT_GOAL_S = 0.2

IMPORTS = {
    "import parti": "import parti",
    "and its names": "import parti; parti.MirroredStrategy, parti.Trainer, parti.datasets",
}


def steps_of(processes: int, given: argparse.Namespace, effort: Effort) -> list[Results]:
    """The plain step and Parti's on the tiny model; the all-reduce on as much memory."""
    table = all_contenders(given.peers, processes)
    pieces = ("--micro-batches", str(processes))
    contenders = [table["twin"], variant(table["parti"], "parti", "Parti", *pieces)]
    setting = Setting(
        model="tiny",
        batch_size=8,
        processes=processes,
        tuning="same",
        window_s=0.4,
        environment=ALLOCATOR,
    )
    say(f"the step, {processes} processes")
    step = compare(contenders, setting, effort)
    if processes == 1:
        return [step]
    reduce = replace(setting, model="1KB", batch_size=1)
    return [step, compare(pick(table, ("shared_reduce",)), reduce, effort)]


def library_s(results: list[Results]) -> dict[str, float | None]:
    """What a step takes and how it divides."""
    parti, plain = results[0].step_s("parti"), results[0].step_s("twin")
    reduce = results[1].step_s("shared_reduce") if len(results) > 1 else 0.0
    library = None
    if parti is not None and plain is not None and reduce is not None:
        library = parti - plain - reduce
    return {
        "step_s": parti,
        "plain_step_s": plain,
        "reduce_s": reduce,
        "library_s": library,
    }


def import_s(statement: str) -> float:
    """Seconds that a statement takes in a fresh process which has imported torch."""
    program = (
        f"import torch, time; start = time.perf_counter(); {statement}; "
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean({}), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return float(done.stdout)


def verdict(value: float | None, goal: float, unit: float, word: str) -> str:
    """A time with its goal."""
    if value is None:
        return "–"
    reached = "met" if value <= goal else "not met"
    return f"{value / unit:.0f} {word} (goal {goal / unit:.0f}: {reached})"


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e6:.0f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    given = parser.parse_args()
    effort = effort_of(given)
    results = {processes: steps_of(processes, given, effort) for processes in (1, 2)}
    parts = {processes: library_s(measured) for processes, measured in results.items()}
    rows = [
        (
            str(processes),
            microseconds(part["step_s"]),
            microseconds(part["plain_step_s"]),
            microseconds(part["reduce_s"]),
            verdict(part["library_s"], STEP_GOAL_S, 1e-6, "µs"),
        )
        for processes, part in parts.items()
    ]
    columns = ("processes", "Parti's step", "plain step", "all-reduce", "the library")
    print(f"\n{markdown(columns, rows)}\n")
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(max(5, given.rounds)):
        for name, statement in IMPORTS.items():
            taken[name].append(import_s(statement))
    imports = {name: statistics.median(seconds) for name, seconds in taken.items()}
    shown = [(n, verdict(s, IMPORT_GOAL_S, 1e-3, "ms")) for n, s in imports.items()]
    print(markdown(("import", "over torch"), shown))
    for name, why in {
        k: v for each in results.values() for r in each for k, v in r.failures.items()
    }.items():
        print(f"\n{name}: {why}")
    data = {
        "goals": {"step_s": STEP_GOAL_S, "import_s": IMPORT_GOAL_S},
        "steps": parts,
        "imports_s": taken,
        "comparisons": [r.as_data() for each in results.values() for r in each],
    }
    print(f"\nwritten to {save('overhead', data, given.output)}")


if __name__ == "__main__":
    main()
