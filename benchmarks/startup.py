"""From the start of the command to the end of the first step: two processes against one.

    python benchmarks/startup.py

One process is a plain PyTorch script; two are `parti run -n 2 script.py` and `python script.py`,
which starts the second process by itself.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import clean, say, wait_until_idle
from results import HERE, markdown, save, times

SCRIPT = str(HERE / "peers" / "first_step.py")
COMMANDS = {
    "plain": ("one process, plain PyTorch", (SCRIPT, "plain")),
    "parti_run": ("two processes, parti run", ("-m", "parti", "run", "-n", "2", SCRIPT, "parti")),
    "parti": ("two processes, python script.py", (SCRIPT, "parti")),
}
GOAL = 1.2
"""Two processes take at most this many times as long as one."""


def first_step_s(command: tuple[str, ...]) -> float:
    """Run a command; the seconds from its start to the end of the first step."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result"
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command, str(result)],
            cwd=directory, env=clean({}), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return float(result.read_text()) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _, command in COMMANDS.values():
        first_step_s(command)  # Python compiles what it imports; the disk is read once
    for done in range(given.rounds):
        if not given.no_wait:
            wait_until_idle()
        for name, (_, command) in COMMANDS.items():
            taken[name].append(first_step_s(command))
        say(f"  round {done + 1}/{given.rounds}")
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, taken["plain"], strict=True))
        for name, own in taken.items()
    }
    rows = [
        (
            COMMANDS[name][0],
            f"{statistics.median(own):.2f}",
            times(ratios[name], None if name == "plain" else GOAL, at_most=True),
        )
        for name, own in taken.items()
    ]
    print(f"\n{markdown(('start', 'seconds to the first step', 'to one process'), rows)}")
    data = {"goal": GOAL, "seconds": taken, "ratios": ratios}
    print(f"\nwritten to {save('startup', data, given.output)}")


if __name__ == "__main__":
    main()
