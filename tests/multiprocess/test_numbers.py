"""The same bits over real processes: shared memory, several hosts, other launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import parti
from parti.errors import WorkerFailed
from parti.testing import assert_ranks_equal, fingerprint, on_processes, ranks

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F
    import parti
    from parti.testing import fingerprint

    strategy = parti.MultiWorkerMirroredStrategy(threads=1)
    with strategy.scope():
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(8 * 36, 10),
        )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    replica = strategy.bind(model, optimizer)
    (x, y), _ = parti.datasets.digits().train, None
    for batch in replica.batches((x[:230], y[:230]), batch_size=48, micro_batches=4, epochs=2):
        report = replica.step(lambda x, y: F.cross_entropy(model(x), y), batch, clip_norm=1.0)
    # In one write: ranks that share a pipe must not cut one another's lines in two.
    sys.stdout.write(f"print {fingerprint(model, optimizer)} {replica.world_size} {report.loss}\\n")
    sys.stdout.flush()
    """
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "train.py"
    path.write_text(SCRIPT)
    return path


def run(command: list[str], cwd: Path, **environment: str) -> list[str]:
    """The fingerprint, world size and loss that a job printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")} | environment
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("print")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def alone(script: Path) -> list[str]:
    return run([sys.executable, "-m", "parti", "run", "-n", "1", str(script)], script.parent)


@pytest.mark.parametrize("num_processes", [2, 3, 4, 7])
def test_parti_run_gives_the_bits_of_one_process(
    script: Path, alone: list[str], num_processes: int
) -> None:
    command = [sys.executable, "-m", "parti", "run", "-n", str(num_processes), str(script)]
    found = run(command, script.parent)
    assert found[0] == alone[0]
    assert found[1:] == [str(num_processes), alone[2]]


def test_a_plainly_started_script_uses_every_core(script: Path, alone: list[str]) -> None:
    found = run([sys.executable, str(script)], script.parent)
    assert found[0] == alone[0]
    assert int(found[1]) == max(1, len(os.sched_getaffinity(0)))


def test_torchrun_gives_the_same_bits(script: Path, alone: list[str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node=2", str(script),
    ]  # fmt: skip
    assert run(command, script.parent, OMP_NUM_THREADS="1")[0] == alone[0]


def test_the_environment_of_mpi_gives_the_same_bits(script: Path, alone: list[str]) -> None:
    """Ranks as Open MPI starts them, each with its own variables."""
    from parti.launch.store_server import Server

    with_port = Server("127.0.0.1", 0)
    port = with_port.port
    with_port.close()
    workers = []
    for rank in range(2):
        variables = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        workers.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                cwd=script.parent,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    printed = [worker.communicate(timeout=100)[0].split() for worker in workers]
    assert [words[1:3] for words in printed] == [[alone[0], "2"]] * 2


@ranks(3)
def test_every_rank_holds_the_same_state() -> None:
    strategy = parti.MirroredStrategy(threads=1)
    with strategy.scope():
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.Adam(model.parameters())
    replica = strategy.bind(model, optimizer)
    for batch in replica.batches((torch.randn(40, 5),), batch_size=8, micro_batches=4):
        replica.step(lambda x: model(x).square().mean(), batch)
    assert_ranks_equal(replica, model, optimizer)


def test_large_values_are_gathered_whole() -> None:
    def body() -> bool:
        replica = parti.MirroredStrategy(threads=1).bind(torch.nn.Linear(1, 1))
        mine = torch.full((300_000,), float(replica.rank))
        whole = replica.gather(mine)
        return bool((whole == torch.arange(2.0).repeat_interleave(300_000)).all())

    assert on_processes(2, body)


def test_different_models_are_named_not_hung() -> None:
    def body() -> None:
        import os

        width = 4 + int(os.environ["PARTI_RANK"])
        model = torch.nn.Linear(3, width)
        parti.MirroredStrategy().bind(model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(WorkerFailed, match=r"ranks 0 and 1 train different parameters.*\[4, 3\]"):
        on_processes(2, body)


def test_a_rank_that_stays_away_is_named_with_its_last_report() -> None:
    def body() -> None:
        import time

        replica = parti.MirroredStrategy(patience_s=1.0, recovery=False).bind(torch.nn.Linear(1, 1))
        if replica.rank == 1:
            time.sleep(60)
        replica.barrier()

    with pytest.raises(
        WorkerFailed, match=r"waited 1\.\d s for rank 1; rank 0 arrived\. Last report"
    ):
        on_processes(2, body)


KILLED = """
import os, signal, sys
import torch, parti
strategy = parti.MirroredStrategy(threads=1, recovery="--kill" not in sys.argv)
model = torch.nn.Linear(400, 400)
replica = strategy.bind(model, torch.optim.Adam(model.parameters()))
print("pids", os.getpid(), os.getppid(), flush=True)
for batch in replica.batches((torch.randn(64, 400),), batch_size=8, micro_batches=4, epochs=10**6):
    replica.step(lambda x: model(x).square().mean(), batch)
    if replica.step_number == 20 and replica.rank == 1 and "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_ends_the_job_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, "-m", "parti", "run", "-n", "2", "killed.py", "--kill"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stderr


def test_nothing_is_left_when_everything_is_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    before = set(Path("/dev/shm").iterdir())
    job = subprocess.Popen(
        [sys.executable, "-m", "parti", "run", "-n", "2", "killed.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    words = job.stdout.readline().split()
    worker = int(words[1])
    job.stdout.close()
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "a worker outlived its killed supervisor"
        time.sleep(0.01)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_fingerprints_tell_different_weights_apart() -> None:
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert fingerprint(a) != fingerprint(b)
    b.load_state_dict(a.state_dict())
    assert fingerprint(a) == fingerprint(b)
