"""Where a process stands in a job. Pure values; knows nothing of sockets, processes or torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from parti.cluster.spec import ClusterSpec


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
    At `Level.HOST` they are None: the launcher decides how many ranks this host runs, and
    `requested_local_world_size` is the number the environment asks for, where it asks for one.

    `node_rank` and `num_nodes` are what the environment says, or what follows from its local
    sizes where hosts are filled in the order of ranks. They are labels, not proof: which ranks
    share a host's memory is for the ranks to find out.

    `rendezvous` is where ranks (or supervisors) find each other: `file:///directory` on one
    host, `tcp://host:port` in general; None where there is nobody to meet. The process with
    rank 0 (node 0 at `Level.HOST`) listens there, unless `store_is_served`: then a launcher
    serves a torch TCPStore at that address already, and every rank is its client.

    `job` names the job, equal on all its processes and fit for a file name; None where the
    environment gives no name. `cluster` is set where the environment lists the whole cluster.
    `host_directory` and `run_directory` are what Parti's own supervisor tells its workers.
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
    requested_local_world_size: int | None = None
    rendezvous: str | None = None
    store_is_served: bool = False
    job: str | None = None
    task_type: str | None = None
    task_index: int | None = None
    cluster: ClusterSpec | None = None
    host_directory: str | None = None
    run_directory: str | None = None

    @property
    def in_world(self) -> bool:
        """False for a parameter server or an evaluator: they stand beside the workers' world."""
        return self.task_type not in ("ps", "evaluator")
