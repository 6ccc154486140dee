"""What a worker finds in its environment."""

from __future__ import annotations

from parti.cluster import Level, Origin, resolve
from parti.launch.environment import (
    ALLOCATOR_SETTINGS,
    Meeting,
    ProcessTuning,
    Seat,
    worker_environment,
)

MEETING = Meeting(
    job="abc", rendezvous="file:///tmp/x", host_directory="/tmp/x", run_directory="/runs/y"
)


def environment(
    user: dict[str, str],
    *,
    cores: int = 8,
    num_local: int = 2,
    threads: int | None = None,
    allocator: bool = True,
    divide: bool = True,
) -> dict[str, str]:
    return worker_environment(
        user,
        seat=Seat(rank=1, world_size=num_local, local_rank=1, local_world_size=num_local),
        meeting=MEETING,
        cores=cores,
        tuning=ProcessTuning(allocator=allocator, threads=divide),
        threads=threads,
    )


def test_the_resolver_reads_back_what_the_launcher_writes() -> None:
    seat = Seat(rank=5, world_size=7, local_rank=1, local_world_size=3, node_rank=2, num_nodes=3)
    meeting = Meeting(
        job="j", rendezvous="tcp://h:1234", host_directory="/tmp/x", run_directory="/runs/y"
    )
    environ = worker_environment({}, seat=seat, meeting=meeting, cores=1, tuning=ProcessTuning())
    place = resolve(environ)
    assert (place.origin, place.level) == (Origin.PARTI, Level.RANK)
    assert (place.rank, place.world_size) == (5, 7)
    assert (place.local_rank, place.local_world_size) == (1, 3)
    assert (place.node_rank, place.num_nodes) == (2, 3)
    assert (place.job, place.rendezvous) == ("j", "tcp://h:1234")
    assert (place.host_directory, place.run_directory) == ("/tmp/x", "/runs/y")


def test_cores_are_divided_among_the_processes_of_a_host() -> None:
    assert environment({}, cores=8, num_local=3)["OMP_NUM_THREADS"] == "2"
    assert environment({}, cores=2, num_local=5)["MKL_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays() -> None:
    user = {"OMP_NUM_THREADS": "6", "MALLOC_TOP_PAD_": "1", "PYTHONFAULTHANDLER": "0", "HOME": "/h"}
    found = environment(user)
    assert user.items() <= found.items()
    assert found["MKL_NUM_THREADS"] == "6"
    assert found["MALLOC_TRIM_THRESHOLD_"] == ALLOCATOR_SETTINGS["MALLOC_TRIM_THRESHOLD_"]


def test_a_number_of_threads_that_was_asked_for_goes_before_all() -> None:
    found = environment({"OMP_NUM_THREADS": "6"}, threads=3, divide=False)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("3", "3")


def test_each_tuning_can_be_turned_off() -> None:
    assert not ALLOCATOR_SETTINGS.keys() & environment({}, allocator=False).keys()
    assert "OMP_NUM_THREADS" not in environment({}, divide=False)
    assert "OMP_NUM_THREADS" in environment({}, allocator=False)


def test_glibc_tunables_of_the_user_are_not_mixed_with_ours() -> None:
    found = environment({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"})
    assert not ALLOCATOR_SETTINGS.keys() & found.keys()


def test_output_is_not_buffered_and_crashes_are_told() -> None:
    found = environment({})
    assert (found["PYTHONUNBUFFERED"], found["PYTHONFAULTHANDLER"]) == ("1", "1")


def test_an_outer_job_does_not_shine_through() -> None:
    outer = environment({})
    inner = worker_environment(
        outer,
        seat=Seat(rank=0, world_size=1, local_rank=0, local_world_size=1),
        meeting=MEETING,
        cores=1,
        tuning=ProcessTuning(),
    )
    assert inner["PARTI_WORLD_SIZE"] == "1"
    assert resolve(inner).rank == 0
