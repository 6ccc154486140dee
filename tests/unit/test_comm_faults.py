"""Scripts of faults, and what those that are no process's own do for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parti.checkpoint.read import list_checkpoints, verify
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer
from parti.comm import deeds
from parti.comm.carrier import Carrier
from parti.comm.faults import POINTS, Coat, Deed, Fault, carry_out_for_real
from parti.comm.protocol import Phase
from parti.comm.solo import Solo
from parti.errors import ConfigError, PeerLost
from parti.testing import FaultScript

MOUNT_BYTES = 1 << 20
EVERYTHING = (
    FaultScript()
    .kill(rank=1, step=3)
    .stop(rank=2, step=4, at="update", nth=2)
    .hang(rank=0, step=5, at="hand_out")
    .delay(0.25, rank=0, step=6, at="evaluate")
    .cut(rank=3, step=7)
    .cut(rank=3, step=8, interface=None)
    .fill("/mnt/a b", rank=0, step=9, at="user")
    .corrupt(Path("checkpoints"), rank=1, step=10, at="recover")
)


def fault(deed: Deed, target: str) -> Fault:
    return Fault(deed=deed, member=0, step=0, phase=Phase.FORWARD, target=target)


# ---- the script


def test_the_text_of_a_script_is_the_script() -> None:
    assert FaultScript.read(str(EVERYTHING)) == EVERYTHING
    assert FaultScript.read("") == FaultScript()
    assert str(FaultScript()) == ""


def test_every_deed_can_be_written() -> None:
    assert {each.deed for each in EVERYTHING} == set(Deed)


def test_what_a_deed_is_done_to() -> None:
    targets = [each.target for each in EVERYTHING]
    assert targets == ["", "", "", "", "eth0", "", "/mnt/a b", "checkpoints"]


@pytest.mark.parametrize("point", ["forwards", "START", "", "start"])
def test_a_point_that_never_comes_is_refused_with_those_that_do(point: str) -> None:
    with pytest.raises(ConfigError, match=f"at='{point}'.*expected data, forward, .*, wait"):
        FaultScript().fill("/tmp", rank=0, step=1, at=point)


@pytest.mark.parametrize("text", ["nonsense", "[{}]", '[{"deed": "melt"}]'])
def test_a_text_that_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PARTI_FAULTS is .* no script of faults"):
        FaultScript.read(text)


def test_what_happens_at_one_point_does_so_in_the_order_of_the_script() -> None:
    done: list[Fault] = []
    script = FaultScript().corrupt("a", rank=0, step=2).fill("b", rank=0, step=2)
    script = script.kill(rank=0, step=2, nth=2).kill(rank=1, step=2).kill(rank=0, step=3)
    coat = Coat(Solo(0, torch.device("cpu")), 0, script.faults, done.append)
    coat.report(Phase.FORWARD, 1)
    coat.report(Phase.BACKWARD, 2)
    assert not done
    coat.report(Phase.FORWARD, 2)
    assert done == list(script)[:2]
    coat.report(Phase.FORWARD, 2)
    assert done == list(script)[:3]


def test_all_points_are_documented() -> None:
    assert FaultScript.__doc__ is not None
    assert all(point in FaultScript.__doc__ for point in POINTS)


# ---- the carrier


class Broken(Solo):
    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        raise PeerLost("gone")


def test_a_carrier_hears_when_waiting_ends_also_with_an_error() -> None:
    heard: list[object] = []
    for inside in (Solo, Broken):
        carrier = Carrier(
            inside(3, torch.device("cpu")),
            told=lambda phase, step: heard.append((phase, step)),
            waits=heard.append,
        )
        assert (carrier.kind, carrier.ranks, carrier.index) == ("none", (3,), 0)
        carrier.report(Phase.REDUCE, 7)
        try:
            assert carrier.exchange(b"x") == (b"x",)
        except PeerLost:
            heard.append("lost")
    once = [(Phase.REDUCE, 7), True, False]
    assert heard == [*once, *once, "lost"]


# ---- a full file system


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def test_fill_leaves_no_room_for_a_byte(mount: Path) -> None:
    (mount / "there").write_bytes(b"x" * 5000)
    carry_out_for_real(fault(Deed.FILL, str(mount)))
    carry_out_for_real(fault(Deed.FILL, str(mount)))  # it is full already
    assert os.statvfs(mount).f_bfree == 0
    with pytest.raises(OSError, match="No space left"):
        (mount / "more").write_bytes(b"x")
    (mount / deeds.FILLER).unlink()
    (mount / "more").write_bytes(b"x" * (MOUNT_BYTES // 2))


def test_fill_leaves_large_file_systems_alone(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deeds, "MOST_FREE_BYTES", MOUNT_BYTES // 2)
    with pytest.raises(ConfigError, match=r"1 MiB free.*nobody's disk"):
        carry_out_for_real(fault(Deed.FILL, str(mount)))
    assert list(mount.iterdir()) == []


def test_fill_does_not_believe_a_file_system_that_does_not_tell(tmp_path: Path) -> None:
    before = os.statvfs("/proc")
    assert before.f_blocks == 0, "this test needs a file system that has no size"
    with pytest.raises(ConfigError, match="nobody's disk"):
        carry_out_for_real(fault(Deed.FILL, "/proc"))


def test_fill_stops_where_more_fits_than_was_free(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deeds, "MOST_FREE_BYTES", MOUNT_BYTES)
    little = os.statvfs(mount)
    subprocess.run(["mount", "-o", f"remount,size={4 * MOUNT_BYTES}", str(mount)], check=True)
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    with pytest.raises(ConfigError, match="more fits"):
        carry_out_for_real(fault(Deed.FILL, str(mount)))
    assert (mount / deeds.FILLER).stat().st_size == MOUNT_BYTES


def test_fill_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be filled: No such file"):
        carry_out_for_real(fault(Deed.FILL, str(tmp_path / "nowhere")))


# ---- a damaged checkpoint


def test_corrupt_damages_the_newest_checkpoint_and_no_other(tmp_path: Path) -> None:
    settings = Checkpoint(tmp_path, every=1, on_error="raise")
    writer = Writer(settings, token="job", note=print)
    for step in (5, 9, 7):  # written last is newest, whatever its step
        tree = {"w": torch.arange(1000), "b": torch.ones(10)}
        writer.begin(tree, step=step, facts={}, part=0, num_parts=1, deadline_s=20)
        assert writer.wait(20) is None
    writer.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    carry_out_for_real(fault(Deed.CORRUPT, str(tmp_path)))
    newest, *others = list_checkpoints(tmp_path)
    (problem,) = verify(newest.path)
    assert newest.step == 7 and "SHA-256" in problem
    assert [verify(each.path) for each in others] == [(), ()]
    ((path, then, now),) = [
        (path, old, path.read_bytes()) for path, old in before.items() if path.read_bytes() != old
    ]
    assert [i for i in range(len(then)) if then[i] != now[i]] == [len(then) // 2]
    assert len(then) == len(now) == max(each.stat().st_size for each in path.parent.iterdir())


def test_corrupt_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no checkpoint in .*Choose a later"):
        carry_out_for_real(fault(Deed.CORRUPT, str(tmp_path)))


# ---- a cut link

IN_A_NAMESPACE = """
set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth0 up
ip link set eth1 up
"$PYTHON" -c '
import sys
from parti.comm import deeds
deeds.cut(sys.argv[1])
' "$1"
ip -o link show up
"""


@pytest.mark.parametrize(("interface", "left"), [("eth0", {"lo", "eth1"}), ("", {"lo"})])
def test_cut_sets_links_of_the_own_namespace_down(interface: str, left: set[str]) -> None:
    if (
        shutil.which("ip") is None
        or subprocess.run(["unshare", "-n", "true"], check=False).returncode
    ):
        pytest.skip("making network namespaces is not allowed here")
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", IN_A_NAMESPACE, "sh", interface],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {line.split(": ")[1].partition("@")[0] for line in done.stdout.splitlines()} == left


def test_cut_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho RTNETLINK answers: Operation not permitted >&2\nexit 2\n")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match=r"eth7 down` failed \(RTNETLINK.*CAP_NET_ADMIN"):
        carry_out_for_real(fault(Deed.CUT, "eth7"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="install iproute2"):
        carry_out_for_real(fault(Deed.CUT, "eth7"))


def test_cut_does_not_cut_the_machine_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*command: object, **settings: object) -> None:
        raise AssertionError(command)

    # Nobody who has started this test has given it a namespace of its own.
    monkeypatch.setattr(os, "readlink", lambda path: "net:[1]")
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(ConfigError, match="whatever started the test"):
        carry_out_for_real(fault(Deed.CUT, ""))


def test_who_cannot_see_who_started_it_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_mine(path: str) -> str:
        if "self" in path:
            return "net:[1]"
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", only_mine)
    assert deeds._is_the_machines()
