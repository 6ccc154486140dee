"""Runs the training beside this file under `parti run`, with faults, and reads what came out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from parti.testing import NO_FAULTS, FaultScript

TRAINING = Path(__file__).with_name("training.py")
DEADLINE_S = 100.0


@dataclass(frozen=True)
class Ended:
    """A job that has come to its end."""

    exit_code: int
    output: str
    found: dict[int, str]
    """What each process that was there at the end has written, by its number."""


class Jobs:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0

    def start(
        self,
        num_processes: int,
        epochs: int,
        *,
        faults: FaultScript = NO_FAULTS,
        how: str = "trainer",
        options: tuple[str, ...] = (),
        **variables: str,
    ) -> tuple[subprocess.Popen[str], Path]:
        self._count += 1
        out = self.directory / f"out{self._count}"
        command = [
            sys.executable, "-m", "parti", "run", "-n", str(num_processes), *options,
            str(TRAINING), str(epochs), str(out), how,
        ]  # fmt: skip
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env={**clean, "PARTI_FAULTS": str(faults), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return process, out

    def finish(self, process: subprocess.Popen[str], out: Path) -> Ended:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        found = {
            int(path.suffix[1:]): path.read_text() for path in out.parent.glob(f"{out.name}.*")
        }
        return Ended(process.returncode, output, found)

    def run(self, num_processes: int, epochs: int, **settings: object) -> Ended:
        return self.finish(*self.start(num_processes, epochs, **settings))  # type: ignore[arg-type]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """What one process finds that nothing happens to."""
    known: dict[tuple[int, str], str] = {}

    def find(epochs: int, how: str = "trainer") -> str:
        if (epochs, how) not in known:
            ended = Jobs(tmp_path_factory.mktemp("alone")).run(1, epochs, how=how)
            assert ended.exit_code == 0, ended.output
            (known[epochs, how],) = ended.found.values()
        return known[epochs, how]

    return find
