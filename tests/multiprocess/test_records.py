"""What a real training leaves behind: a kill at a scripted point, a replacement that joins, and the
doctor's page of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parti.doctor.book import COMMITTED, Record
from parti.doctor.check import check
from parti.doctor.run import Run, State, read_run
from parti.testing import FaultScript

DEADLINE_S = 100.0
SCRIPT = """
import torch, parti
from torch import nn

class Enough:
    '''Ends the training when it has gone on for a while with all processes again.'''

    def __init__(self):
        self.was_torn, self.left = False, 20

    def on_step_end(self, event):
        size = event.trainer.replica.world_size
        self.was_torn |= size < 3
        self.left -= self.was_torn and size == 3
        return parti.Stop("all are there again") if self.left == 0 else None

strategy = parti.MirroredStrategy(threads=1)
with strategy.scope():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters())
trainer = parti.Trainer(
    strategy, model, optimizer, nn.CrossEntropyLoss(), callbacks=[Enough()]
)
train, test = parti.datasets.digits()
trainer.fit(train, batch_size=50, micro_batches=6, epochs=1_000_000, progress=False)
"""


def _parti(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
    return subprocess.run(
        [sys.executable, "-m", "parti", *arguments],
        cwd=directory,
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def _steps(run: Run, member: int) -> list[Record]:
    return [record for record in run.books[member] if record.kind == COMMITTED]


@pytest.mark.parametrize("point", ["backward", "update"])
def test_a_loss_and_a_join_are_recorded_and_told(tmp_path: Path, point: str) -> None:
    """Before the point of no return the step is done again, behind it it is finished."""
    (tmp_path / "script.py").write_text(SCRIPT)
    faults = FaultScript().kill(rank=1, step=5, at=point)
    trained = _parti(
        tmp_path, "run", "-n", "3", "--name", "it", "script.py", PARTI_FAULTS=str(faults)
    )
    assert trained.returncode == 0, trained.stderr
    run = read_run(tmp_path / "runs" / "it")
    assert check(run) == []
    assert run.state is State.ENDED
    assert [world.members for world in run.worlds.values()] == [(0, 1, 2), (0, 2), (0, 2, 3)]
    (lost,) = run.of("lost")
    assert (lost.number("member"), lost.number("step"), lost.text("phase")) == (1, 5, point)

    first, lost_ones, third, newcomers = (_steps(run, member) for member in range(4))
    assert [record.step for record in lost_ones] == list(range(5))
    assert [record.step for record in first] == list(range(len(first)))
    assert {record.generation for record in first[:5]} == {1}
    if point == "backward":
        assert (first[5].generation, first[5].has_finished) == (2, False)
        assert first[5].num_samples_here + third[5].num_samples_here == 50
    else:
        assert (first[5].generation, first[5].has_finished) == (1, True)
        assert first[5].num_samples_here + third[5].num_samples_here < 50
    (joined,) = run.books[3].joins
    assert (joined.generation, joined.giver, joined.step) == (3, 0, newcomers[0].step)
    assert [r.step for r in newcomers] == [r.step for r in first if r.step >= joined.step]

    told = _parti(tmp_path, "doctor")
    assert told.returncode == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert words.startswith("run it: ended well, ")
    assert f"was lost in {point} of step 5: killed by SIGKILL; step 5 was committed " in words
    assert f"process 3 joined (generation 3, 3 processes) at step {joined.step}, with" in words
    assert words.endswith("every sample of it counted once")
