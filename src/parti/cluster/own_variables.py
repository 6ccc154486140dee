"""Parti's own variables: what a supervisor tells its workers, and what a person may declare.

A supervisor sets for each worker (`Level.RANK`): PARTI_JOB, PARTI_RANK, PARTI_WORLD_SIZE,
PARTI_LOCAL_RANK, PARTI_LOCAL_WORLD_SIZE, PARTI_NODE_RANK, PARTI_NUM_NODES, PARTI_RENDEZVOUS,
and the directories PARTI_HOST_DIR and PARTI_RUN_DIR.

A person may set on each host (`Level.HOST`), where no scheduler does: PARTI_NODE_RANK,
PARTI_NUM_NODES and PARTI_RENDEZVOUS=tcp://<host of node 0>:<port>.
"""

from __future__ import annotations

from collections.abc import Mapping

from parti.cluster import rendezvous
from parti.cluster.place import Level, Origin, Place
from parti.cluster.variables import Variables, found

_OF_A_RANK = ("PARTI_RANK", "PARTI_WORLD_SIZE", "PARTI_LOCAL_RANK", "PARTI_LOCAL_WORLD_SIZE")


def signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that Parti's own settings place this process."""
    return found(environ, *_OF_A_RANK, "PARTI_NODE_RANK")


def from_own_variables(environ: Mapping[str, str]) -> Place | None:
    """The place that a supervisor or a person wrote down in PARTI_* variables."""
    shown = signs(environ)
    if not shown:
        return None
    if shown[0] in _OF_A_RANK:
        return _rank(environ, shown[0])
    return _host(environ)


def _rank(environ: Mapping[str, str], sign: str) -> Place:
    variables = Variables(
        environ=environ,
        sign=sign,
        remedy="`parti run` sets all of these for its workers: start the script with it, or unset "
        f"{sign} to run without it.",
    )
    rank = variables.need_integer("PARTI_RANK")
    world_size = variables.need_integer("PARTI_WORLD_SIZE", minimum=1)
    local_rank = variables.need_integer("PARTI_LOCAL_RANK")
    local_world_size = variables.need_integer("PARTI_LOCAL_WORLD_SIZE", minimum=1)
    node_rank = variables.need_integer("PARTI_NODE_RANK")
    num_nodes = variables.need_integer("PARTI_NUM_NODES", minimum=1)
    variables.check_below("PARTI_RANK", rank, "PARTI_WORLD_SIZE", world_size)
    variables.check_below(
        "PARTI_LOCAL_RANK", local_rank, "PARTI_LOCAL_WORLD_SIZE", local_world_size
    )
    variables.check_below("PARTI_NODE_RANK", node_rank, "PARTI_NUM_NODES", num_nodes)
    if local_world_size > world_size:
        raise variables.wrong("PARTI_LOCAL_WORLD_SIZE", f"at most PARTI_WORLD_SIZE={world_size}")
    job = variables.need("PARTI_JOB")
    return Place(
        origin=Origin.PARTI,
        why=f"a supervisor started this process as PARTI_RANK={rank} of {world_size}.",
        level=Level.RANK,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        rendezvous=_rendezvous(variables, needed=world_size > 1, num_nodes=num_nodes),
        job=rendezvous.job_name(job),
        host_directory=variables.text("PARTI_HOST_DIR"),
        run_directory=variables.text("PARTI_RUN_DIR"),
    )


def _host(environ: Mapping[str, str]) -> Place:
    variables = Variables(
        environ=environ,
        sign="PARTI_NODE_RANK",
        remedy="Set PARTI_NODE_RANK, PARTI_NUM_NODES and PARTI_RENDEZVOUS=tcp://host:port (of "
        "node 0) on every host, or unset PARTI_NODE_RANK to run on this host alone.",
    )
    node_rank = variables.need_integer("PARTI_NODE_RANK")
    num_nodes = variables.need_integer("PARTI_NUM_NODES", minimum=1)
    variables.check_below("PARTI_NODE_RANK", node_rank, "PARTI_NUM_NODES", num_nodes)
    job = variables.text("PARTI_JOB")
    return Place(
        origin=Origin.PARTI,
        why=f"PARTI_NODE_RANK={node_rank} and PARTI_NUM_NODES={num_nodes} are set.",
        level=Level.HOST,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rendezvous=_rendezvous(variables, needed=num_nodes > 1, num_nodes=num_nodes),
        job=None if job is None else rendezvous.job_name(job),
    )


def _rendezvous(variables: Variables, *, needed: bool, num_nodes: int) -> str | None:
    chosen = rendezvous.given(variables)
    if not needed:
        return None
    if chosen is None:
        raise variables.missing("PARTI_RENDEZVOUS")
    return rendezvous.across_hosts(variables, chosen[0]) if num_nodes > 1 else chosen[0]
