"""torchrun's variables, from torchrun itself or from whoever sets the same ones.

torchrun, accelerate and deepspeed set all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Batch scripts often export a part of them next to an MPI launcher or
srun, whose own variables complete the picture where they agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from parti.cluster import kubernetes, mpi, rendezvous, slurm
from parti.cluster.place import Level, Origin, Place
from parti.cluster.variables import Variables, found
from parti.errors import ConfigError


def signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that torchrun, or a script in its stead, numbered this process."""
    if kubernetes.is_operator_pod(environ):
        return ()
    return found(environ, "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def from_torchrun(environ: Mapping[str, str]) -> Place | None:
    """The place of a worker of torchrun."""
    shown = signs(environ)
    if not shown:
        return None
    variables = Variables(
        environ=environ,
        sign=shown[0],
        remedy="Start the script with torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, "
        f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset {shown[0]} to run without it.",
    )
    rank = variables.need_integer("RANK")
    world_size = variables.need_integer("WORLD_SIZE", minimum=1)
    variables.check_below("RANK", rank, "WORLD_SIZE", world_size)
    beneath = _launcher_beneath(variables, rank, world_size)
    local_rank, local_world_size = _local(variables, rank, world_size, beneath)
    node_rank, num_nodes = _node(variables, rank, world_size, local_world_size, beneath)
    url, served = _meeting_place(variables, beneath) if world_size > 1 else (None, False)
    if url is not None and num_nodes > 1:
        url = rendezvous.across_hosts(variables, url)
    by = "torchrun" if found(environ, "TORCHELASTIC_RUN_ID") else "the environment"
    return Place(
        origin=Origin.TORCHRUN,
        why=f"{by} numbered this process RANK={rank} of WORLD_SIZE={world_size}.",
        level=Level.RANK,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        rendezvous=url,
        store_is_served=served,
        job=_job(variables),
    )


def _launcher_beneath(variables: Variables, rank: int, world_size: int) -> Place | None:
    """The place by the launcher's own variables, where torchrun's are not complete."""
    complete = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if world_size == 1 or len(found(variables.environ, *complete)) == len(complete):
        return None
    for resolve in (mpi.from_open_mpi, mpi.from_pmi, slurm.from_slurm):
        try:
            place = resolve(variables.environ)
        except ConfigError:
            continue  # what cannot place this process cannot complete it either
        if place is None:
            continue
        # One task a node: the launcher counts nodes, and each of them is a rank here.
        told = place.rank, place.world_size
        if place.level is Level.HOST:
            told = place.node_rank, place.num_nodes
        if told == (rank, world_size):
            return place
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world_size} contradict {place.origin.value}, which says "
            f"rank {told[0]} of {told[1]}: expected one numbering. Unset RANK and WORLD_SIZE to "
            f"follow {place.origin.value}, or set LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT as well."
        )
    return None


def _local(
    variables: Variables, rank: int, world_size: int, beneath: Place | None
) -> tuple[int, int]:
    local_rank = variables.integer("LOCAL_RANK")
    local_world_size = variables.integer("LOCAL_WORLD_SIZE", minimum=1)
    alone = world_size == 1 or (beneath is not None and beneath.level is Level.HOST)
    if local_rank is None:
        local_rank = 0 if alone else None if beneath is None else beneath.local_rank
    if local_world_size is None:
        local_world_size = 1 if alone else None if beneath is None else beneath.local_world_size
    if local_rank is None:
        raise ConfigError(
            f"RANK={rank} of WORLD_SIZE={world_size} is set and LOCAL_RANK is not, so that ranks "
            "and hosts cannot be told apart: expected both. Set LOCAL_RANK and LOCAL_WORLD_SIZE "
            "where each start is a rank; set PARTI_NODE_RANK, PARTI_NUM_NODES and "
            "PARTI_RENDEZVOUS in place of RANK where each start is a host."
        )
    if local_world_size is None:
        raise variables.missing("LOCAL_WORLD_SIZE")
    variables.check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    if local_world_size > world_size:
        raise variables.wrong("LOCAL_WORLD_SIZE", f"at most WORLD_SIZE={world_size}")
    if local_rank > rank:
        raise variables.wrong("LOCAL_RANK", f"at most RANK={rank}")
    return local_rank, local_world_size


def _node(
    variables: Variables, rank: int, world_size: int, local_world_size: int, beneath: Place | None
) -> tuple[int, int]:
    node_rank = variables.integer("GROUP_RANK")
    num_nodes = variables.integer("GROUP_WORLD_SIZE", minimum=1)
    if node_rank is not None and num_nodes is not None:
        variables.check_below("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes)
        if (num_nodes == 1) != (local_world_size == world_size):
            raise variables.wrong(
                "GROUP_WORLD_SIZE",
                f"1 if and only if all of WORLD_SIZE={world_size} ranks are on this host, which "
                f"has {local_world_size}",
            )
        return node_rank, num_nodes
    if beneath is not None:
        return beneath.node_rank, beneath.num_nodes
    if world_size % local_world_size:
        raise variables.missing("GROUP_RANK" if node_rank is None else "GROUP_WORLD_SIZE")
    return rank // local_world_size, world_size // local_world_size


def _meeting_place(variables: Variables, beneath: Place | None) -> tuple[str, bool]:
    chosen = rendezvous.given(variables)
    if chosen is not None:
        return chosen[0], False
    host, port = variables.host("MASTER_ADDR"), variables.port("MASTER_PORT")
    if host is not None and port is not None:
        # The agent keeps its store at this address for the workers; binding it again would fail.
        served = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return rendezvous.tcp(host, port), served
    if beneath is not None and beneath.rendezvous is not None:
        return beneath.rendezvous, False
    raise variables.missing("MASTER_ADDR" if host is None else "MASTER_PORT")


def _job(variables: Variables) -> str:
    # The run id is "none" for all jobs that did not choose one: the port sets those apart.
    name = variables.text("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") or "env"
    port = variables.text("MASTER_PORT") or "0"
    restarts = variables.integer("TORCHELASTIC_RESTART_COUNT") or 0
    return rendezvous.job_name("torch", name, port, *([f"restart{restarts}"] if restarts else []))
