"""Parti inside a real Slurm with two nodes, which run.sh provides: what `parti.cluster.resolve()`
says in every kind of step, and that a training has the same bits in each.

    check.py DIRECTORY [--record TO]

DIRECTORY is scratch that all nodes see. `--record` keeps the environments that Slurm made, for
tests/unit/environments.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parti.cluster import expand_hostlist

TASK = Path(__file__).with_name("task.py")
TIMEOUT_S = 60.0
TRAINING = """
import torch, parti
from torch import nn
from torch.nn import functional as F
from parti.testing import fingerprint

strategy = parti.MultiWorkerMirroredStrategy(threads=1)
with strategy.scope():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
replica = strategy.bind(model, optimizer)
images, labels = parti.datasets.digits().train
for batch in replica.batches((images[:200], labels[:200]), batch_size=48, micro_batches=4):
    report = replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
facts = replica.facts()
if replica.is_chief:
    print("trained", facts["processes"], facts["hosts"], fingerprint(model, optimizer), report.loss)
"""
# What this script itself was started with must not reach the jobs.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name in ("PATH", "HOME", "LANG", "PYTHONPATH", "SLURM_CONF")
}

HOST_LISTS = (
    "parti-a[1-2]",
    "rack[1-2]node[01-03,7]",
    "n[08-11]",
    "n[8-11],login",
    "n[99-101]",
    "n[099-101]",
    "a[3,1-2]",
    "n[1,1]",
    "n[1-2][3-4]",
    "a,b,c[1-2],d",
    "n[1-3,07]",
    "n[007]",
    "n[1-02]",
    "[1-3]",
    "a,,b",
    "n[1-2], m",
)


class Cluster:
    """Runs commands under Slurm and reads back what their tasks wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = 0

    def tasks(self, *command: str, meet: bool = False, **extra: str) -> list[dict[str, Any]]:
        """Run `command`, in which TASK stands for the task; the reports in the order of ranks."""
        self.runs += 1
        reports = self.directory / str(self.runs)
        reports.mkdir()
        task = [sys.executable, str(TASK), str(reports), *(["--meet"] if meet else [])]
        words = [word for part in command for word in (task if part == "TASK" else [part])]
        joined = shlex.join(task)
        words = [word.replace("{TASK}", joined) for word in words]
        done = subprocess.run(
            words,
            env=CLEAN | extra,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
        found = [json.loads(file.read_text()) for file in reports.glob("*.json")]
        return sorted(found, key=lambda report: (int(report["procid"]), report["pid"]))

    def training(self, *command: str) -> tuple[int, int, str]:
        """Train under `command`: the processes, the hosts, and the bits that came out."""
        self.runs += 1
        script = self.directory / "train.py"
        script.write_text(TRAINING)
        done = subprocess.run(
            [*command, str(script)],
            env=CLEAN,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = [line.split(maxsplit=3) for line in done.stdout.splitlines() if "trained" in line]
        if done.returncode or len(found) != 1:
            raise AssertionError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        _, processes, hosts, bits = found[0]
        return int(processes), int(hosts), bits

    def script(self, *lines: str) -> str:
        """A batch script of `lines`."""
        file = self.directory / f"script{self.runs}.sh"
        file.write_text("\n".join(("#!/bin/bash", "set -e", *lines)) + "\n")
        return str(file)

    def sbatch(self, *options: str, lines: tuple[str, ...]) -> list[dict[str, Any]]:
        """The reports of a batch job with these lines, in which {TASK} stands for the task."""
        reports = self.directory / str(self.runs + 1)
        joined = shlex.join([sys.executable, str(TASK), str(reports)])
        script = self.script(*(line.replace("{TASK}", joined) for line in lines))
        return self.tasks("sbatch", "--wait", "--output=batch.out", *options, script)


def expect(reports: list[dict[str, Any]], count: int, **fields: object) -> None:
    """There are `count` reports, and their places have these fields; a list is one for each."""
    assert len(reports) == count, reports
    for index, report in enumerate(reports):
        for name, value in fields.items():
            wanted = value[index] if isinstance(value, list) else value
            assert report[name] == wanted, f"{name}: {report[name]!r}, not {wanted!r}: {report}"


def two_ranks_on_one_node(cluster: Cluster) -> list[dict[str, Any]]:
    """srun -N1 -n2: ranks, which meet over the loopback."""
    reports = cluster.tasks("srun", "-N1", "-n2", "TASK", meet=True)
    expect(reports, 2, level="rank", rank=[0, 1], world_size=2, local_rank=[0, 1])
    expect(reports, 2, local_world_size=2, num_nodes=1, origin="Slurm", met=[2, 2])
    return reports


def one_task(cluster: Cluster) -> list[dict[str, Any]]:
    """srun -N1 -n1: the start stands for its host."""
    reports = cluster.tasks("srun", "-N1", "-n1", "TASK")
    expect(reports, 1, level="host", num_nodes=1, rank=None, rendezvous=None)
    return reports


def a_start_on_each_node(cluster: Cluster) -> list[dict[str, Any]]:
    """srun -N2 -n2: two hosts, which meet at the first one's name."""
    reports = cluster.tasks("srun", "-N2", "-n2", "TASK", meet=True)
    expect(reports, 2, level="host", node_rank=[0, 1], num_nodes=2, met=[2, 2])
    expect(reports, 2, hostname=["parti-a1", "parti-a2"])
    assert reports[0]["rendezvous"].startswith("tcp://parti-a1:"), reports
    return reports


def ranks_on_uneven_nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """srun -N2 -n3: ranks, two on one node and one on the other."""
    reports = cluster.tasks("srun", "-N2", "-n3", "TASK", meet=True)
    expect(reports, 3, level="rank", rank=[0, 1, 2], node_rank=[0, 0, 1], num_nodes=2)
    expect(reports, 3, local_rank=[0, 1, 0], local_world_size=[2, 2, 1], met=[3, 3, 3])
    return reports


def ranks_dealt_in_turn(cluster: Cluster) -> list[dict[str, Any]]:
    """srun --distribution=cyclic: neighbours in rank are on different nodes."""
    reports = cluster.tasks("srun", "-N2", "-n4", "--distribution=cyclic", "TASK", meet=True)
    expect(reports, 4, level="rank", rank=[0, 1, 2, 3], node_rank=[0, 1, 0, 1])
    expect(reports, 4, local_rank=[0, 0, 1, 1], local_world_size=2, met=[4] * 4)
    return reports


def ranks_with_pmi(cluster: Cluster) -> list[dict[str, Any]]:
    """srun --mpi=pmi2 sets PMI_RANK too; Slurm's own variables say more."""
    reports = cluster.tasks("srun", "--mpi=pmi2", "-N2", "-n4", "TASK")
    expect(reports, 4, level="rank", origin="Slurm", rank=[0, 1, 2, 3])
    assert "PMI (PMI_RANK)" in reports[0]["why"], reports
    return reports


def a_batch_script(cluster: Cluster) -> list[dict[str, Any]]:
    """sbatch without srun, on one node: the host."""
    reports = cluster.sbatch("-N1", "-n2", lines=("{TASK}",))
    expect(reports, 1, level="host", num_nodes=1, rendezvous=None, origin="Slurm")
    return reports


def a_batch_script_with_srun(cluster: Cluster) -> list[dict[str, Any]]:
    """srun within sbatch: the step decides, not the allocation."""
    reports = cluster.sbatch("-N2", "--ntasks-per-node=2", lines=("srun {TASK}",))
    expect(reports, 4, level="rank", rank=[0, 1, 2, 3], node_rank=[0, 0, 1, 1])
    return reports


def a_smaller_step(cluster: Cluster) -> list[dict[str, Any]]:
    """A step on one node of a larger allocation is a job of one node."""
    reports = cluster.sbatch("-N2", "--ntasks-per-node=2", lines=("srun -N1 -n1 {TASK}",))
    expect(reports, 1, level="host", num_nodes=1)
    return reports


def a_batch_script_on_two_nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Without srun only one of two nodes would work: an error that says so."""
    reports = cluster.sbatch("-N2", "-n2", lines=("{TASK}",))
    expect(reports, 1, level=None)
    assert "SLURM_JOB_NUM_NODES" in reports[0]["error"], reports
    assert "srun" in reports[0]["error"], reports
    return reports


def a_batch_script_from_within_a_step(cluster: Cluster) -> list[dict[str, Any]]:
    """sbatch hands the variables of the step it was called in to the new job: they are stale."""
    reports = cluster.directory / str(cluster.runs + 1)
    script = cluster.script(shlex.join([sys.executable, str(TASK), str(reports)]))
    submit = f"sbatch --wait --output=batch.out -N2 -n2 {shlex.quote(script)}"
    found = cluster.tasks("srun", "-N1", "-n1", "bash", "-c", submit)
    expect(found, 1, level=None)
    assert "srun" in found[0]["error"], found
    return found


def an_allocation_of_one_node(cluster: Cluster) -> list[dict[str, Any]]:
    """salloc gives a shell where it was called: the host."""
    reports = cluster.tasks("salloc", "-N1", "-n1", "TASK")
    expect(reports, 1, level="host", num_nodes=1, origin="Slurm")
    return reports


CHECKS: tuple[Callable[[Cluster], list[dict[str, Any]]], ...] = (
    two_ranks_on_one_node,
    one_task,
    a_start_on_each_node,
    ranks_on_uneven_nodes,
    ranks_dealt_in_turn,
    ranks_with_pmi,
    a_batch_script,
    a_batch_script_with_srun,
    a_smaller_step,
    a_batch_script_on_two_nodes,
    a_batch_script_from_within_a_step,
    an_allocation_of_one_node,
)


def host_lists() -> None:
    """Slurm's own reading of host lists is ours."""
    for text in HOST_LISTS:
        asked = ["scontrol", "show", "hostnames", text]
        theirs = subprocess.run(asked, env=CLEAN, capture_output=True, text=True, check=True)
        assert expand_hostlist(text) == tuple(theirs.stdout.split()), (text, theirs.stdout)


def trainings(cluster: Cluster) -> None:
    """Hosts and ranks under srun train to the bits of one process."""
    run = (sys.executable, "-m", "parti", "run")
    alone = cluster.training(*run, "-n", "1")
    assert alone[:2] == (1, 1), alone
    ways = {
        "a supervisor on each node": (("srun", "-N2", "-n2", *run, "-n", "2"), (4, 2)),
        "python on each node": (("srun", "-N2", "-n2", sys.executable), None),
        "a rank for each task": (("srun", "-N2", "-n3", sys.executable), (3, 2)),
        "ranks on one node": (("srun", "-N1", "-n2", sys.executable), (2, 1)),
    }
    for name, (command, world) in ways.items():
        found = cluster.training(*command)
        assert world is None or found[:2] == world, found
        assert found[2] == alone[2], f"{name}: {found}, not {alone}"
        print(f"slurm: {name}: processes {found[0]}, hosts {found[1]}, the bits of one")


def record(directory: Path, name: str, reports: list[dict[str, Any]]) -> None:
    """Keep the environment of the last task, without what belongs to this machine."""
    scratch = ("SLURM_CONF", "SLURM_SUBMIT_DIR", "SLURM_WORKING_CLUSTER", "SLURM_SUBMIT_HOST")
    environ = reports[-1]["environ"]
    lines = [f"{key}={environ[key]}" for key in sorted(environ) if key not in scratch]
    (directory / f"slurm-{name.replace('_', '-')}.env").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run all checks; the first that fails ends the run with its assertion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    host_lists()
    print(f"slurm: {len(HOST_LISTS)} host lists read as by scontrol")
    cluster = Cluster(arguments.directory)
    for check in CHECKS:
        reports = check(cluster)
        print(f"slurm: {check.__name__.replace('_', ' ')}: {(check.__doc__ or '').strip()}")
        if arguments.record:
            record(arguments.record, check.__name__, reports)
    trainings(cluster)


if __name__ == "__main__":
    main()
