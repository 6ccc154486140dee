"""Whole trainings as users start them: how they end, and what is left of them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import termios
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multiprocess.launch.conftest import Bench, Hub

DEADLINE_S = 60.0

TRAINING = """
import os, sys, socket
import torch, parti
from torch import nn

rank = int(os.environ.get("PARTI_RANK", 0))
digits = parti.datasets.digits()
images, labels = (part[:201] for part in digits.train)

def trainer(strategy=None, **settings):
    strategy = strategy or parti.MirroredStrategy(devices=2, threads=1, patience_s=30.0)
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return parti.Trainer(strategy, model, optimizer, nn.CrossEntropyLoss(), **settings)

class At:
    '''Calls something on one rank at the end of a step.'''
    def __init__(self, step, only, call):
        self.step, self.only, self.call = step, only, call
    def on_step_end(self, event):
        if event.trainer.step == self.step and self.only in (rank, None):
            self.call()

def fail():
    raise ValueError("the data of shard 1 is broken")

settings = dict(batch_size=32, micro_batches=4, progress=False)
"""


@pytest.fixture
def script(bench: Bench) -> Iterator[Bench]:
    bench.write("training.py", TRAINING)
    yield bench
    assert bench.leftovers() == []


def start(bench: Bench, body: str, *options: str) -> tuple[int, str, str]:
    """Run a plainly started script, or with options, under `parti run`."""
    bench.write("train.py", "from training import *\n" + textwrap.dedent(body))
    before = set(Path("/dev/shm").iterdir())
    command = ("-m", "parti", "run", *options, "train.py") if options else ("train.py",)
    found = bench.finish(bench.python(*command))
    assert set(Path("/dev/shm").iterdir()) <= before
    return found


def test_the_first_failure_is_shown_and_its_consequences_are_folded(script: Bench) -> None:
    body = "trainer(callbacks=[At(3, 1, fail)]).fit((images, labels), epochs=10**6, **settings)"
    code, out, err = start(script, body)
    assert (code, out) == (1, "")
    assert err.startswith("parti: rank 1 failed with exit code 1\nTraceback (most recent call")
    assert err.count("Traceback") == 1
    assert "\nValueError: the data of shard 1 is broken\n" in err
    # Rank 0 is ended before it notices, or says in a line that rank 1 is gone.
    _, _, rest = err.partition("shard 1 is broken\n")
    lines = rest.splitlines()
    assert lines.pop().startswith("log: runs/train-")
    if lines:
        assert lines[0] == "after it, and most likely because of it:"
        assert lines[1].startswith("  rank 0: PeerLost: ") and len(lines) == 2
    record = json.loads(script.read("run.json"))
    assert record["exit_code"] == 1
    assert "the data of shard 1 is broken" in script.read("rank1.log")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os._exit(4)", 4)])
def test_an_exit_code_of_one_rank_is_the_jobs(script: Bench, end: str, code: int) -> None:
    body = f"""
        trainer(callbacks=[At(2, 1, lambda: {end})]).fit(
            (images, labels), epochs=10**6, **settings
        )
    """
    found, _, err = start(script, body)
    assert found == code
    assert err.startswith(f"parti: rank 1 failed with exit code {code}\n")
    assert "Traceback" not in err


def test_a_rank_that_leaves_early_is_missed_by_name(script: Bench) -> None:
    body = """
        trainer(callbacks=[At(2, 1, lambda: os._exit(0))]).fit(
            (images, labels), epochs=10**6, **settings
        )
    """
    code, _, err = start(script, body)
    assert code == 1
    assert "rank 0 failed with exit code 1" in err
    assert "s for rank 1; rank 0 arrived. Last report from rank 1: " in err
    assert "it was killed, or its script ended before that of the others." in err


def test_the_same_mistake_on_all_ranks_is_told_once(script: Bench) -> None:
    code, _, err = start(script, "trainer().fit((images, labels.float()), **settings)")
    assert code == 1
    assert err.count("RuntimeError: expected target dtype to be Long") == 1
    assert "loss= was called with the model's output, a tensor of shape (8, 10)" in err


def test_different_data_is_a_mismatch_and_no_hang(script: Bench) -> None:
    body = """
        count = 201 - 40 * rank
        trainer().fit((images[:count], labels[:count]), **settings)
    """
    code, _, err = start(script, body)
    assert code == 1
    words = "RankMismatch: rank 0 is at step 5 with a batch of 32 samples, rank 1 at step 5 with 1."
    assert words in err
    assert "Every process must run the same steps over the same data" in err


def test_a_loss_that_is_no_number_ends_the_job_with_its_step(script: Bench) -> None:
    body = """
        images[70] = float("nan")
        trainer().fit((images, labels), shuffle=False, **settings)
    """
    code, _, err = start(script, body)
    assert code == 1
    assert err.count("NonFiniteLoss: step 2 (epoch 1): the loss is nan") == 1


def test_evaluation_counts_each_sample_once_on_any_number_of_processes(script: Bench) -> None:
    """201 samples in batches of 32 on 1, 2 and 3 processes, against one pass over all."""
    body = """
        strategy = parti.MirroredStrategy(threads=1)
        t = trainer(strategy, metrics={"accuracy": parti.Accuracy()})
        with torch.no_grad():
            t.model[2].bias[3] = 1.0  # so that classes differ
        found = t.evaluate((images, labels), batch_size=32, micro_batches=4)
        t.model.eval()
        output = t.model(images).detach()
        right = (output.argmax(1) == labels).sum().item()
        assert found["accuracy"] == right / 201, (found, right)
        loss = nn.functional.cross_entropy(output.double(), labels).item()
        assert abs(found["loss"] - loss) < 1e-6, (found, loss)
        predicted = t.predict((images, labels), batch_size=32, micro_batches=4)
        assert predicted.shape == output.shape and torch.allclose(predicted, output, atol=1e-6)
        if rank == 0:
            print(found)
    """
    shown = set()
    for count in ("1", "2", "3"):
        code, out, err = start(script, body, "-n", count)
        assert code == 0, err
        shown.add(out)
    assert len(shown) == 1


def test_a_training_goes_on_with_another_number_of_processes(script: Bench) -> None:
    """One epoch on two, stopped in the middle of the next; the rest on three; and all on one."""
    body = """
        from parti.testing import fingerprint
        state, until = sys.argv[1], int(sys.argv[2])
        stop = At(until, None, lambda: None)
        stop.on_step_end = lambda event: parti.Stop("far") if event.trainer.step == until else None
        t = trainer(parti.MirroredStrategy(threads=1), callbacks=[stop], clip_norm=1.0)
        if os.path.exists(state):
            t.load(state)
        t.fit((images, labels), epochs=3, **settings)
        t.save(state)
        if rank == 0:
            print(t.step, fingerprint(t.model, t.optimizer))
    """
    script.write("train.py", "from training import *\n" + textwrap.dedent(body))

    def train(count: int, state: str, until: int) -> str:
        command = ("-m", "parti", "run", "-n", str(count), "train.py", state, str(until))
        code, out, err = script.finish(script.python(*command))
        assert code == 0, err
        return out

    whole = train(1, "whole.pt", 10**6)
    assert whole.startswith("21 ")
    assert train(2, "parts.pt", 10).startswith("10 ")
    assert train(3, "parts.pt", 10**6) == whole


def test_one_process_needs_no_run_directory(script: Bench) -> None:
    body = """
        t = trainer(parti.OneDeviceStrategy(threads=1))
        t.fit((images, labels), **settings)
        print("trained", t.step, "PARTI_RANK" in os.environ)
    """
    assert start(script, body) == (0, "trained 7 False\n", "")
    assert not (script.directory / "runs").exists()


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_in_the_middle_of_an_epoch(script: Bench, hub: Hub) -> None:
    """On a real terminal, with the live line on it."""
    body = """
        def report():
            global hub
            hub = socket.create_connection(("127.0.0.1", int(os.environ["HUB"])))
            hub.sendall(f"{rank} {os.getpid()}\\n".encode())
        settings["progress"] = True
        trainer(callbacks=[At(10, None, report)]).fit((images, labels), epochs=10**6, **settings)
    """
    script.write("train.py", "from training import *\n" + textwrap.dedent(body))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 99))
    process = script.python(
        "train.py", stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    shown = b""
    # Read on while the ranks come up: a terminal nobody reads holds its writers up.
    gathering = threading.Thread(target=hub.gather, args=(2,))
    gathering.start()
    while gathering.is_alive():
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
    os.write(ours, b"\x03")
    pressed_s = time.monotonic()
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        shown += data
    hub.await_end()
    assert process.wait(DEADLINE_S) == 130
    assert time.monotonic() - pressed_s < 2.0
    os.close(ours)
    text = shown.decode()
    assert "epoch" in text and "/1000000" in text
    assert text.endswith("parti: ended by SIGINT\r\n")
    assert "Traceback" not in text
    assert text.count("parti: ") == 1
    for rank in (0, 1):
        log = script.read(f"rank{rank}.log")
        assert "\x1b" not in log and "\r" not in log
        assert "Traceback" not in log
