"""Two supervisors that act as two hosts: one world, and one end for both."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multiprocess.launch.conftest import Bench, Hub

DEADLINE_S = 60.0


class Pair:
    """Node 0 with one worker, node 1 with two; node 0 takes a free port and says which."""

    def __init__(self, bench: Bench, script: str) -> None:
        self._bench = bench
        self.nodes = [bench.run("-n 1 --nodes 2 --node-rank 0 --address 127.0.0.1:0", script)]
        assert self.nodes[0].stderr is not None
        self.invitation = self.nodes[0].stderr.readline()
        found = re.search(r"--address (127\.0\.0\.1:\d+)", self.invitation)
        assert found is not None
        self.address = found[1]
        self.script = script

    def join(self, options: str = "-n 2 --nodes 2 --node-rank 1") -> subprocess.Popen[str]:
        self.nodes.append(self._bench.run(f"{options} --address {self.address}", self.script))
        return self.nodes[-1]

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each node; both are read, so that none is held up."""
        found: dict[int, tuple[int, str, str]] = {}

        def read(number: int) -> None:
            found[number] = self._bench.finish(self.nodes[number])

        threads = [threading.Thread(target=read, args=(n,)) for n in range(len(self.nodes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        return [found[number] for number in range(len(self.nodes))]


def test_the_world_is_laid_over_the_nodes_in_order(bench: Bench) -> None:
    script = """
        import parti.launch
        from parti.cluster import resolve
        place = resolve()
        store = parti.launch.connect_store(place.rendezvous)
        mine = f"{place.local_rank}/{place.local_world_size}@{place.node_rank} {place.job}"
        store.set(f"rank{place.rank}", mine.encode())
        if rank == 0:
            for other in range(place.world_size):
                print(store.get(f"rank{other}", 30.0).decode())
    """
    pair = Pair(bench, script)
    pair.join()
    (code_0, out_0, err_0), (code_1, out_1, err_1) = pair.finish()
    assert (code_0, code_1) == (0, 0)
    assert (err_0, out_1, err_1) == ("", "", "")
    seats, jobs = zip(*(line.split() for line in out_0.splitlines()), strict=True)
    assert seats == ("0/1@0", "0/2@1", "1/2@1")
    assert len(set(jobs)) == 1
    logs = sorted(path.name for path in (bench.directory / "runs/latest").iterdir())
    assert logs == [
        *("events-node1.jsonl", "events.jsonl", "node1.json"),
        *("rank0.log", "rank1.log", "rank2.log", "run.json"),
    ]
    assert bench.leftovers() == []


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_on_one_host_ends_the_job_on_all(bench: Bench, hub: Hub, failing: int) -> None:
    script = f"""
        import parti.launch
        parti.launch.install()
        wait()
        if rank == {failing}:
            raise ValueError("boom")
        wait()
    """
    pair = Pair(bench, script)
    pair.join()
    hub.gather(3)
    hub.release()
    ends = pair.finish()
    hub.await_end()
    for code, _, err in ends:
        assert code == 1
        assert f"parti: rank {failing} on {socket.gethostname()} failed with exit code 1" in err
        assert err.count("ValueError: boom") == 1
        assert err.count("Traceback") == 1
    assert bench.leftovers() == []


def test_a_kill_on_one_host_gives_its_exit_code_on_all(bench: Bench, hub: Hub) -> None:
    pair = Pair(bench, "wait()")
    pair.join()
    os.kill(hub.gather(3)[1], signal.SIGKILL)
    for code, _, err in pair.finish():
        assert code == 137
        assert "rank 1 on" in err
        assert "killed by SIGKILL" in err
    hub.await_end()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_supervisor_that_vanishes_ends_the_job(bench: Bench, hub: Hub, lost: int) -> None:
    pair = Pair(bench, "wait()")
    pair.join()
    hub.gather(3)
    pair.nodes[lost].kill()
    ends = pair.finish()
    hub.await_end()
    code, _, err = ends[1 - lost]
    assert code == 1
    assert f"the supervisor of node {lost} on {socket.gethostname()} is gone" in err


def test_an_interrupt_on_one_host_ends_the_job_on_all(bench: Bench, hub: Hub) -> None:
    pair = Pair(bench, "wait()")
    pair.join()
    hub.gather(3)
    pair.nodes[1].send_signal(signal.SIGINT)
    for code, _, err in pair.finish():
        assert code == 130
        assert f"ended by SIGINT on {socket.gethostname()}" in err
    hub.await_end()


def test_a_node_that_is_done_waits_for_the_others(bench: Bench, hub: Hub) -> None:
    script = """
        wait() if rank > 0 else print("rank 0 is done")
        sys.exit(5 if rank == 2 else 0)
    """
    pair = Pair(bench, script)
    pair.join()
    hub.gather(2)
    assert pair.nodes[0].stdout is not None
    assert pair.nodes[0].stdout.readline() == "rank 0 is done\n"
    assert pair.nodes[0].poll() is None
    hub.release()
    assert [code for code, _, _ in pair.finish()] == [5, 5]


@pytest.fixture
def waiting_pair(bench: Bench) -> Iterator[Pair]:
    """Node 0 waits; the test's mistakes do not end it."""
    pair = Pair(bench, "wait()")
    yield pair
    assert pair.nodes[0].poll() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-n 1 --nodes 3 --node-rank 1", "told of 3 nodes, node 0 of 2"),
        ("-n 1 --nodes 2 --node-rank 0", "is in use on this machine"),
    ],
)
def test_nodes_that_do_not_fit_are_told(
    bench: Bench, waiting_pair: Pair, options: str, words: str
) -> None:
    code, _, err = bench.finish(waiting_pair.join(options))
    assert code == 2
    assert words in err


def test_an_interrupt_while_waiting_for_others(bench: Bench) -> None:
    pair = Pair(bench, "wait()")
    pair.nodes[0].send_signal(signal.SIGINT)
    code, _, err = bench.finish(pair.nodes[0])
    assert (code, err) == (130, "")
    assert bench.leftovers() == []
