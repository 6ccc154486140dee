"""Several hosts on one machine: network namespaces with links between them.

Needs root and Debian's iproute2; elsewhere the same code runs with ranks that are told they are on
different hosts.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..fault.hosts import can_make_hosts
from .test_numbers import SCRIPT, run


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, joined by a veth link."""
    if not can_make_hosts():
        pytest.skip("network namespaces need root and iproute2")
    tag = uuid.uuid4().hex[:6]
    names = [f"parti-{tag}-{i}" for i in range(2)]
    links = [f"pv{tag}{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_hosts_give_the_bits_of_one_process(tmp_path: Path, hosts: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = run([sys.executable, "-m", "parti", "run", "-n", "1", str(script)], tmp_path)
    jobs = []
    for node, (name, count) in enumerate(zip(hosts, (2, 1), strict=True)):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        jobs.append(
            subprocess.Popen(
                [
                    "ip", "netns", "exec", name,
                    sys.executable, "-m", "parti", "run", "-n", str(count), "--nodes", "2",
                    "--node-rank", str(node), "--address", "10.77.0.1:29411", str(script),
                ],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
    outcomes = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outcomes
    words = next(line.split() for line in outcomes[0][0].splitlines() if line.startswith("print"))
    assert words[1:3] == [alone[0], "3"]


HEADER = """
import torch, parti
from parti.comm.world import host_identity
replica = parti.MultiWorkerMirroredStrategy(threads=1).bind(torch.nn.Linear(1, 1))
if replica.is_chief:
    print("facts", replica.facts()["hosts"], replica.facts()["comm"], flush=True)
"""


def test_two_namespaces_are_two_hosts(tmp_path: Path, hosts: list[str]) -> None:
    (tmp_path / "facts.py").write_text(HEADER)
    jobs = [
        subprocess.Popen(
            [
                "ip", "netns", "exec", name,
                sys.executable, "-m", "parti", "run", "-n", "2", "--name", f"n{node}",
                "--nodes", "2", "--node-rank", str(node), "--address", "10.77.0.1:29412",
                "facts.py",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for node, name in enumerate(hosts)
    ]  # fmt: skip
    printed = [job.communicate(timeout=100)[0] for job in jobs]
    assert "facts 2 shared memory + TCP" in printed[0]
