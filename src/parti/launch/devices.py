"""How many devices this host lends to this process, found without importing torch.

GPUs are counted from the driver's device files, cores from the affinity mask and the cgroup's
quota. Every function that decides takes what it decides on as an argument.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from parti.errors import ConfigError

_NVIDIA_SMI_DEADLINE_S = 5.0


def num_local_devices(environ: Mapping[str, str] | None = None) -> int:
    """One process for each GPU where there are GPUs, else one for each core."""
    return num_gpus(os.environ if environ is None else environ) or num_cores()


def num_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """NVIDIA GPUs that CUDA would show this process."""
    present = len([p for p in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", p.name)])
    if present == 0 and (root / "dev/dxg").exists():  # Windows' Linux has no file for each GPU
        present = _count_with_nvidia_smi()
    return visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), present)


def visible_gpus(setting: str | None, num_present: int) -> int:
    """Count `CUDA_VISIBLE_DEVICES` as CUDA reads it: up to the first entry that is not a device."""
    if setting is None or num_present == 0:
        return num_present
    count = 0
    for entry in (part.strip() for part in setting.split(",")):
        is_index = entry.isdigit() and int(entry) < num_present
        if not (is_index or entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def num_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity mask, and no more than its cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    quota = cpu_quota(root)
    return available if quota is None else max(1, min(available, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this process's cgroup and its ancestors, in cores."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _quotas_v2(root / "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_v1(root / "sys/fs/cgroup" / "cpu", path)
            quotas += _quotas_v1(root / "sys/fs/cgroup" / controllers, path)
    return min(quotas, default=None)


def _quotas_v2(mount: Path, path: str) -> list[float]:
    """`cpu.max` holds "quota period" or "max period"."""
    found: list[float] = []
    for directory in _upwards(mount, path):
        words = _read(directory / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            found.append(int(words[0]) / int(words[1]))
    return found


def _quotas_v1(mount: Path, path: str) -> list[float]:
    """Quota and period are two files, and -1 is "no quota"."""
    found: list[float] = []
    for directory in _upwards(mount, path):
        quota, period = (_read(directory / f"cpu.cfs_{word}_us") for word in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            found.append(int(quota) / int(period))
    return found


def _upwards(mount: Path, path: str) -> list[Path]:
    """The cgroup's directory and its ancestors; in a container only the mount may exist."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _count_with_nvidia_smi() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_DEADLINE_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def checked_count(num_processes: int | None, environ: Mapping[str, str]) -> int:
    """The number of processes a user asked for, or one for each device."""
    if num_processes is None:
        return num_local_devices(environ)
    if num_processes < 1:
        raise ConfigError(
            f"the number of processes is {num_processes}; it has to be 1 or more "
            "(leave it out for one process per device)"
        )
    return num_processes
