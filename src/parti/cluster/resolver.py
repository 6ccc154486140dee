"""Which of the environments that can be recognised places this process, and why.

The one that stands nearest to the process decides: first what speaks of this very process
(Parti's supervisor, torchrun, an MPI launcher), then what was written for this start of the
script (TF_CONFIG, an operator's variables in a pod), then the scheduler's step or allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parti.cluster import kubernetes, mpi, own_variables, slurm, tf_config, torchrun
from parti.cluster.place import Level, Origin, Place
from parti.cluster.variables import Variables, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """One environment: how it shows, and how it is read."""

    origin: Origin
    signs: Callable[[Mapping[str, str]], tuple[str, ...]]
    """The variables that are set and show this environment."""
    read: Callable[[Mapping[str, str]], Place | None]
    """The place, None where this environment is absent; a ConfigError where it is in disorder."""


RESOLVERS: tuple[Resolver, ...] = (
    Resolver(origin=Origin.PARTI, signs=own_variables.signs, read=own_variables.from_own_variables),
    Resolver(origin=Origin.TORCHRUN, signs=torchrun.signs, read=torchrun.from_torchrun),
    Resolver(origin=Origin.OPEN_MPI, signs=mpi.open_mpi_signs, read=mpi.from_open_mpi),
    Resolver(origin=Origin.PMI, signs=mpi.pmi_signs, read=mpi.from_pmi),
    Resolver(origin=Origin.TF_CONFIG, signs=tf_config.signs, read=tf_config.from_tf_config),
    Resolver(origin=Origin.KUBERNETES, signs=kubernetes.signs, read=kubernetes.from_kubeflow),
    Resolver(origin=Origin.SLURM, signs=slurm.signs, read=slurm.from_slurm),
    Resolver(origin=Origin.KUBERNETES, signs=kubernetes.signs, read=kubernetes.from_indexed_job),
)
"""In the order of precedence; where none answers, the process is on its own."""


def resolve(environ: Mapping[str, str] | None = None) -> Place:
    """Where this process stands in its job, by the variables of its environment.

    `environ` is `os.environ` unless given. `Place.why` says which variables decided and what was
    found besides. Raises `ConfigError` where the deciding variables are partial or contradict
    each other.
    """
    environ = os.environ if environ is None else environ
    place = _first_answer(environ)
    _check_number_of_nodes(environ, place)
    besides = _besides(environ, place.origin)
    if besides:
        why = f"{place.why.removesuffix('.')}; found besides, and giving way: {besides}."
        place = replace(place, why=why)
    return place


def from_nothing(environ: Mapping[str, str]) -> Place:
    """The place of a process that nobody else started: a job of this host alone."""
    for index, count in (("RANK", "WORLD_SIZE"), ("PARTI_NODE_RANK", "PARTI_NUM_NODES")):
        variables = Variables(
            environ=environ, sign=count, remedy=f"Set {index} too, or unset {count}."
        )
        if (variables.integer(count, minimum=1) or 1) > 1:
            raise variables.missing(index)
    if (text_of(environ, "PARTI_RENDEZVOUS") or "").startswith("tcp://"):
        raise Variables(
            environ=environ,
            sign="PARTI_RENDEZVOUS",
            remedy="Set PARTI_NODE_RANK and PARTI_NUM_NODES too, or unset PARTI_RENDEZVOUS.",
        ).missing("PARTI_NODE_RANK")
    return Place(
        origin=Origin.LOCAL,
        why="no variable places this process in a cluster, so the job is this host.",
        level=Level.HOST,
    )


def _first_answer(environ: Mapping[str, str]) -> Place:
    for resolver in RESOLVERS:
        place = resolver.read(environ)
        if place is not None:
            return place
    return from_nothing(environ)


def _check_number_of_nodes(environ: Mapping[str, str], place: Place) -> None:
    """PARTI_NUM_NODES beside a scheduler is a wish: it must be what the scheduler gave."""
    variables = Variables(
        environ=environ,
        sign="PARTI_NUM_NODES",
        remedy="Unset PARTI_NUM_NODES, or start the job on as many nodes.",
    )
    num_nodes = variables.integer("PARTI_NUM_NODES", minimum=1)
    if num_nodes is not None and num_nodes != place.num_nodes and place.in_world:
        raise variables.wrong(
            "PARTI_NUM_NODES", f"{place.num_nodes}, the number of nodes by {place.origin.value}"
        )


def _besides(environ: Mapping[str, str], decided: Origin) -> str:
    names: dict[str, tuple[str, ...]] = {}
    for resolver in RESOLVERS:
        shown = resolver.signs(environ)
        if shown and resolver.origin is not decided:
            names[resolver.origin.value] = shown
    return ", ".join(f"{origin} ({shown[0]})" for origin, shown in names.items())
