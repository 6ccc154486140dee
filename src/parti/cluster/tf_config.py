"""TF_CONFIG: the cluster as tf.distribute users describe it, one start of the script a task.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
     "task": {"type": "worker", "index": 0}}

Chief and workers form the world: the chief, where one is named, is its worker 0, else worker 0
is the chief. Its address, port included, is where the hosts meet. Parameter servers and
evaluators stand beside that world: `Place.in_world` is False for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from parti.cluster.place import Level, Origin, Place
from parti.cluster.spec import ClusterSpec
from parti.cluster.variables import Variables, found
from parti.errors import ConfigError

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

_REMEDY = (
    'Write it like {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}, or unset TF_CONFIG to run without a cluster.'
)


def signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """TF_CONFIG, where it is set."""
    return found(environ, "TF_CONFIG")


def from_tf_config(environ: Mapping[str, str]) -> Place | None:
    """The place of one task; None where TF_CONFIG is unset or describes no cluster."""
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    variables = Variables(environ=environ, sign="TF_CONFIG", remedy=_REMEDY)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise variables.wrong("TF_CONFIG", f"JSON, but found: {error}") from None
    if not isinstance(config, dict):
        raise variables.wrong("TF_CONFIG", "a JSON object")
    if not config.get("cluster") and not config.get("task"):
        return None  # '{}' is how single-machine services spell "no cluster"
    cluster = _cluster(variables, config.get("cluster"))
    task_type, index = _task(variables, config.get("task"), cluster)
    return _place(variables, cluster, task_type, index)


def _cluster(variables: Variables, jobs: object) -> ClusterSpec:
    if not isinstance(jobs, dict) or not jobs:
        raise variables.wrong("TF_CONFIG", '"cluster" with the addresses of each task type')
    for job in jobs:
        if job not in TASK_TYPES:
            raise _unknown_type(variables, "cluster", job)
    try:
        cluster = ClusterSpec(jobs)
    except ConfigError as error:
        raise ConfigError(f"TF_CONFIG: {error}") from None
    if len(cluster.jobs.get("chief", ())) > 1:
        raise variables.wrong("TF_CONFIG", f"one chief, not {cluster.num_tasks('chief')}")
    return cluster


def _task(variables: Variables, task: object, cluster: ClusterSpec) -> tuple[str, int]:
    if not isinstance(task, dict) or "type" not in task:
        raise variables.wrong("TF_CONFIG", '"task" with "type" and "index" of this process')
    task_type = task["type"]
    if task_type not in TASK_TYPES:
        raise _unknown_type(variables, "task", task_type)
    index = _index(variables, task.get("index"))
    if task_type == "evaluator" and "evaluator" not in cluster.jobs:
        return task_type, index  # evaluators need no address: nobody calls them
    num_tasks = len(cluster.jobs.get(task_type, ()))
    if num_tasks == 0:
        raise variables.wrong(
            "TF_CONFIG",
            f'addresses of job "{task_type}" in "cluster", as the task is of that type',
        )
    if index >= num_tasks:
        raise variables.wrong(
            "TF_CONFIG",
            f'a task index from 0 to {num_tasks - 1}, not {index}: job "{task_type}" has '
            f"{num_tasks} in the cluster",
        )
    return task_type, index


def _index(variables: Variables, index: object) -> int:
    # Some operators write the index as a string.
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10:
        return int(index)
    if isinstance(index, int) and not isinstance(index, bool) and index >= 0:
        return index
    raise variables.wrong("TF_CONFIG", f"an integer of at least 0 as task index, not {index!r}")


def _unknown_type(variables: Variables, where: str, name: object) -> ConfigError:
    hint = " ('master' is called 'chief' since TensorFlow 2)" if name == "master" else ""
    return variables.wrong(
        "TF_CONFIG", f'in "{where}" one of the types {", ".join(TASK_TYPES)}, not {name!r}{hint}'
    )


def _place(variables: Variables, cluster: ClusterSpec, task_type: str, index: int) -> Place:
    chiefs = cluster.jobs.get("chief", ())
    world = (*chiefs, *cluster.jobs.get("worker", ()))
    if not world:
        raise variables.wrong("TF_CONFIG", "a chief or workers in the cluster")
    task = f"TF_CONFIG makes this process {task_type} {index}"
    if task_type in ("ps", "evaluator"):
        return Place(
            origin=Origin.TF_CONFIG,
            why=f"{task}, beside a world of {len(world)} workers.",
            level=Level.HOST,
            rendezvous=f"tcp://{world[0]}",
            task_type=task_type,
            task_index=index,
            cluster=cluster,
        )
    node_rank = index + len(chiefs) if task_type == "worker" else index
    return Place(
        origin=Origin.TF_CONFIG,
        why=f"{task}, worker {node_rank} of {len(world)}.",
        level=Level.HOST,
        node_rank=node_rank,
        num_nodes=len(world),
        rendezvous=f"tcp://{world[0]}" if len(world) > 1 else None,
        task_type=task_type,
        task_index=index,
        cluster=cluster,
    )
