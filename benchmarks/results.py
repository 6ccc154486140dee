"""What was measured, and how it is shown: medians, ratios, tables, files.

Owns numbers once they are taken; must not know how a contender is started.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

Record = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of one comparison are given alike."""

    model: str
    batch_size: int
    processes: int = 2
    threads: int = 1
    tuning: str = "users"
    warmup: int = 3
    window_s: float = 0.7
    settle_s: float = 0.1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Results:
    """Everything that was measured in one comparison: one list of turns a round and contender."""

    setting: Setting
    titles: dict[str, str]
    rounds: list[dict[str, list[Record]]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def per_round(self, name: str) -> list[float | None]:
        """The contender's samples/s in each round, the median of its turns."""
        return [
            statistics.median(number(turn, "samples_per_s") for turn in turns[name])
            if turns.get(name)
            else None
            for turns in self.rounds
        ]

    def samples_per_s(self, name: str) -> float | None:
        """Median over rounds."""
        return median(self.per_round(name))

    def step_s(self, name: str) -> float | None:
        """Median seconds a step."""
        return median(
            number(turn, "step_s") for turns in self.rounds for turn in turns.get(name, ())
        )

    def ratio(self, name: str, to: str) -> float | None:
        """How many times as fast as another, the median of the rounds' ratios."""
        return median(self.ratios(name, to))

    def ratios(self, name: str, to: str) -> list[float]:
        """The same, one for each round in which both ran."""
        pairs = zip(self.per_round(name), self.per_round(to), strict=True)
        return [a / b for a, b in pairs if a is not None and b is not None]

    def as_data(self) -> Record:
        """For the JSON file: every single window, and what was made of them."""
        setting = self.setting
        return {
            "model": setting.model, "tuning": setting.tuning, "batch_size": setting.batch_size,
            "processes": setting.processes, "threads": setting.threads,
            "environment": dict(setting.environment), "load_before_rounds": self.loads,
            "failures": self.failures, "versions": self.versions,
            "contenders": {
                name: {
                    "title": title,
                    "samples_per_s": self.samples_per_s(name),
                    "samples_per_s_of_rounds": self.per_round(name),
                    "step_s": self.step_s(name),
                    "turns": [turns.get(name, []) for turns in self.rounds],
                }
                for name, title in self.titles.items()
            },
        }  # fmt: skip


def number(record: Record, key: str) -> float:
    value = record[key]
    assert isinstance(value, int | float)
    return float(value)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def machine() -> Record:
    """What the numbers depend on: processor, cores, versions, commit, date, command."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return {
        "cpu": cpu[0] if cpu else "unknown",
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "libc": libc,
        "python": sys.version.split()[0],
        "torch": _version_of("torch"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed_since_commit": bool(_git("status", "--porcelain", "--", "src", "benchmarks")),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": " ".join(["python", _short(sys.argv[0]), *sys.argv[1:]]),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _short(path: str) -> str:
    absolute = Path(path).resolve()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else absolute.name


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page or a terminal: padded, the first column to the left."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *(line(row) for row in cells[1:])])


def times(
    value: float | None, goal: float | None = None, *, digits: int = 3, at_most: bool = False
) -> str:
    """A ratio for a table, with its goal and whether it is reached."""
    if value is None:
        return "–"
    if goal is None:
        return f"{value:.{digits}f} ×"
    reached = value <= goal if at_most else value >= goal
    return f"{value:.{digits}f} × (goal {goal:g}: {'met' if reached else 'not met'})"


def show_failures(results: Iterable[Results]) -> None:
    """Say who did not run, and why; the same reason once."""
    reasons = {f"{name}: {why}" for result in results for name, why in result.failures.items()}
    for reason in sorted(reasons):
        print(f"\n{reason}")


def save(name: str, data: Mapping[str, object], output: Path | None) -> Path:
    """Write the results beside the scripts, or where the user said."""
    path = output or HERE / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n")
    return path
