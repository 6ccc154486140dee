"""Kubernetes: each pod is a host that starts the script once (`Level.HOST`).

Kubeflow Trainer, and the training operator from 1.7, set PET_NNODES, PET_NODE_RANK,
PET_MASTER_ADDR, PET_MASTER_PORT and PET_NPROC_PER_NODE. Older operators set RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, which there count pods.

An indexed Job sets only JOB_COMPLETION_INDEX. Its manifest has to add PARTI_NUM_NODES (the
Job's completions) and the address of index 0: PARTI_SERVICE, the headless service that is the
pods' subdomain, is enough, as pods are named after the Job; PARTI_RENDEZVOUS or MASTER_ADDR say
it in full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from parti.cluster import rendezvous
from parti.cluster.place import Level, Origin, Place
from parti.cluster.spec import is_address
from parti.cluster.variables import Variables, found

DEFAULT_PORT = 29400
"""Every pod has its own network, so that one port serves all jobs."""

_PET = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
_NODES = re.compile(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-]*")


def signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that a pod of a Job or of an operator runs this script."""
    ranks = ("RANK",) if is_operator_pod(environ) else ()
    return found(environ, *_PET, *ranks, "JOB_COMPLETION_INDEX")


def is_operator_pod(environ: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE count pods: an operator set them and torchrun has not run."""
    if found(environ, "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        return False
    return bool(found(environ, *_PET, "KUBERNETES_SERVICE_HOST"))


def from_kubeflow(environ: Mapping[str, str]) -> Place | None:
    """The place of a pod of Kubeflow Trainer's TrainJob or of a PyTorchJob."""
    if not is_operator_pod(environ):
        return None
    if found(environ, *_PET):
        return _pet_pod(environ)
    return _rank_pod(environ) if found(environ, "RANK") else None


def from_indexed_job(environ: Mapping[str, str]) -> Place | None:
    """The place of a pod of an indexed Job."""
    if not found(environ, "JOB_COMPLETION_INDEX"):
        return None
    variables = Variables(
        environ=environ,
        sign="JOB_COMPLETION_INDEX",
        remedy="Set PARTI_NUM_NODES to the completions of the Job and PARTI_SERVICE to its "
        "headless service, or PARTI_NUM_NODES=1 where each index is a run of its own.",
    )
    num_nodes = variables.need_integer("PARTI_NUM_NODES", minimum=1)
    node_rank = variables.need_integer("JOB_COMPLETION_INDEX")
    if num_nodes == 1:
        node_rank = 0  # each index is a run of its own, in a world of one host
    variables.check_below("JOB_COMPLETION_INDEX", node_rank, "PARTI_NUM_NODES", num_nodes)
    chosen = rendezvous.meeting_place(
        variables, port=DEFAULT_PORT, host=_first_pod(variables) if num_nodes > 1 else None
    )
    if num_nodes > 1 and chosen is None:
        raise variables.missing("PARTI_SERVICE")
    return _pod(
        variables,
        f"an indexed Job set JOB_COMPLETION_INDEX, which is node {node_rank} of "
        f"PARTI_NUM_NODES={num_nodes}.",
        node_rank,
        num_nodes,
        None if chosen is None else chosen[0],
    )


def _pet_pod(environ: Mapping[str, str]) -> Place:
    variables = Variables(
        environ=environ,
        sign=found(environ, *_PET)[0],
        remedy="Kubeflow sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT for "
        "a job of fixed size; unset the PET_* variables to run on this pod alone.",
    )
    num_nodes = _num_nodes(variables)
    node_rank = variables.integer("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
    if node_rank is None:
        if num_nodes > 1:
            raise variables.missing("PET_NODE_RANK")
        node_rank = 0
    name = (*found(environ, "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK"), "PET_NODE_RANK")[0]
    variables.check_below(name, node_rank, "PET_NNODES", num_nodes)
    return _pod(
        variables,
        f"Kubeflow gave this pod {name}={node_rank} of PET_NNODES={num_nodes}.",
        node_rank,
        num_nodes,
        _pet_address(variables),
    )


def _num_nodes(variables: Variables) -> int:
    text = variables.need("PET_NNODES")
    match = _NODES.fullmatch(text)
    if match is None or (match[2] is not None and match[1] != match[2]):
        raise variables.wrong("PET_NNODES", "one number of nodes of at least 1, not a range")
    return int(match[1])


def _pet_address(variables: Variables) -> str | None:
    chosen = rendezvous.given(variables)
    if chosen is not None:
        return chosen[0]
    for host_name, port_name in (
        ("PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("MASTER_ADDR", "MASTER_PORT"),
    ):
        host, port = variables.host(host_name), variables.port(port_name)
        if host is not None:
            return rendezvous.tcp(host, DEFAULT_PORT if port is None else port)
    endpoint = variables.text("PET_RDZV_ENDPOINT")
    if endpoint is None:
        return None
    if not is_address(endpoint):
        raise variables.wrong("PET_RDZV_ENDPOINT", "host:port")
    return f"tcp://{endpoint}"


def _rank_pod(environ: Mapping[str, str]) -> Place:
    variables = Variables(
        environ=environ,
        sign="RANK",
        remedy="The training operator sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each "
        "pod; unset RANK to run on this pod alone.",
    )
    node_rank = variables.need_integer("RANK")
    num_nodes = variables.need_integer("WORLD_SIZE", minimum=1)
    variables.check_below("RANK", node_rank, "WORLD_SIZE", num_nodes)
    chosen = rendezvous.meeting_place(variables, port=DEFAULT_PORT)
    if num_nodes > 1 and chosen is None:
        raise variables.missing("MASTER_ADDR")
    return _pod(
        variables,
        f"an operator gave this pod RANK={node_rank} of WORLD_SIZE={num_nodes} and no LOCAL_RANK, "
        "so they count pods.",
        node_rank,
        num_nodes,
        None if chosen is None else chosen[0],
    )


def _pod(variables: Variables, why: str, node_rank: int, num_nodes: int, url: str | None) -> Place:
    if num_nodes > 1:
        if url is None:
            raise variables.missing("PET_MASTER_ADDR")
        url = rendezvous.across_hosts(variables, url)
    return Place(
        origin=Origin.KUBERNETES,
        why=why,
        level=Level.HOST,
        node_rank=node_rank,
        num_nodes=num_nodes,
        requested_local_world_size=_processes_per_pod(variables),
        rendezvous=url if num_nodes > 1 else None,
    )


def _processes_per_pod(variables: Variables) -> int | None:
    if variables.text("PET_NPROC_PER_NODE") in ("auto", "cpu", "gpu", "xpu"):
        return None
    return variables.integer("PET_NPROC_PER_NODE", minimum=1)


def _first_pod(variables: Variables) -> str | None:
    """The pod with index 0: the Job controller names pods <job>-<index>."""
    service = variables.text("PARTI_SERVICE")
    if service is None:
        return None
    if not _SERVICE.fullmatch(service):
        raise variables.wrong("PARTI_SERVICE", "the name of a headless service")
    own_name = variables.need("HOSTNAME").split(".")[0]
    index = variables.need("JOB_COMPLETION_INDEX")
    job = own_name.removesuffix(f"-{index}")
    if job == own_name or not _SERVICE.fullmatch(job):
        raise variables.wrong("HOSTNAME", f"the pod's name, ending with its index -{index}")
    return f"{job}-0.{service}"
