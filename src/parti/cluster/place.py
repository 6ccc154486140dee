"""Where a process stands in a job. Pure values; knows nothing of sockets, processes or torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Origin(Enum):
    """Who told us where we are."""

    PARTI = "parti"
    TORCHRUN = "torchrun"
    SLURM = "Slurm"
    OPEN_MPI = "Open MPI"
    PMI = "PMI"
    TF_CONFIG = "TF_CONFIG"
    KUBERNETES = "Kubernetes"
    LOCAL = "local"


class Level(Enum):
    """What one start of the script stands for."""

    RANK = "rank"
    """The environment started one process for each rank: this process is a rank already."""
    HOST = "host"
    """The environment started the script once for a host: a supervisor here starts the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The outcome of `parti.cluster.resolve()`.

    At `Level.RANK` all of `rank`, `world_size`, `local_rank` and `local_world_size` are set.
    At `Level.HOST` they are None: the launcher decides how many ranks this host runs.
    `rendezvous` is where ranks find each other: `file:///directory` on one host,
    `tcp://host:port` for several; None where there is nobody to meet.
    """

    origin: Origin
    why: str
    level: Level
    node_rank: int = 0
    num_nodes: int = 1
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    rendezvous: str | None = None
    job: str | None = None
    task_type: str | None = None
    task_index: int | None = None
