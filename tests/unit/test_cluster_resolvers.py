"""One environment at a time: what each resolver reads, and what it says where that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parti.cluster import ClusterSpec, Level, Origin, Place, resolve
from parti.cluster.kubernetes import from_indexed_job, from_kubeflow
from parti.cluster.mpi import from_open_mpi, from_pmi
from parti.cluster.own_variables import from_own_variables
from parti.cluster.rendezvous import derived_port, job_name
from parti.cluster.resolver import RESOLVERS
from parti.cluster.slurm import from_slurm
from parti.cluster.tf_config import from_tf_config
from parti.cluster.torchrun import from_torchrun
from parti.errors import ConfigError

PARTI = {
    "PARTI_JOB": "j",
    "PARTI_RANK": "1",
    "PARTI_WORLD_SIZE": "4",
    "PARTI_LOCAL_RANK": "1",
    "PARTI_LOCAL_WORLD_SIZE": "2",
    "PARTI_NODE_RANK": "0",
    "PARTI_NUM_NODES": "2",
    "PARTI_RENDEZVOUS": "tcp://a:29400",
}
TORCH = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "a",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "a-0.a",
    "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "auto",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "a-master-0",
    "MASTER_PORT": "23456",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "digits-1",
    "PARTI_NUM_NODES": "2",
    "PARTI_SERVICE": "pods",
}


def tf_config(cluster: object, kind: object = "worker", index: object = 0) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def complaint(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(environ)
    return str(caught.value)


def place_of(environ: dict[str, str]) -> tuple[object, ...]:
    place = resolve(environ)
    return place.level, place.rank, place.world_size, place.node_rank, place.num_nodes


# ---- nothing, precedence, why ------------------------------------------------------------------


def test_nothing_set_is_this_host() -> None:
    place = resolve({"PATH": "/bin", "TF_CONFIG": "{}", "RANK": " ", "WORLD_SIZE": "1"})
    assert place == Place(origin=Origin.LOCAL, why=place.why, level=Level.HOST)


def test_the_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PARTI.items():
        monkeypatch.setenv(name, value)
    assert resolve().rank == 1


@pytest.mark.parametrize(
    "resolver", RESOLVERS, ids=lambda resolver: f"{resolver.origin.name}-{resolver.read.__name__}"
)
def test_each_resolver_is_silent_where_its_environment_is_absent(resolver: Any) -> None:
    assert resolver.signs({}) == ()
    assert resolver.read({}) is None
    assert resolver.read({"PATH": "/bin", "MASTER_ADDR": "a", "WORLD_SIZE": "2"}) is None


# The nearer one stands first; each pair is tried.
NEAREST_FIRST = (
    (Origin.PARTI, PARTI),
    (Origin.TORCHRUN, TORCH),
    (Origin.OPEN_MPI, OPEN_MPI),
    (Origin.PMI, PMI),
    (Origin.TF_CONFIG, tf_config({"worker": ["a:1", "b:1"]})),
    (Origin.KUBERNETES, PET),
    (Origin.SLURM, SLURM),
    (Origin.KUBERNETES, INDEXED),
)


@pytest.mark.parametrize("near", range(len(NEAREST_FIRST)))
def test_the_nearest_environment_decides(near: int) -> None:
    origin, environ = NEAREST_FIRST[near]
    for other_origin, other in NEAREST_FIRST[near + 1 :]:
        both = without(other, "PARTI_NUM_NODES") | environ
        place = resolve(both)
        assert place.origin is origin
        if other_origin is not origin:
            assert f"found besides, and giving way: {other_origin.value}" in place.why


def test_why_names_what_decided_and_what_gave_way() -> None:
    assert resolve(TORCH | SLURM).why == (
        "the environment numbered this process RANK=1 of WORLD_SIZE=4; found besides, and giving "
        "way: Slurm (SLURM_JOB_ID)."
    )


# ---- Parti's own variables ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTI)
def test_a_worker_needs_all_of_partis_variables(name: str) -> None:
    text = complaint(without(PARTI, name))
    assert f"{name} is not set, although PARTI_" in text
    assert "parti run" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PARTI_RANK", "4", "PARTI_RANK='4': expected less than PARTI_WORLD_SIZE=4"),
        ("PARTI_RANK", "x", "PARTI_RANK='x': expected an integer of at least 0"),
        ("PARTI_WORLD_SIZE", "0", "expected an integer of at least 1"),
        ("PARTI_LOCAL_RANK", "2", "less than PARTI_LOCAL_WORLD_SIZE=2"),
        ("PARTI_LOCAL_WORLD_SIZE", "5", "at most PARTI_WORLD_SIZE=4"),
        ("PARTI_NODE_RANK", "2", "less than PARTI_NUM_NODES=2"),
        ("PARTI_RENDEZVOUS", "a:1", "expected tcp://host:port"),
        ("PARTI_RENDEZVOUS", "tcp://a", "expected tcp://host:port"),
        ("PARTI_RENDEZVOUS", "file://relative", "or file:///directory"),
        ("PARTI_RENDEZVOUS", "file:///tmp/x", "tcp://host:port, as the job has several hosts"),
    ],
)
def test_a_worker_of_parti_refuses(name: str, value: str, said: str) -> None:
    assert said in complaint(PARTI | {name: value})


def test_hosts_declared_by_hand() -> None:
    declared = {
        "PARTI_NODE_RANK": "1",
        "PARTI_NUM_NODES": "2",
        "PARTI_RENDEZVOUS": "tcp://[2001:db8::1]:29400",
    }
    place = from_own_variables(declared)
    assert place is not None
    assert (place.rendezvous, place.job) == ("tcp://[2001:db8::1]:29400", None)
    assert resolve(declared | {"PARTI_JOB": "night"}).job == "night"
    assert "at least 1" in complaint(declared | {"PARTI_NUM_NODES": "0"})
    assert place_of(declared) == (Level.HOST, None, None, 1, 2)
    assert "PARTI_RENDEZVOUS is not set" in complaint(without(declared, "PARTI_RENDEZVOUS"))
    assert "PARTI_NUM_NODES is not set" in complaint(without(declared, "PARTI_NUM_NODES"))
    assert "PARTI_NODE_RANK is not set" in complaint(without(declared, "PARTI_NODE_RANK"))
    only_address = without(declared, "PARTI_NODE_RANK", "PARTI_NUM_NODES")
    assert "PARTI_NODE_RANK is not set" in complaint(only_address)


def test_the_number_of_nodes_asked_for_is_the_number_there_is() -> None:
    assert resolve(SLURM | {"PARTI_NUM_NODES": "3"}).num_nodes == 3
    text = complaint(SLURM | {"PARTI_NUM_NODES": "4"})
    assert "PARTI_NUM_NODES='4': expected 3, the number of nodes by Slurm" in text


# ---- torchrun ----------------------------------------------------------------------------------


def test_torchrun_by_its_six_variables() -> None:
    place = from_torchrun(TORCH)
    assert place is not None
    assert (place.rank, place.world_size, place.node_rank, place.num_nodes) == (1, 4, 0, 2)
    assert place.rendezvous == "tcp://a:29500"
    assert not place.store_is_served


def test_a_world_of_one_needs_no_address() -> None:
    place = resolve({"RANK": "0", "WORLD_SIZE": "1"})
    assert (place.local_rank, place.local_world_size, place.rendezvous) == (0, 1, None)


def test_a_restart_is_a_job_of_its_own() -> None:
    elastic = TORCH | {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, second = resolve(elastic), resolve(elastic | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert first.store_is_served
    assert (first.job, second.job) == ("torch-r-29500", "torch-r-29500-restart1")


def test_a_rendezvous_of_ones_own_is_not_served_by_torchrun() -> None:
    served = TORCH | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = resolve(served | {"PARTI_RENDEZVOUS": "tcp://b:1"})
    assert (place.rendezvous, place.store_is_served) == ("tcp://b:1", False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_torchrun_sets_all_of_its_variables(name: str) -> None:
    assert f"{name} is not set, although " in complaint(without(TORCH, name))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "4", "RANK='4': expected less than WORLD_SIZE=4"),
        ("RANK", "one", "RANK='one': expected an integer of at least 0"),
        ("RANK", "-1", "RANK='-1': expected an integer of at least 0"),
        ("WORLD_SIZE", "4.0", "WORLD_SIZE='4.0': expected an integer of at least 1"),
        ("LOCAL_RANK", "2", "less than LOCAL_WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "8", "at most WORLD_SIZE=4"),
        ("LOCAL_WORLD_SIZE", "3", "GROUP_RANK is not set"),
        ("PARTI_RENDEZVOUS", "file:///x", "tcp://host:port, as the job has several hosts"),
        ("MASTER_PORT", "0", "MASTER_PORT='0': expected a TCP port from 1 to 65535"),
        ("MASTER_PORT", "65536", "expected a TCP port"),
        ("MASTER_PORT", "http", "expected a TCP port"),
        ("MASTER_ADDR", "a:29500", "MASTER_ADDR='a:29500': expected a host name or an IP address"),
        ("MASTER_ADDR", "tcp://a", "expected a host name or an IP address, without a port"),
    ],
)
def test_torchrun_refuses(name: str, value: str, said: str) -> None:
    text = complaint(TORCH | {name: value})
    assert said in text
    assert "unset" in text


def test_torchruns_groups_are_hosts_and_must_fit() -> None:
    grouped = TORCH | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert place_of(grouped) == (Level.RANK, 1, 4, 1, 2)
    assert "GROUP_RANK='1': expected less than" in complaint(grouped | {"GROUP_WORLD_SIZE": "1"})
    alone = grouped | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert "GROUP_WORLD_SIZE='1': expected 1 if and only if" in complaint(alone)
    spread = grouped | {"LOCAL_WORLD_SIZE": "4"}
    assert "GROUP_WORLD_SIZE='2': expected 1 if and only if" in complaint(spread)


def test_ranks_without_local_ranks_cannot_be_told_from_hosts() -> None:
    text = complaint(without(TORCH, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert "LOCAL_RANK is not" in text
    assert "PARTI_NODE_RANK" in text


def test_a_world_size_alone_is_half_a_setting() -> None:
    assert "RANK is not set, although WORLD_SIZE is" in complaint({"WORLD_SIZE": "2"})
    assert place_of(SLURM | {"WORLD_SIZE": "5"}) == (Level.RANK, 3, 5, 1, 3)


def test_exported_variables_are_completed_by_the_launcher_beneath() -> None:
    exported = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    place = resolve(OPEN_MPI | exported)
    assert (place.origin, place.local_world_size, place.num_nodes) == (Origin.TORCHRUN, 2, 2)
    assert place.rendezvous == f"tcp://a:{derived_port('mpi')}"
    one_a_node = SLURM | {"SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    one_a_node |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    place = resolve(one_a_node | {"RANK": "1", "WORLD_SIZE": "3"})
    assert (place.local_rank, place.local_world_size, place.node_rank) == (0, 1, 1)


def test_exported_variables_must_agree_with_the_launcher_beneath() -> None:
    text = complaint(OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert "RANK=0 and WORLD_SIZE=4 contradict Open MPI, which says rank 1 of 4" in text


# ---- MPI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", without(OPEN_MPI, "MASTER_ADDR"))
def test_open_mpi_sets_all_of_its_variables(name: str) -> None:
    assert f"{name} is not set, although OMPI_COMM_WORLD_" in complaint(without(OPEN_MPI, name))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OMPI_COMM_WORLD_RANK", "4", "less than OMPI_COMM_WORLD_SIZE=4"),
        ("OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_LOCAL_RANK='1': expected at most"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "2", "less than OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "5", "at most OMPI_COMM_WORLD_SIZE=4"),
        ("OMPI_COMM_WORLD_SIZE", "many", "expected an integer of at least 1"),
    ],
)
def test_open_mpi_refuses(name: str, value: str, said: str) -> None:
    assert said in complaint(OPEN_MPI | {name: value})


def test_mpi_on_several_hosts_needs_the_address_of_rank_0() -> None:
    text = complaint(without(OPEN_MPI, "MASTER_ADDR"))
    assert "OMPI_COMM_WORLD_SIZE=4" in text
    assert "mpirun -x MASTER_ADDR" in text
    spread = PMI | {"PMI_SIZE": "4"}
    assert "expected MASTER_ADDR" in complaint(spread)
    port = derived_port("pmi")
    assert resolve(spread | {"MASTER_ADDR": "a"}).rendezvous == f"tcp://a:{port}"
    assert resolve(spread | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}).rendezvous == "tcp://a:5"
    assert resolve(spread | {"PARTI_RENDEZVOUS": "tcp://b:6"}).rendezvous == "tcp://b:6"
    allocated = spread | {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[3-4]"}
    assert str(resolve(allocated).rendezvous).startswith("tcp://n3:")


def test_mpirun_s_address_serves_only_where_rank_0_is_beside_it() -> None:
    spread = without(OPEN_MPI, "MASTER_ADDR") | {
        "OMPI_MCA_orte_hnp_uri": "9.0;tcp://10.0.0.1,192.168.0.1:5000;tcp6://[fd00::2]:5001",
        "OMPI_MCA_orte_local_daemon_uri": "9.1;tcp://10.0.0.2:5002",
    }
    assert str(resolve(spread).rendezvous).startswith("tcp://10.0.0.1:")
    first = spread | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    # Slurm's list is no way out: the other ranks cannot see that rank 0 is elsewhere.
    first |= {"SLURM_JOB_NODELIST": "n[3-4]"}
    assert "expected MASTER_ADDR" in complaint(first)
    beside = first | {"OMPI_MCA_orte_local_daemon_uri": first["OMPI_MCA_orte_hnp_uri"]}
    assert str(resolve(beside).rendezvous).startswith("tcp://10.0.0.1:")
    six = spread | {"OMPI_MCA_orte_hnp_uri": "9.0;tcp6://[fd00::2]:5001"}
    assert str(resolve(six).rendezvous).startswith("tcp://[fd00::2]:")


@pytest.mark.parametrize(
    ("rank", "local_rank", "size", "local_size", "node"),
    [
        (5, 1, 6, 2, (2, 3)),  # hosts filled in turn
        (2, 0, 6, 2, (1, 3)),
        (3, 1, 6, 2, (1, 3)),
        (1, 0, 6, 2, (1, 3)),  # dealt round robin: rank 1 is the first of the second host
        (0, 0, 6, 2, (0, 3)),
        (4, 0, 5, 1, (4, 5)),
        (1, 1, 3, 2, (0, 2)),  # uneven
        (2, 0, 3, 1, (2, 3)),
    ],
)
def test_mpi_nodes_follow_from_local_ranks(
    rank: int, local_rank: int, size: int, local_size: int, node: tuple[int, int]
) -> None:
    numbers = (rank, size, local_rank, local_size)
    environ = dict(zip(OPEN_MPI, map(str, numbers), strict=False)) | {"MASTER_ADDR": "a"}
    place = from_open_mpi(environ)
    assert place is not None
    assert (place.node_rank, place.num_nodes) == node


def test_pmi_in_its_spellings() -> None:
    place = from_pmi(PMI)
    assert place is not None
    assert (place.rank, place.local_rank, place.num_nodes) == (1, 1, 1)
    cray = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    place = resolve(cray | {"PALS_APID": "3f2a"})
    assert (place.local_world_size, place.job) == (2, "pmi-3f2a")


@pytest.mark.parametrize("name", PMI)
def test_pmi_needs_all_of_its_variables(name: str) -> None:
    assert f"{name} is not set, although PMI_" in complaint(without(PMI, name))


def test_pmi_by_srun_gives_way_and_hydra_within_a_step_does_not() -> None:
    by_srun = SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5"}
    assert resolve(by_srun).origin is Origin.SLURM
    assert resolve(SLURM | PMI).origin is Origin.PMI


# ---- TF_CONFIG ---------------------------------------------------------------------------------

CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


@pytest.mark.parametrize(
    ("kind", "index", "node_rank", "in_world"),
    [
        ("chief", 0, 0, True),
        ("worker", 0, 1, True),
        ("worker", 1, 2, True),
        ("ps", 0, 0, False),
        ("evaluator", 0, 0, False),
    ],
)
def test_a_chief_is_worker_0(kind: str, index: int, node_rank: int, in_world: bool) -> None:
    place = from_tf_config(tf_config(CHIEF, kind, index))
    assert place is not None
    assert (place.node_rank, place.in_world) == (node_rank, in_world)
    assert place.num_nodes == (3 if in_world else 1)
    assert place.rendezvous == "tcp://a:1"
    assert (place.task_type, place.task_index) == (kind, index)
    assert place.cluster == ClusterSpec(CHIEF)


def test_without_a_chief_worker_0_is_the_chief() -> None:
    place = resolve(tf_config({"worker": ["b:1", "c:1"]}, "worker", "1"))
    assert (place.node_rank, place.num_nodes, place.rendezvous) == (1, 2, "tcp://b:1")


def test_a_chief_alone_meets_nobody() -> None:
    place = resolve(tf_config({"chief": ["a:1"]}, "chief"))
    assert (place.num_nodes, place.rendezvous) == (1, None)


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}}', '{"environment": "cloud"}'])
def test_a_tf_config_without_a_cluster_is_none(text: str) -> None:
    assert from_tf_config({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TF_CONFIG": "{'cluster': 1}"}, "expected JSON, but found:"),
        ({"TF_CONFIG": "[" * 100_000}, "expected JSON"),
        ({"TF_CONFIG": "[1]"}, "expected a JSON object"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, '"cluster" with the addresses'),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, '"task" with "type" and "index"'),
        (tf_config({"worker": ["a:1"]}, "worker", 1), "index from 0 to 0, not 1"),
        (tf_config({"worker": ["a:1"]}, "worker", -1), "an integer of at least 0 as task index"),
        (tf_config({"worker": ["a:1"]}, "worker", True), "an integer of at least 0 as task index"),
        (tf_config({"worker": ["a:1"]}, "worker", None), "an integer of at least 0 as task index"),
        (tf_config({"worker": ["a:1"]}, "boss"), "chief, worker, ps, evaluator, not 'boss'"),
        (tf_config({"worker": ["a:1"]}, ["ps"]), "chief, worker, ps, evaluator, not ['ps']"),
        (tf_config({"master": ["a:1"]}, "master"), "'master' is called 'chief'"),
        (tf_config({"worker": ["a:1"]}, "chief"), 'addresses of job "chief"'),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "one chief, not 2"),
        (tf_config({"ps": ["a:1"]}, "ps"), "a chief or workers in the cluster"),
        (tf_config({"worker": ["a"]}), "Task 0 of job 'worker' is 'a': expected host:port"),
        (tf_config({"worker": ["a:1", "a:1"]}), "a:1 is the address of both"),
    ],
)
def test_tf_config_refuses(environ: dict[str, str], said: str) -> None:
    text = complaint(environ)
    assert text.startswith("TF_CONFIG")
    assert said in text
    assert len(text) < 900


# ---- Slurm -------------------------------------------------------------------------------------


def test_slurm_ranks_meet_at_the_first_node() -> None:
    place = from_slurm(SLURM)
    assert place is not None
    assert place.rendezvous == f"tcp://n1:{derived_port('slurm-7.0')}"
    assert resolve(SLURM | {"MASTER_ADDR": "m"}).rendezvous != place.rendezvous
    assert resolve(SLURM | {"MASTER_PORT": "29500"}).rendezvous == "tcp://n1:29500"
    other_step = resolve(SLURM | {"SLURM_STEP_ID": "1"})
    assert other_step.rendezvous != place.rendezvous
    assert resolve(SLURM | {"SLURM_RESTART_COUNT": "2"}).job == "slurm-7.0-restart2"
    in_a_file = SLURM | {"PARTI_RENDEZVOUS": "file:///shared/meet"}
    assert "tcp://host:port, as the job has several hosts" in complaint(in_a_file)


def test_slurms_older_spellings() -> None:
    old = without(SLURM, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    old = without(old, "SLURM_STEP_TASKS_PER_NODE") | {
        "SLURM_JOBID": "7",
        "SLURM_STEPID": "0",
        "SLURM_NODELIST": "n[1-3]",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
    }
    assert place_of(old) == place_of(SLURM)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID='5': expected less than SLURM_NTASKS=5"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID='2': expected less than the tasks of node 1=2"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID='3': expected less than the number of nodes=3"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST='n[1-': expected a host list"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "SLURM_STEP_NODELIST='n[1-2]': expected 3 hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "expected 5 tasks in sum"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "expected counts of tasks like '2(x3),1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE='2'"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID='3': expected 0 in a batch script"),
    ],
)
def test_slurm_refuses(changed: dict[str, str], said: str) -> None:
    assert said in complaint(SLURM | changed)


@pytest.mark.parametrize("step", ["4294967291", "4294967290"])
def test_a_batch_script_and_an_interactive_shell_are_no_steps(step: str) -> None:
    allocation = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_PROCID": "0"}
    assert resolve(allocation | {"SLURM_JOB_NUM_NODES": "1"}).level is Level.HOST
    text = complaint(allocation | {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert "2 nodes" in text
    assert "srun --ntasks-per-node=1" in text


# ---- Kubernetes --------------------------------------------------------------------------------


def test_kubeflow_counts_pods() -> None:
    place = from_kubeflow(PET)
    assert place is not None
    assert (place.rendezvous, place.requested_local_world_size) == ("tcp://a-0.a:29500", None)
    assert resolve(PET | {"PET_NPROC_PER_NODE": "8"}).requested_local_world_size == 8
    fixed = without(PET, "PET_MASTER_ADDR") | {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "w-0:5"}
    assert resolve(fixed).rendezvous == "tcp://w-0:5"
    by_index = without(PET, "PET_NODE_RANK") | {"JOB_COMPLETION_INDEX": "1"}
    assert place_of(by_index) == place_of(PET)


def test_torchrun_in_a_pod_of_kubeflow_decides() -> None:
    assert resolve(PET | POD | TORCH).origin is Origin.TORCHRUN
    assert resolve(POD).origin is Origin.KUBERNETES


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (PET | {"PET_NNODES": "1:3"}, "PET_NNODES='1:3': expected one number of nodes"),
        (PET | {"PET_NNODES": "0"}, "PET_NNODES='0': expected one number of nodes"),
        (PET | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK='2': expected less than PET_NNODES=2"),
        (PET | {"PET_MASTER_PORT": "x"}, "PET_MASTER_PORT='x': expected a TCP port"),
        (PET | {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE='0': expected an integer of at"),
        (PET | {"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE='all': expected an integer"),
        (without(PET, "PET_NODE_RANK"), "PET_NODE_RANK is not set, although PET_NNODES is"),
        (without(PET, "PET_NNODES"), "PET_NNODES is not set, although PET_NODE_RANK is"),
        (without(PET, "PET_MASTER_ADDR"), "PET_MASTER_ADDR is not set"),
        (PET | {"PARTI_RENDEZVOUS": "file:///tmp"}, "as the job has several hosts"),
        (POD | {"RANK": "2"}, "RANK='2': expected less than WORLD_SIZE=2"),
        (without(POD, "WORLD_SIZE"), "WORLD_SIZE is not set, although RANK is"),
        (without(POD, "MASTER_ADDR"), "MASTER_ADDR is not set, although RANK is"),
        (INDEXED | {"PARTI_NUM_NODES": "0"}, "PARTI_NUM_NODES='0': expected an integer of at"),
        (POD | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0': expected an integer of at least 1"),
        (INDEXED | {"JOB_COMPLETION_INDEX": "2"}, "='2': expected less than PARTI_NUM_NODES=2"),
        (without(INDEXED, "PARTI_NUM_NODES"), "PARTI_NUM_NODES is not set"),
        (without(INDEXED, "PARTI_SERVICE"), "PARTI_SERVICE is not set"),
        (without(INDEXED, "HOSTNAME"), "HOSTNAME is not set"),
        (INDEXED | {"HOSTNAME": "node17"}, "HOSTNAME='node17': expected the pod's name"),
        (INDEXED | {"PARTI_SERVICE": "a b"}, "PARTI_SERVICE='a b': expected the name"),
    ],
)
def test_kubernetes_refuses(environ: dict[str, str], said: str) -> None:
    text = complaint(environ)
    assert text.startswith(said) or not said[0].isupper()
    assert said in text


def test_an_indexed_job_says_where_index_0_is() -> None:
    place = from_indexed_job(INDEXED)
    assert place is not None
    assert place.rendezvous == "tcp://digits-0.pods:29400"
    full = without(INDEXED, "PARTI_SERVICE", "HOSTNAME") | {"PARTI_RENDEZVOUS": "tcp://x:1"}
    assert resolve(full).rendezvous == "tcp://x:1"
    of_its_own = {"JOB_COMPLETION_INDEX": "5", "PARTI_NUM_NODES": "1"}
    assert place_of(of_its_own) == (Level.HOST, None, None, 0, 1)


# ---- names and ports ---------------------------------------------------------------------------


def test_job_names_are_fit_for_files_and_stay_apart() -> None:
    assert job_name("slurm", "7.0") == "slurm-7.0"
    odd = {job_name("torch", run) for run in ("a/b", "a b", "a-b", "ü" * 100, "ü" * 101)}
    assert len(odd) == 5
    assert all(len(name) <= 80 and name.isascii() and "/" not in name for name in odd)


def test_ports_are_the_same_for_a_job_and_spread_over_jobs() -> None:
    ports = {derived_port(f"slurm-{job}.0") for job in range(200)}
    assert derived_port("slurm-1.0") == 23704
    assert len(ports) > 190
    assert all(20000 <= port < 30000 for port in ports)
