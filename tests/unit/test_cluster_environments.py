"""Recorded environments: what each resolves to, and what is left of it when parts go missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.cluster import Level, Origin, Place, resolve
from parti.errors import ConfigError

DIRECTORY = Path(__file__).parent / "environments"


def read(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


RECORDED = {file.stem: read(file) for file in sorted(DIRECTORY.glob("*.env"))}


def ranks(origin: Origin, rank: str, local: str, node: str, **more: object) -> dict[str, object]:
    """The fields of a rank, its numbers written as 'this/all'."""
    numbers = [int(number) for pair in (rank, local, node) for number in pair.split("/")]
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    return {"origin": origin, "level": Level.RANK, **dict(zip(names, numbers, strict=True)), **more}


def host(origin: Origin, node: str, **more: object) -> dict[str, object]:
    """The fields of a host, its number written as 'this/all'."""
    node_rank, num_nodes = map(int, node.split("/"))
    unset = dict.fromkeys(("rank", "world_size", "local_rank", "local_world_size"))
    numbers = {"node_rank": node_rank, "num_nodes": num_nodes}
    return {"origin": origin, "level": Level.HOST, **unset, **numbers, **more}


PLACES: dict[str, dict[str, object]] = {
    "parti-worker": ranks(
        Origin.PARTI,
        "1/2",
        "1/2",
        "0/1",
        rendezvous="file:///dev/shm/parti-7f3a",
        job="20260101-120000-7f3a",
        host_directory="/dev/shm/parti-7f3a",
        run_directory="/home/user/runs/digits",
    ),
    "parti-by-hand": host(Origin.PARTI, "1/2", rendezvous="tcp://alpha:29400"),
    "torchrun-one-host": ranks(
        Origin.TORCHRUN,
        "1/2",
        "1/2",
        "0/1",
        rendezvous="tcp://localhost:33703",
        store_is_served=True,
        job="torch-80560666-d39a-4dd7-883d-97e44b119d73-33703",
    ),
    "torchrun-two-hosts-in-slurm": ranks(
        Origin.TORCHRUN, "3/4", "1/2", "1/2", store_is_served=True
    ),
    "torchrun-two-hosts-static": ranks(
        Origin.TORCHRUN, "1/2", "0/1", "1/2", rendezvous="tcp://parti-a1:29511"
    ),
    "exported-in-slurm": ranks(
        Origin.TORCHRUN,
        "3/4",
        "1/2",
        "1/2",
        rendezvous="tcp://parti-a1:29500",
        store_is_served=False,
    ),
    "open-mpi-one-host": ranks(
        Origin.OPEN_MPI, "1/2", "1/2", "0/1", rendezvous="tcp://127.0.0.1:25551"
    ),
    "open-mpi-two-hosts": ranks(
        Origin.OPEN_MPI, "3/4", "1/2", "1/2", rendezvous="tcp://10.231.17.11:23630"
    ),
    "hydra-one-host": ranks(Origin.PMI, "1/2", "1/2", "0/1", rendezvous="tcp://127.0.0.1:24074"),
    "hydra-two-hosts": ranks(Origin.PMI, "2/4", "0/2", "1/2", rendezvous="tcp://parti-a1:27558"),
    "tf-config-two-workers": host(
        Origin.TF_CONFIG,
        "0/2",
        rendezvous="tcp://localhost:12345",
        task_type="worker",
        task_index=0,
        in_world=True,
    ),
    "tfjob-chief": host(
        Origin.TF_CONFIG,
        "2/3",
        rendezvous="tcp://digits-chief-0.ml.svc:2222",
        task_type="worker",
        task_index=1,
    ),
    "tf-config-evaluator": host(
        Origin.TF_CONFIG,
        "0/1",
        rendezvous="tcp://host1:2222",
        task_type="evaluator",
        task_index=0,
        in_world=False,
    ),
    "kubeflow-trainer": host(
        Origin.KUBERNETES,
        "1/2",
        rendezvous="tcp://digits-node-0-0.digits:29500",
        requested_local_world_size=4,
    ),
    "pytorchjob-1.8": host(
        Origin.KUBERNETES,
        "1/2",
        rendezvous="tcp://digits-master-0:23456",
        requested_local_world_size=2,
    ),
    "pytorchjob-1.6": host(
        Origin.KUBERNETES,
        "2/3",
        rendezvous="tcp://digits-master-0:23456",
        requested_local_world_size=None,
    ),
    "kubernetes-indexed-job": host(
        Origin.KUBERNETES, "2/3", rendezvous="tcp://digits-0.digits-pods:29400"
    ),
    "slurm-two-ranks-on-one-node": ranks(
        Origin.SLURM, "1/2", "1/2", "0/1", rendezvous="tcp://127.0.0.1:23704", job="slurm-1.0"
    ),
    "slurm-one-task": host(Origin.SLURM, "0/1", rendezvous=None, job="slurm-2.0"),
    "slurm-a-start-on-each-node": host(
        Origin.SLURM, "1/2", rendezvous="tcp://parti-a1:27822", job="slurm-3.0"
    ),
    "slurm-ranks-on-uneven-nodes": ranks(
        Origin.SLURM, "2/3", "0/1", "1/2", rendezvous="tcp://parti-a1:28281"
    ),
    "slurm-ranks-dealt-in-turn": ranks(Origin.SLURM, "3/4", "1/2", "1/2"),
    "slurm-ranks-with-pmi": ranks(Origin.SLURM, "3/4", "1/2", "1/2"),
    "slurm-a-batch-script": host(Origin.SLURM, "0/1", rendezvous=None, job="slurm-7"),
    "slurm-a-batch-script-with-srun": ranks(Origin.SLURM, "3/4", "1/2", "1/2"),
    "slurm-a-smaller-step": host(Origin.SLURM, "0/1"),
    "slurm-an-allocation-of-one-node": host(Origin.SLURM, "0/1"),
}
REFUSED = {
    "slurm-a-batch-script-on-two-nodes": "2 nodes (SLURM_JOB_NUM_NODES)",
    "slurm-a-batch-script-from-within-a-step": "2 nodes (SLURM_JOB_NUM_NODES)",
    "pytorchjob-elastic": "PET_NNODES='1:3'",
}
# The one variable without which nothing of an environment is left; a rule would need to be told.
ONLY_SIGN = {
    "tf-config-two-workers": "TF_CONFIG",
    "tfjob-chief": "TF_CONFIG",
    "tf-config-evaluator": "TF_CONFIG",
}


def world(place: Place) -> tuple[object, ...]:
    """What must never change in silence."""
    return place.level, place.rank, place.world_size, place.node_rank, place.num_nodes


def check(environ: Mapping[str, str]) -> Place | None:
    """The place, fit in itself, or None where the environment is refused as it should be."""
    try:
        place = resolve(environ)
    except ConfigError:
        return None
    assert place.why.endswith(".")
    assert 0 <= place.node_rank < place.num_nodes
    several = place.num_nodes > 1
    numbers = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    if place.level is Level.RANK:
        rank, world_size, local_rank, local_world_size = (number or 0 for number in numbers)
        assert None not in numbers
        assert 0 <= rank < world_size
        assert 0 <= local_rank < local_world_size <= world_size
        assert place.job
        several = world_size > 1
    else:
        assert numbers == (None,) * 4
    if several:
        assert place.rendezvous is not None
        assert place.rendezvous.startswith(("tcp://", "file:///"))
    return place


def test_every_recorded_environment_is_expected() -> None:
    assert set(RECORDED) == set(PLACES) | set(REFUSED)


@pytest.mark.parametrize("name", PLACES)
def test_resolves(name: str) -> None:
    place = check(RECORDED[name])
    assert place is not None, resolve(RECORDED[name])
    expected: dict[str, Any] = PLACES[name]
    assert {field: getattr(place, field) for field in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(RECORDED[name])
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("name", PLACES)
def test_a_missing_variable_never_changes_the_world(name: str) -> None:
    """Without any one variable the same world is found, or an error is raised: no process is ever
    left to train alone because one name was lost."""
    environ = RECORDED[name]
    expected = world(resolve(environ))
    for lost in environ.keys() - {ONLY_SIGN.get(name)}:
        place = check({key: value for key, value in environ.items() if key != lost})
        assert place is None or world(place) == expected, f"without {lost}: {place}"


names = st.sampled_from(sorted(RECORDED))
junk = st.one_of(
    st.sampled_from(
        [
            *("", " ", "-1", "0", "1", "2", "3", "99999999999", "1.5", "٣", "x", "True", "null"),
            *("n[1-2]", "[", "{}", "2(x2)", "0(x2)", "1:2", "a:b", "localhost", "tcp://"),
            "file:///x",
        ]
    ),
    st.text(max_size=5),
)


@settings(deadline=None)
@given(names, st.data())
def test_parts_of_an_environment_are_a_place_or_an_error(name: str, data: st.DataObject) -> None:
    keys = sorted(RECORDED[name])
    kept = data.draw(st.sets(st.sampled_from(keys)))
    check({key: RECORDED[name][key] for key in kept})


@settings(deadline=None)
@given(names, st.data())
def test_junk_in_an_environment_is_a_place_or_an_error(name: str, data: st.DataObject) -> None:
    keys = sorted(RECORDED[name])
    changed = data.draw(st.dictionaries(st.sampled_from(keys), junk, max_size=3))
    check(RECORDED[name] | changed)


@settings(deadline=None)
@given(names, names)
def test_one_environment_within_another_is_a_place_or_an_error(outer: str, inner: str) -> None:
    place = check(RECORDED[outer] | RECORDED[inner])
    if outer == inner and outer in PLACES:
        assert place is not None


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({k for e in RECORDED.values() for k in e})), junk))
def test_any_variables_are_a_place_or_an_error(environ: dict[str, str]) -> None:
    check(environ)
