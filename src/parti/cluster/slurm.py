"""Slurm: one start a node or one a rank under `srun`, a batch script or a shell without it.

Where every node of a step runs one task, a start stands for its host (`Level.HOST`); in any
other step each task is a rank. Node 0 of the step's host list is where ranks meet, at a port
that follows from job and step, so that all tasks find it without talking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parti.cluster import hostlist, rendezvous
from parti.cluster.place import Level, Origin, Place
from parti.cluster.variables import Variables, found, text_of
from parti.errors import ConfigError

# Step ids that are no steps of srun: the batch script, an interactive shell, the extern step.
_NO_STEPS = ("4294967291", "4294967290", "4294967292")
# srun sets the two sides of each pair to one value. They differ where a script was submitted
# from within a step: sbatch hands the old step's variables on and renews the others.
_PAIRS = (
    ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
_OF_A_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One task's view of the step that srun started it in."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]


def signs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show that this process runs under Slurm."""
    return found(environ, "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID", "SLURM_STEP_ID")


def from_slurm(environ: Mapping[str, str]) -> Place | None:
    """The place of a task of a step, or of a script in an allocation."""
    shown = signs(environ)
    if not shown:
        return None
    variables = Variables(
        environ=environ,
        sign=shown[0],
        remedy="Start the script with srun, or unset the SLURM_* variables to run without Slurm.",
    )
    if found(environ, "SLURM_HET_SIZE") and found(environ, *_OF_A_STEP):
        raise variables.wrong("SLURM_HET_SIZE", "a step of a job that is not heterogeneous")
    return _task(variables) if in_step(environ) else _allocation(variables)


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, as far as the variables tell."""
    step = text_of(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step in _NO_STEPS or not found(environ, *_OF_A_STEP):
        return False
    pairs = [(environ[a], environ[b]) for a, b in _PAIRS if len(found(environ, a, b)) == 2]
    return all(of_step == current for of_step, current in pairs)


def first_node(variables: Variables) -> tuple[str, str] | None:
    """The first host of the allocation, and the variable it was read from.

    Not of the step: where mpirun starts its daemons with srun, each sees a step of its own.
    """
    names = found(variables.environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not names:
        return None
    nodes = _expand(variables, names[0])
    return (nodes[0], names[0]) if nodes else None


def read_step(variables: Variables) -> Step:
    """The step's variables, checked against each other."""
    rank = variables.need_integer("SLURM_PROCID")
    world_size = variables.need_integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", minimum=1)
    local_rank = variables.need_integer("SLURM_LOCALID")
    node_rank = variables.need_integer("SLURM_NODEID")
    variables.need(*_NODELIST)
    list_name = found(variables.environ, *_NODELIST)[0]
    nodes = _expand(variables, list_name)
    tasks_per_node = _tasks_per_node(variables)
    variables.check_below("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
    if len(tasks_per_node) != len(nodes):
        raise variables.wrong(
            list_name, f"{len(tasks_per_node)} hosts, as many as the tasks per node have numbers"
        )
    if sum(tasks_per_node) != world_size:
        raise variables.wrong(
            _first_name(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            f"{world_size} tasks in sum, as in SLURM_NTASKS",
        )
    variables.check_below("SLURM_NODEID", node_rank, "the number of nodes", len(nodes))
    variables.check_below(
        "SLURM_LOCALID", local_rank, f"the tasks of node {node_rank}", tasks_per_node[node_rank]
    )
    return Step(
        job=_job(variables),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node_rank=node_rank,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
    )


def _task(variables: Variables) -> Place:
    step = read_step(variables)
    num_nodes = len(step.nodes)
    # On one host nothing but the loopback is needed, and it works without name service.
    chosen = rendezvous.meeting_place(
        variables,
        port=rendezvous.derived_port(step.job),
        host="127.0.0.1" if num_nodes == 1 else step.nodes[0],
    )
    url = None if chosen is None else chosen[0]
    if url is not None and num_nodes > 1:
        url = rendezvous.across_hosts(variables, url)
    if set(step.tasks_per_node) == {1}:
        return Place(
            origin=Origin.SLURM,
            why=f"srun started one task a node, here SLURM_NODEID={step.node_rank} of {num_nodes}, "
            "so each start stands for its host.",
            level=Level.HOST,
            node_rank=step.node_rank,
            num_nodes=num_nodes,
            rendezvous=url if num_nodes > 1 else None,
            job=step.job,
        )
    return Place(
        origin=Origin.SLURM,
        why=f"srun started SLURM_NTASKS={step.world_size} tasks, more than nodes ({num_nodes}), "
        f"so each is a rank, and this is SLURM_PROCID={step.rank}.",
        level=Level.RANK,
        node_rank=step.node_rank,
        num_nodes=num_nodes,
        rank=step.rank,
        world_size=step.world_size,
        local_rank=step.local_rank,
        local_world_size=step.tasks_per_node[step.node_rank],
        rendezvous=url,
        job=step.job,
    )


def _allocation(variables: Variables) -> Place:
    """A batch script or a shell: it runs on one node, whatever was allocated."""
    if variables.integer("SLURM_PROCID"):
        raise variables.wrong(
            "SLURM_PROCID",
            "0 in a batch script, or the variables of one step: SLURM_STEP_ID set, and "
            "SLURM_STEP_NUM_TASKS equal to SLURM_NTASKS",
        )
    num_nodes = variables.integer("SLURM_JOB_NUM_NODES", "SLURM_NNODES", minimum=1)
    if num_nodes is None:
        node = found(variables.environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        num_nodes = len(_expand(variables, node[0])) if node else 1
    if num_nodes > 1:
        raise ConfigError(
            f"The Slurm job has {num_nodes} nodes (SLURM_JOB_NUM_NODES), but this process was "
            "started without srun, on one of them only. Start the script on all nodes with "
            "`srun --ntasks-per-node=1 python script.py`, or ask for one node with "
            "`--nodes=1`."
        )
    return Place(
        origin=Origin.SLURM,
        why=f"{variables.sign} names an allocation of one node and srun did not start this "
        "process, so this start stands for the host.",
        level=Level.HOST,
        job=_job(variables, with_step=False),
    )


def _job(variables: Variables, *, with_step: bool = True) -> str:
    job = variables.need("SLURM_JOB_ID", "SLURM_JOBID")
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID") if with_step else None
    restarts = variables.integer("SLURM_RESTART_COUNT")
    name = job if step is None else f"{job}.{step}"
    return rendezvous.job_name("slurm", name, *([f"restart{restarts}"] if restarts else []))


def _tasks_per_node(variables: Variables) -> tuple[int, ...]:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = variables.need(*names)
    try:
        return hostlist.expand_counts(counts)
    except ConfigError:
        raise variables.wrong(
            _first_name(variables, *names), "counts of tasks like '2(x3),1'"
        ) from None


def _expand(variables: Variables, name: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(variables.need(name))
    except ConfigError:
        raise variables.wrong(name, "a host list like 'node[01-16],gpu7'") from None


def _first_name(variables: Variables, *names: str) -> str:
    return found(variables.environ, *names)[0]
