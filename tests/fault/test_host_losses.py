"""Hosts of a real training come, are lost, cut off, mended and sent away; the bits stay the same.

Hosts are network namespaces (`hosts.py`). A training rests after each step until a test has seen
what it waits for, and then hurries to its end, which is the same for all of them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from parti.doctor.check import check
from parti.doctor.run import read_run
from parti.launch.elastic_hosts import TTL_S
from parti.testing import FaultScript
from tests.etcd_server import NoEtcd, find_etcd, serve_etcd

from . import chaos, host_chaos
from .fleet import DEADLINE_S, EPOCHS, Fleet
from .hosts import can_make_hosts, hosts, until

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2"),
    pytest.mark.timeout(300),
]
Undisturbed = Callable[..., str]
Make = Callable[..., Fleet]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def start(count: int, *, etcd: bool = False, **settings: object) -> Fleet:
            try:
                program = find_etcd() if etcd else None
            except NoEtcd as error:
                pytest.skip(str(error))
            made = stack.enter_context(hosts(count + etcd, tmp_path))
            store = ""
            if program is not None:
                last = made[-1]
                server = stack.enter_context(
                    serve_etcd(program, tmp_path, host=last.address, within=last.command())
                )
                store = f"etcd://{last.address}:{server.port}/job"
            return Fleet(made, tmp_path, store=store, **settings)  # type: ignore[arg-type]

        yield start


def test_a_host_comes_and_one_of_two_workers_is_lost(make: Make, undisturbed: Undisturbed) -> None:
    """Three hosts train when the second, with two workers, is gone at once."""
    fleet = make(3)
    fleet.begin(0)
    fleet.join(1, processes=2)
    fleet.await_world(0, {0, 1, 2})
    fleet.join(2)
    fleet.await_world(0, {0, 1, 2, 3})
    fleet.hosts[1].lose()
    fleet.await_world(0, {0, 3})
    assert fleet.finish(0, 2) == undisturbed(EPOCHS)
    assert set(fleet.found) == {0, 3}
    assert "host 1 (" in fleet.hosts[0].said and "is gone; 2 hosts are left" in fleet.hosts[0].said


POINTS = [
    ("forward", "reduce", "optimizer"),
    ("update", "hand_out", "backward"),
    ("user", "evaluate", "recover"),
]


@pytest.mark.parametrize("points", POINTS, ids="-".join)
def test_a_worker_is_killed_on_each_host_in_turn(
    make: Make, undisturbed: Undisturbed, points: tuple[str, str, str]
) -> None:
    """The first host has one worker, the others have two. Rank 0 is the first."""
    script = FaultScript()
    for (member, step), point in zip(((0, 40), (1, 50), (4, 50)), points, strict=True):
        # Nothing is run without gradients but at the end of an epoch; recovery follows a loss.
        step = {"evaluate": 60, "recover": 60}.get(point, step)
        script = script.kill(rank=member, step=step, at=point)
    fleet = make(3, faults=script, nodes="3:3", rest_s=0.0)
    fleet.begin(0)
    fleet.join(1, processes=2)
    fleet.join(2, processes=2)
    assert fleet.finish(0, 1, 2) == undisturbed(EPOCHS)
    said = "".join(host.said for host in fleet.hosts)
    assert len(re.findall(r"\(process \d+\) was killed by SIGKILL", said)) == 3, said
    assert check(read_run(fleet.gathered())) == []


def test_a_host_that_is_cut_off_comes_back(make: Make, undisturbed: Undisturbed) -> None:
    """Silence, and no reset: found by the lease. The workers of that host are needed no more."""
    fleet = make(3)
    fleet.begin(0)
    fleet.join(1)
    fleet.join(2)
    fleet.await_world(0, {0, 1, 2})
    old = fleet.hosts[1].processes()
    fleet.hosts[1].cut()
    fleet.await_world(0, {0, 2}, within_s=TTL_S + 3.0)
    fleet.await_steps(0)
    fleet.await_words(1, "waits for the store")
    fleet.hosts[1].mend()
    fleet.await_world(0, {0, 2, 3})
    supervisor = fleet.hosts[1].process
    assert supervisor is not None
    assert set(old) & set(fleet.hosts[1].processes()) <= {supervisor.pid}
    assert fleet.finish(0, 1, 2) == undisturbed(EPOCHS)
    assert set(fleet.found) == {0, 2, 3}
    assert "it joins them anew" in fleet.hosts[1].said


def test_too_few_hosts_stand_still_until_one_comes(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(3, nodes="2:3")
    fleet.begin(0)
    fleet.join(1)
    fleet.await_world(0, {0, 1})
    fleet.await_steps(0)
    fleet.hosts[1].lose()
    fleet.await_world(0, {0})
    stood_at = fleet.last_step(0)
    paused = fleet.generation(0)
    fleet.join(2)
    fleet.await_world(0, {0, 2})
    assert fleet.finish(0, 2) == undisturbed(EPOCHS)
    steps = fleet.commits(0)
    # The step under way is brought to its end.
    assert list(steps.values()).count(paused) <= 1
    assert steps[stood_at] <= paused
    assert all(steps[step] > paused for step in steps if step > stood_at + 1)
    assert "training stands still: 1 host has the state, expected at least 2" in fleet.hosts[0].said
    assert "training goes on" in fleet.hosts[0].said


def test_a_host_leaves_when_it_is_asked_to(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(2)
    fleet.begin(0)
    fleet.join(1, processes=2)
    fleet.await_world(0, {0, 1, 2})
    fleet.hosts[1].signal(signal.SIGUSR2)
    fleet.await_world(0, {0})
    assert fleet.hosts[1].wait(DEADLINE_S) == 0, fleet.hosts[1].said
    assert "this host has left; the others go on" in fleet.hosts[1].said
    fleet.hosts[0].signal(signal.SIGUSR2)
    assert fleet.finish(0) == undisturbed(EPOCHS)
    assert "this host cannot leave: it serves the store" in fleet.hosts[0].said
    assert set(fleet.found) == {0}


def test_with_etcd_the_first_host_can_be_lost(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(3, etcd=True)
    for index in range(3):
        fleet.begin(index)
        fleet.await_world(index, set(range(index + 1)))
    fleet.hosts[0].lose()
    fleet.await_world(1, {1, 2})
    assert fleet.finish(1, 2) == undisturbed(EPOCHS)
    assert set(fleet.found) == {1, 2}


def test_etcd_is_out_of_reach_for_a_while(make: Make, undisturbed: Undisturbed) -> None:
    """Of all hosts: training goes on, and what happened meanwhile is told when it is back."""
    fleet = make(2, etcd=True)
    for index in range(2):
        fleet.begin(index, processes=2)
    fleet.await_world(0, {0, 1, 2, 3})
    store = fleet.hosts[-1]
    store.cut()
    for index in range(2):
        fleet.await_words(index, "waits for the store")
    fleet.await_steps(0)
    os.kill(fleet.workers(1)[3], signal.SIGKILL)
    store.mend()
    fleet.await_world(0, {0, 1, 2, 4})
    assert fleet.finish(0, 1) == undisturbed(EPOCHS)


def test_without_the_store_of_a_lost_host_the_others_end(make: Make) -> None:
    fleet = make(2, PARTI_STORE_PATIENCE="2")
    fleet.begin(0)
    fleet.join(1)
    fleet.await_world(1, {0, 1})
    fleet.hosts[0].lose()
    assert fleet.hosts[1].wait(DEADLINE_S) == 1
    said = fleet.hosts[1].said
    assert "waits for the store" in said
    assert re.search(r"the store could not be reached for 2 s .*10\.78\.0\.1:", said), said


def test_two_hosts_are_lost_within_a_moment(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(4)
    fleet.begin(0)
    for index in (1, 2, 3):
        fleet.join(index)
    fleet.await_world(0, {0, 1, 2, 3})
    fleet.hosts[1].cut()
    fleet.hosts[3].lose()
    fleet.await_world(0, {0, 2})
    assert fleet.finish(0, 2) == undisturbed(EPOCHS)


def test_a_host_without_its_supervisor_is_lost(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(2)
    fleet.begin(0)
    fleet.join(1, processes=2)
    fleet.await_world(0, {0, 1, 2})
    fleet.hosts[1].signal(signal.SIGKILL)
    until(lambda: not fleet.hosts[1].processes(), DEADLINE_S, lambda: "its workers live on")
    fleet.await_world(0, {0})
    assert fleet.finish(0) == undisturbed(EPOCHS)


def test_two_hosts_that_cannot_reach_each_other(make: Make, undisturbed: Undisturbed) -> None:
    """Both reach the store, so nobody is lost: the one that came later is given up."""
    fleet = make(2, etcd=True, patience_s=3.0)
    for index in range(2):
        fleet.begin(index)
        fleet.await_world(index, set(range(index + 1)))
    fleet.hosts[1].block(fleet.hosts[0])
    fleet.await_world(0, {0})
    assert "hosts 0 and 1 cannot reach each other" in "".join(h.said for h in fleet.hosts)
    fleet.hosts[1].unblock(fleet.hosts[0])
    assert fleet.finish(0) == undisturbed(EPOCHS)


def test_a_frozen_worker_is_found_on_its_host(make: Make, undisturbed: Undisturbed) -> None:
    script = FaultScript().stop(rank=2, step=50, at="backward")
    fleet = make(2, faults=script, nodes="2:2", rest_s=0.02, patience_s=3.0)
    fleet.begin(0)
    fleet.join(1, processes=2)
    fleet.await_world(0, {0, 1, 3})
    assert fleet.finish(0, 1) == undisturbed(EPOCHS)
    assert "was stopped (SIGSTOP)" in fleet.hosts[1].said
    assert set(fleet.found) == {0, 1, 3}


def test_a_request_to_one_host_stops_all(make: Make, tmp_path: Path) -> None:
    fleet = make(2, CHECKPOINTS=str(tmp_path / "checkpoints"))
    fleet.begin(0)
    fleet.join(1)
    fleet.await_world(1, {0, 1})
    fleet.await_steps(1)
    fleet.hosts[1].signal(signal.SIGTERM)
    said = ""
    for host in fleet.hosts:
        assert host.wait(DEADLINE_S) == 75, host.said
        said = host.said
        assert re.search(r"stopped after \d+ steps; the state is in", said), said
        assert "Traceback" not in said
    steps = {re.search(r"stopped after (\d+)", host.said)[1] for host in fleet.hosts}  # type: ignore[index]
    assert len(steps) == 1
    assert not fleet.found


def test_an_error_of_the_script_ends_all(make: Make, tmp_path: Path) -> None:
    fleet = make(2, BREAK_AT="40", rest_s=0.0, nodes="2:2")
    fleet.begin(0)
    fleet.join(1)
    for host in fleet.hosts:
        assert host.wait(DEADLINE_S) == 1, host.said
        assert "KeyError: 'typo'" in host.said
        assert "failed with exit code 1" in host.said


def test_a_host_that_cannot_start_harms_nobody(make: Make, undisturbed: Undisturbed) -> None:
    fleet = make(2)
    fleet.begin(0)
    fleet.await_world(0, {0})
    fleet.join(1, CANNOT_START="1")
    assert fleet.hosts[1].wait(DEADLINE_S) == 1
    assert "no process of this host could take part" in fleet.hosts[1].said
    assert fleet.finish(0) == undisturbed(EPOCHS)


def test_faults_at_random_leave_no_trace(tmp_path: Path) -> None:
    found = host_chaos.run(num_hosts=3, faults=4, seed=3, directory=tmp_path)
    assert found == {chaos.undisturbed(sorted(found)[0], tmp_path / "alone")}


def test_their_records_are_one_history(make: Make, undisturbed: Undisturbed) -> None:
    """Of hosts that share a directory: a host is lost, another comes, one worker is killed."""
    fleet = make(3, shares_runs=True)
    fleet.begin(0)
    fleet.join(1)
    fleet.await_world(0, {0, 1})
    fleet.hosts[1].lose()
    fleet.await_world(0, {0})
    fleet.join(2, processes=2)
    fleet.await_world(0, {0, 2, 3})
    os.kill(fleet.workers(2)[3], signal.SIGKILL)
    fleet.await_world(0, {0, 2, 4})
    assert fleet.finish(0, 2) == undisturbed(EPOCHS)
    assert check(read_run(fleet.gathered())) == []
