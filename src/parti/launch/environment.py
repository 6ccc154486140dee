"""What a worker finds in its environment. Pure: environments come in and go out as mappings.

Three things are set: the worker's place in the job (the PARTI_* variables, read back by
`parti.cluster.resolve`), the tuning that only works before a process starts (threads, glibc's
allocator), and output that is neither buffered nor silent on a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parti.errors import ConfigError

GRACE_S = 60.0
"""How long a process that was asked to stop may take to save its state, if nobody says."""
STORE_PATIENCE_S = 600.0
"""How long a host waits for a store that cannot be reached, if nobody says."""

ALLOCATOR_SETTINGS: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Keeps large blocks in the process instead of handing them back to the kernel at every step:
fewer page faults, for a few hundred MB of memory in a process that trains."""

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTuning:
    """Which settings a worker gets that nobody asked for. Each one can be turned off."""

    allocator: bool = True
    """Keep freed memory (`ALLOCATOR_SETTINGS`)."""
    threads: bool = True
    """Divide the cores among the processes of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One worker's numbers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the workers of a job find each other and their files."""

    job: str
    rendezvous: str
    host_directory: str
    """Scratch shared by the workers of one host and their supervisor; gone when the job is."""
    run_directory: str
    is_elastic: bool = False
    """Hosts come and go."""


def grace_s(environ: Mapping[str, str]) -> float:
    """PARTI_GRACE: how long an orderly stop may take, in seconds."""
    written = environ.get("PARTI_GRACE", "").strip()
    try:
        return checked_grace_s(float(written) if written else GRACE_S)
    except ValueError:
        raise ConfigError(
            f"PARTI_GRACE is {written!r}; it has to be a number of seconds, 0 or more"
        ) from None


def store_patience_s(environ: Mapping[str, str]) -> float:
    """PARTI_STORE_PATIENCE: how long a host waits for a store that cannot be reached."""
    written = environ.get("PARTI_STORE_PATIENCE", "").strip()
    try:
        patience_s = float(written) if written else STORE_PATIENCE_S
    except ValueError:
        patience_s = -1.0
    if not patience_s >= 0:  # NaN, too
        raise ConfigError(
            f"PARTI_STORE_PATIENCE is {written!r}; it has to be a number of seconds, 0 or more"
        )
    return patience_s


def checked_grace_s(grace_s: float) -> float:
    if not grace_s >= 0:  # NaN, too
        raise ConfigError(f"--grace is {grace_s:g}; it has to be 0 or more seconds")
    return grace_s


def worker_environment(
    environ: Mapping[str, str],
    *,
    seat: Seat,
    meeting: Meeting,
    cores: int,
    tuning: ProcessTuning,
    threads: int | None = None,
) -> dict[str, str]:
    """The environment of one worker. What the user has set is never overridden by tuning;
    `threads`, which the user gave on the command line or to the strategy, goes before all."""
    result = dict(environ)
    if tuning.allocator and "glibc.malloc." not in environ.get("GLIBC_TUNABLES", ""):
        result = {**ALLOCATOR_SETTINGS, **result}
    result |= _thread_settings(environ, seat.local_world_size, cores, tuning, threads)
    result.setdefault("PYTHONFAULTHANDLER", "1")
    result["PYTHONUNBUFFERED"] = "1"
    result |= {
        "PARTI_JOB": meeting.job,
        "PARTI_RANK": str(seat.rank),
        "PARTI_WORLD_SIZE": str(seat.world_size),
        "PARTI_LOCAL_RANK": str(seat.local_rank),
        "PARTI_LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "PARTI_NODE_RANK": str(seat.node_rank),
        "PARTI_NUM_NODES": str(seat.num_nodes),
        "PARTI_RENDEZVOUS": meeting.rendezvous,
        "PARTI_HOST_DIR": meeting.host_directory,
        "PARTI_RUN_DIR": meeting.run_directory,
        **({"PARTI_ELASTIC": "1"} if meeting.is_elastic else {}),
    }
    return result


def _thread_settings(
    environ: Mapping[str, str],
    local_world_size: int,
    cores: int,
    tuning: ProcessTuning,
    threads: int | None,
) -> dict[str, str]:
    if threads is not None:
        return dict.fromkeys(THREAD_SETTINGS, str(threads))
    if not tuning.threads:
        return {}
    # MKL follows OMP_NUM_THREADS where a user set only that: it must not be given another number.
    chosen = environ.get("OMP_NUM_THREADS", str(max(1, cores // local_world_size)))
    return {name: environ.get(name, chosen) for name in THREAD_SETTINGS}
