"""Processes are killed, stopped and stuck at scripted points of a real training."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from parti.testing import FaultScript

from .conftest import Jobs

EPOCHS = 60
Undisturbed = Callable[..., str]


@pytest.mark.parametrize(
    "points",
    [
        ("forward", "update", "user"),
        ("backward", "hand_out", "evaluate"),
        ("reduce", "optimizer", "recover"),
    ],
    ids="-".join,
)
def test_three_of_four_are_killed(
    jobs: Jobs, undisturbed: Undisturbed, points: tuple[str, str, str]
) -> None:
    """One after the other; the last one left, and those that took their places, end alike."""
    first, second, third = points
    script = FaultScript().kill(rank=0, step=40, at=first).kill(rank=2, step=90, at=second)
    # Nothing is run without gradients but at the end of an epoch; recovery follows a loss.
    step = {"evaluate": 30 * 3, "recover": 90}.get(third, 140)
    ended = jobs.run(4, EPOCHS, faults=script.kill(rank=3, step=step, at=third))
    assert ended.exit_code == 0, ended.output
    assert set(ended.found) >= {1}
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}
    for rank in (0, 2, 3):
        assert re.search(rf"rank {rank} \(process \d+\) was killed by SIGKILL", ended.output)


def test_a_loop_of_ones_own_goes_on(jobs: Jobs, undisturbed: Undisturbed) -> None:
    script = FaultScript().kill(rank=0, step=50, at="backward").kill(rank=1, step=200, at="update")
    ended = jobs.run(3, EPOCHS, faults=script, how="loop")
    assert ended.exit_code == 0, ended.output
    assert set(ended.found) > {2}, "no replacement was there at the end"
    assert set(ended.found.values()) == {undisturbed(EPOCHS, "loop")}


@pytest.mark.parametrize("deed", ["stop", "hang"])
def test_a_frozen_process_is_found_shown_and_replaced(
    jobs: Jobs, undisturbed: Undisturbed, deed: str
) -> None:
    script = FaultScript()
    freeze = script.stop if deed == "stop" else script.hang
    ended = jobs.run(3, EPOCHS, faults=freeze(rank=1, step=60, at="backward"), PATIENCE="1.5")
    assert ended.exit_code == 0, ended.output
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}
    assert re.search(r"rank 1 \(process \d+\) stood still in backward of step 60", ended.output)
    assert "most recent call first" in ended.output
    assert ("was stopped (SIGSTOP)" in ended.output) == (deed == "stop"), ended.output


def test_slow_data_is_no_fault(jobs: Jobs, undisturbed: Undisturbed) -> None:
    script = FaultScript().delay(3.0, rank=1, step=40, at="data")
    ended = jobs.run(2, 2, faults=script, PATIENCE="1")
    assert ended.exit_code == 0, ended.output
    assert set(ended.found) == {0, 1}, ended.output
    assert set(ended.found.values()) == {undisturbed(2)}


def test_a_spare_takes_the_place(jobs: Jobs, undisturbed: Undisturbed) -> None:
    script = FaultScript().kill(rank=1, step=60, at="backward")
    ended = jobs.run(2, EPOCHS, faults=script, options=("--spares", "1"))
    assert ended.exit_code == 0, ended.output
    assert set(ended.found) == {0, 2}, "the spare has number 2"
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}


def test_one_that_is_stopped_on_its_way_is_replaced(jobs: Jobs, undisturbed: Undisturbed) -> None:
    script = FaultScript().kill(rank=1, step=60, at="backward").stop(rank=2, step=-1, at="wait")
    ended = jobs.run(2, EPOCHS, faults=script, options=("--spares", "1"), PATIENCE="1")
    assert ended.exit_code == 0, ended.output
    assert "was stopped (SIGSTOP)" in ended.output
    assert len(ended.found) == 2, "nobody came in its place"
    assert set(ended.found.values()) == {undisturbed(EPOCHS)}


def test_an_error_of_the_script_ends_the_job_as_ever(jobs: Jobs) -> None:
    """The others would meet it as well."""
    (jobs.directory / "broken.py").write_text(
        "import parti, torch\n"
        "strategy = parti.MirroredStrategy(threads=1)\n"
        "model = torch.nn.Linear(3, 1)\n"
        "replica = strategy.bind(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "for batch in replica.batches((torch.ones(99, 3),), batch_size=9, micro_batches=3):\n"
        "    replica.step(lambda x: model(x).mean(), batch)\n"
        "    if replica.step_number == 5 and replica.rank == 1:\n"
        "        raise KeyError('typo')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "parti", "run", "-n", "3", "broken.py"],
        cwd=jobs.directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 failed with exit code 1" in done.stderr
    assert "KeyError: 'typo'" in done.stderr


def test_the_last_one_ends_the_job(jobs: Jobs) -> None:
    script = FaultScript().kill(rank=0, step=40, at="backward").kill(rank=1, step=41, at="forward")
    ended = jobs.run(2, EPOCHS, faults=script)
    assert ended.exit_code == 128 + 9
    assert "no process is left that holds the state" in ended.output
