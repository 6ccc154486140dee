"""A training is asked to stop: it saves its state after one step, ends with 75, and a new start
goes on from there to the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parti.checkpoint.read import newest_good
from parti.doctor.check import check
from parti.doctor.page import page
from parti.doctor.run import read_run
from parti.testing import FaultScript

from .conftest import DEADLINE_S, Ended, Jobs

EPOCHS = 6
Undisturbed = Callable[..., str]


def newest(directory: Path) -> int:
    found = newest_good(directory, lambda text: None)
    return -1 if found is None else found.step


def await_step(process: subprocess.Popen[str], directory: Path, step: int) -> None:
    """Until that step's checkpoint is there. The step that comes next is slow."""
    deadline = time.monotonic() + DEADLINE_S
    while newest(directory) < step:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)


def pids(jobs: Jobs) -> dict[int, int]:
    """The processes of the latest run, by member."""
    lines = (jobs.directory / "runs" / "latest" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {event["member"]: event["pid"] for event in events if event["kind"] == "started"}


def stopped_at(ended: Ended, directory: Path) -> int:
    """The step that the job says it has stopped after, where its checkpoint is, too."""
    assert ended.exit_code == 75, ended.output
    assert not ended.found, "somebody came to the end of the script"
    assert "Traceback" not in ended.output
    told = re.search(r"stopped after (\d+) steps; the state is in (\S+), and", ended.output)
    assert told is not None, ended.output
    assert newest(directory) == int(told[1])
    assert not list(directory.glob(".*draft")), "drafts are left"
    return int(told[1])


def test_it_goes_on_where_it_stopped_on_another_number_of_processes(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """SIGTERM and SIGUSR1 to the supervisor, and it is the step in flight that it ends with."""
    directory = tmp_path / "checkpoints"
    slow = FaultScript().delay(1.0, rank=0, step=50).delay(1.0, rank=0, step=150)
    process, out = jobs.start(3, EPOCHS, faults=slow, CHECKPOINTS=str(directory))
    await_step(process, directory, 50)
    process.send_signal(signal.SIGTERM)
    first = jobs.finish(process, out)
    assert stopped_at(first, directory) == 51
    assert "SIGTERM to the supervisor: all processes save their state" in first.output

    run = read_run(jobs.directory / "runs" / "latest")
    assert check(run) == []
    text = page(run, [])
    assert re.match(r"run \S+: stopped when it was asked to, ", text), text
    assert "SIGTERM to the supervisor" in text
    assert "diagnosis" not in text
    assert run.facts["failure"] is None

    process, out = jobs.start(2, EPOCHS, faults=slow, CHECKPOINTS=str(directory))
    await_step(process, directory, 150)
    process.send_signal(signal.SIGUSR1)
    second = jobs.finish(process, out)
    assert stopped_at(second, directory) == 151

    third = jobs.run(1, EPOCHS, CHECKPOINTS=str(directory))
    assert third.exit_code == 0, third.output
    assert set(third.found.values()) == {undisturbed(EPOCHS)}
    assert newest(directory) == 30 * EPOCHS


def test_a_signal_to_one_worker_is_carried_past_the_loss_of_it(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """In a loop of one's own, and the worker that was asked is killed in that very step."""
    directory = tmp_path / "checkpoints"
    slow = FaultScript().delay(1.0, rank=1, step=50).kill(rank=1, step=50, at="reduce")
    process, out = jobs.start(2, EPOCHS, faults=slow, how="loop", CHECKPOINTS=str(directory))
    await_step(process, directory, 50)
    os.kill(pids(jobs)[1], signal.SIGTERM)
    ended = jobs.finish(process, out)
    assert stopped_at(ended, directory) == 51
    assert "SIGTERM to rank 1" in ended.output
    again = jobs.run(1, EPOCHS, how="loop", CHECKPOINTS=str(directory))
    assert again.exit_code == 0, again.output
    assert set(again.found.values()) == {undisturbed(EPOCHS, "loop")}


def test_a_second_signal_ends_it_at_once(jobs: Jobs, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    slow = FaultScript().delay(60.0, rank=0, step=50)
    process, out = jobs.start(2, EPOCHS, faults=slow, CHECKPOINTS=str(directory))
    await_step(process, directory, 50)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # of the same breath: it counts once
    time.sleep(1.2)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    ended = jobs.finish(process, out)
    assert time.monotonic() - began < 10.0
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    assert "ended by SIGTERM" in ended.output


def test_the_grace_is_kept(jobs: Jobs, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    slow = FaultScript().delay(60.0, rank=0, step=50)
    options = ("--grace", "0.5")
    process, out = jobs.start(
        2, EPOCHS, faults=slow, options=options, CHECKPOINTS=str(directory)
    )  # fmt: skip
    await_step(process, directory, 50)
    process.send_signal(signal.SIGTERM)
    ended = jobs.finish(process, out)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    assert "the checkpoint was not finished within 0.5 s" in ended.output


def test_without_a_checkpoint_it_ends_at_once(jobs: Jobs) -> None:
    slow = FaultScript().delay(60.0, rank=0, step=50)
    process, out = jobs.start(2, EPOCHS, faults=slow)
    deadline = time.monotonic() + DEADLINE_S
    while not list(jobs.directory.glob("runs/*/commits-0.bin")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    ended = jobs.finish(process, out)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    assert time.monotonic() - began < 10.0


ALONE = """
import os, signal, sys, torch, parti
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
strategy = parti.OneDeviceStrategy()
model = torch.nn.Linear(3, 1)
replica = strategy.bind(model, torch.optim.SGD(model.parameters(), 0.1))
data = (torch.ones(99, 3),)
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
try:
    for batch in replica.batches(data, batch_size=9, checkpoint=parti.Checkpoint("kept", every=99)):
        replica.step(lambda x: model(x).mean(), batch)
        if replica.step_number == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
except parti.Preempted as preempted:
    assert preempted.code == 75 and preempted.step == 6, preempted
    assert asked == [signal.SIGUSR1]
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    raise
finally:
    print("finally")
"""


def test_a_process_without_a_supervisor_stops_by_itself(tmp_path: Path) -> None:
    """The script's own handler runs, too, and its `finally`."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert done.stdout == "finally\n"
    assert re.fullmatch(r"parti: SIGUSR1: stopped after 6 steps; .*\n", done.stderr)
    assert newest(tmp_path / "kept") == 6


TWO_HOSTS = """
import os, torch, parti
strategy = parti.MultiWorkerMirroredStrategy(threads=1)
model = torch.nn.Linear(3, 1)
replica = strategy.bind(model, torch.optim.SGD(model.parameters(), 0.1))
data = (torch.ones(9000, 3),)
for batch in replica.batches(data, batch_size=9, micro_batches=3,
                             checkpoint=parti.Checkpoint("kept", every=20)):
    replica.step(lambda x: model(x).mean(), batch)
    if replica.rank == 0 and replica.step_number == 21:
        import time; time.sleep(2.0)
"""


def test_a_signal_on_one_host_stops_all_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_HOSTS)

    def start(rank: int, address: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "parti", "run", "-n", "1", "--name", f"host{rank}", "--nodes",
             "2", "--node-rank", str(rank), "--address", address, "train.py"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    first = start(0, "127.0.0.1:0")
    assert first.stdout is not None
    invitation = re.search(r"--address (\S+)", first.stdout.readline())
    assert invitation is not None
    second = start(1, invitation[1])
    await_step(first, tmp_path / "kept", 20)
    second.send_signal(signal.SIGTERM)
    outputs = [host.communicate(timeout=DEADLINE_S)[0] for host in (first, second)]
    assert (first.returncode, second.returncode) == (75, 75), outputs
    for output in outputs:
        # The letter of the step in flight may have been on its way.
        assert re.search(r"stopped after 2[23] steps; the state is in kept", output)
