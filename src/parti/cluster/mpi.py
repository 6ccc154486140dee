"""MPI launchers: Open MPI's mpirun, and those that speak PMI (MPICH's and Intel's Hydra, Cray's).

They start one process for each rank (`Level.RANK`) and tell sizes, but not where rank 0 is:
across hosts the address comes from PARTI_RENDEZVOUS or MASTER_ADDR, from the address of mpirun
itself where Open MPI tells it, or from Slurm's host list, whose first host gets rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parti.cluster import rendezvous, slurm
from parti.cluster.place import Level, Origin, Place
from parti.cluster.variables import Variables, found, text_of
from parti.errors import ConfigError

_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Hydra's names first, then those of Cray's PALS.
_PMI_LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_PMI_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_PMI_JOB = ("PMI_JOBID", "PALS_APID")
# Where Open MPI 4 says that mpirun listens, and the daemon that started this process.
_MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
_DAEMON_URI = "OMPI_MCA_orte_local_daemon_uri"
_URI_HOST = re.compile(r"tcp6?://(?:\[([^\]]+)\]|([^,:\[\]]+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def open_mpi_signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that mpirun of Open MPI started this process."""
    return found(environ, *_OPEN_MPI)


def from_open_mpi(environ: Mapping[str, str]) -> Place | None:
    """The place of a process that Open MPI's mpirun started."""
    shown = open_mpi_signs(environ)
    if not shown:
        return None
    variables = Variables(
        environ=environ,
        sign=shown[0],
        remedy="Start the script with mpirun, or unset the OMPI_COMM_WORLD_* variables to run "
        "without it.",
    )
    seat = _seat(variables, *((name,) for name in _OPEN_MPI))
    job = _open_mpi_job(variables)
    node_rank, num_nodes = _node(seat, variables.integer("OMPI_MCA_orte_num_nodes", minimum=1))
    return Place(
        origin=Origin.OPEN_MPI,
        why=f"mpirun started this process as OMPI_COMM_WORLD_RANK={seat.rank} of "
        f"{seat.world_size}.",
        level=Level.RANK,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rank=seat.rank,
        world_size=seat.world_size,
        local_rank=seat.local_rank,
        local_world_size=seat.local_world_size,
        rendezvous=_meeting_place(
            variables, seat, job, sizes=(_OPEN_MPI[1], _OPEN_MPI[3]), way="mpirun -x MASTER_ADDR"
        ),
        job=job,
    )


def pmi_signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that a launcher speaking PMI started this process."""
    return found(environ, "PMI_RANK", "PMI_SIZE")


def from_pmi(environ: Mapping[str, str]) -> Place | None:
    """The place of a process that mpiexec of MPICH or Intel MPI started, or another PMI launcher.

    None where the launcher is srun itself: Slurm's own variables say more then.
    """
    shown = pmi_signs(environ)
    if not shown or _is_srun(environ):
        return None
    variables = Variables(
        environ=environ,
        sign=shown[0],
        remedy="Start the script with mpiexec, or unset PMI_RANK and PMI_SIZE to run without it.",
    )
    seat = _seat(variables, ("PMI_RANK",), ("PMI_SIZE",), _PMI_LOCAL_RANK, _PMI_LOCAL_SIZE)
    # Hydra names its jobs nowhere: two at a time on one host need a MASTER_PORT each.
    name = variables.text(*_PMI_JOB, "MASTER_PORT", "SLURM_JOB_ID")
    job = rendezvous.job_name("pmi", *([] if name is None else [name]))
    node_rank, num_nodes = _node(seat, None)
    return Place(
        origin=Origin.PMI,
        why=f"an MPI launcher started this process as PMI_RANK={seat.rank} of {seat.world_size}.",
        level=Level.RANK,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rank=seat.rank,
        world_size=seat.world_size,
        local_rank=seat.local_rank,
        local_world_size=seat.local_world_size,
        rendezvous=_meeting_place(
            variables, seat, job, sizes=("PMI_SIZE", _PMI_LOCAL_SIZE[0]), way="mpiexec -genv"
        ),
        job=job,
    )


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether PMI_RANK and PMI_SIZE are those of the Slurm step itself (srun --mpi=pmi2).

    Hydra starts its own daemons with srun in an allocation, so that a step alone proves nothing.
    """
    return (
        slurm.in_step(environ)
        and text_of(environ, "PMI_RANK") == text_of(environ, "SLURM_PROCID")
        and text_of(environ, "PMI_SIZE") == text_of(environ, "SLURM_NTASKS")
    )


