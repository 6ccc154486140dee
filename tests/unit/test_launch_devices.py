"""How many devices there are for this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.launch.devices import checked_count, cpu_quota, num_cores, num_gpus, visible_gpus


@pytest.mark.parametrize(
    ("setting", "present", "expected"),
    [
        (None, 0, 0),
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("NoDevFiles", 4, 0),
        ("0,1", 4, 2),
        ("3, 2 ,0", 4, 3),
        ("0,-1,1", 4, 1),
        ("0,9,1", 4, 1),
        ("GPU-8932f937,GPU-11111111", 4, 2),
        ("MIG-GPU-8932f937/1/2", 4, 1),
        ("0,1", 0, 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_does(
    setting: str | None, present: int, expected: int
) -> None:
    assert visible_gpus(setting, present) == expected


def test_gpus_are_counted_by_the_drivers_files(tmp_path: Path) -> None:
    device_files = tmp_path / "dev"
    device_files.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (device_files / name).touch()
    assert num_gpus({}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_quota_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    assert num_cores(tmp_path) == 1


def test_the_older_cgroups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) == 4.0


def test_without_a_quota_the_affinity_mask_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "1:cpu:/\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) is None
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_a_quota_below_one_core_is_one_core(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "20000 100000\n")
    assert num_cores(tmp_path) == 1


@pytest.mark.parametrize("number", [0, -3])
def test_no_processes_is_an_error(number: int) -> None:
    with pytest.raises(ConfigError, match=f"is {number}; it has to be 1 or more"):
        checked_count(number, {})