def _seat(
    variables: Variables,
    rank_names: tuple[str, ...],
    size_names: tuple[str, ...],
    local_rank_names: tuple[str, ...],
    local_size_names: tuple[str, ...],
) -> _Seat:
    rank = variables.need_integer(*rank_names)
    world_size = variables.need_integer(*size_names, minimum=1)
    variables.check_below(rank_names[0], rank, size_names[0], world_size)
    local_rank = variables.need_integer(*local_rank_names)
    local_size = variables.need_integer(*local_size_names, minimum=1)
    local_rank_name = found(variables.environ, *local_rank_names)[0]
    local_size_name = found(variables.environ, *local_size_names)[0]
    variables.check_below(local_rank_name, local_rank, local_size_name, local_size)
    if local_size > world_size:
        raise variables.wrong(local_size_name, f"at most {size_names[0]}={world_size}")
    if local_rank > rank:
        raise variables.wrong(local_rank_name, f"at most {rank_names[0]}={rank}")
    return _Seat(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_size
    )


def _node(seat: _Seat, told: int | None) -> tuple[int, int]:
    """Number of this node and of all nodes: MPI launchers tell neither."""
    if seat.local_world_size == seat.world_size:
        return 0, 1
    if seat.world_size % seat.local_world_size == 0:
        num_nodes = seat.world_size // seat.local_world_size
        fills_nodes = seat.local_rank == seat.rank % seat.local_world_size
        if not fills_nodes and seat.local_rank == seat.rank // num_nodes:
            return seat.rank % num_nodes, num_nodes  # dealt round robin over the nodes
    else:
        num_nodes = max(2, told or -(-seat.world_size // seat.local_world_size))
    return min(seat.rank // seat.local_world_size, num_nodes - 1), num_nodes


def _open_mpi_job(variables: Variables) -> str:
    name = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return rendezvous.job_name("mpi", *([] if name is None else [name]))


def _meeting_place(
    variables: Variables, seat: _Seat, job: str, *, sizes: tuple[str, str], way: str
) -> str | None:
    if seat.world_size == 1:
        return None
    one_host = seat.local_world_size == seat.world_size
    host: tuple[str, str] | None = ("127.0.0.1", "the loopback")
    if not one_host:
        told = variables.text(_MPIRUN_URI) is not None
        host = _mpirun_host(variables, seat) if told else slurm.first_node(variables)
    chosen = rendezvous.meeting_place(
        variables,
        port=rendezvous.derived_port(job),
        host=None if host is None else host[0],
        source="" if host is None else host[1],
    )
    if chosen is None:
        raise ConfigError(
            f"{sizes[0]}={seat.world_size} ranks run on several hosts "
            f"({sizes[1]}={seat.local_world_size} here), and nothing says where rank 0 is: "
            "expected MASTER_ADDR. Set it to the host of rank 0, for example with "
            f"`{way}`."
        )
    return chosen[0] if one_host else rendezvous.across_hosts(variables, chosen[0])


def _mpirun_host(variables: Variables, seat: _Seat) -> tuple[str, str] | None:
    uri = variables.need(_MPIRUN_URI)
    match = _URI_HOST.search(uri)
    if match is None:
        return None
    if seat.rank == 0 and variables.text(_DAEMON_URI, _MPIRUN_URI) != uri:
        # Only rank 0 can see that it is elsewhere. Its error ends the job for all.
        return None
    return match[1] or match[2], _MPIRUN_URI
