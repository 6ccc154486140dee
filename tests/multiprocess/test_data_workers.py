"""Worker processes: the same data whoever reads it, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from parti.data.batches import Feed
from parti.errors import DataError

SOURCE = Path(__file__).parents[2] / "src"
NUM_SAMPLES = 50


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = [torch.rand(()).item(), random.random(), np.random.rand()]
        return {"index": index, "draws": torch.tensor(draws), "process": os.getpid()}


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first = 0 if worker is None else 1000  # a stream that shards itself must not notice
        for index in range(NUM_SAMPLES):
            draws = torch.tensor([torch.rand(()).item(), random.random()])
            yield {"index": first + index, "draws": draws, "process": os.getpid()}


def read(data: Any, *, owned: Callable[[int], Any] = range, **settings: Any) -> dict[Any, Any]:
    settings = {"batch_size": 16, "micro_batches": 4, "epochs": 2, **settings}
    found = {}
    for batch in Feed(data, owned=owned, **settings):
        for piece in batch.micro_batches:
            key = (batch.epoch, batch.step_in_epoch, piece.number, batch.is_last_of_epoch)
            found[key] = (piece.data["index"].tolist(), piece.data["draws"].tolist())
    return found


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert gone(children()), "a test left a process behind"


def gone(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_data_for_any_number_of_workers(workers: int) -> None:
    reference = read(Noisy())
    assert read(Noisy(), workers=workers) == reference
    owned = range(1, 3)
    part = read(Noisy(), workers=workers, owned=lambda active: [n for n in owned if n < active])
    assert part == {key: value for key, value in reference.items() if key[2] in owned}


def test_the_same_stream_read_ahead() -> None:
    reference = read(NoisyStream())
    assert len(reference) == 2 * (4 * 3 + 2)
    assert read(NoisyStream(), workers=1) == reference
    part = read(NoisyStream(), workers=1, owned=lambda active: range(1, active))
    assert part == {key: value for key, value in reference.items() if key[2] >= 1}


@pytest.mark.parametrize("data", [Noisy(), NoisyStream()])
def test_ownership_may_change_while_data_is_read_ahead(data: Any) -> None:
    held = [0, 1]
    reference = read(data)
    feed = Feed(
        data,
        batch_size=16,
        micro_batches=4,
        epochs=2,
        workers=1,
        owned=lambda active: [n for n in held if n < active],
    )
    found = {}
    for batch, next_held in zip(feed, ([0, 1], [2], [2, 3], [], [], [1], [0, 1], [3]), strict=True):
        assert [piece.number for piece in batch.micro_batches] == [
            n for n in held if n < batch.num_micro_batches
        ]
        for piece in batch.micro_batches:
            key = (batch.epoch, batch.step_in_epoch, piece.number, batch.is_last_of_epoch)
            found[key] = (piece.data["index"].tolist(), piece.data["draws"].tolist())
        held[:] = next_held
    assert found.items() <= reference.items()
    assert len(found) == 2 + 2 + 1 + 0 + 0 + 0 + 1 + 2


def test_workers_live_through_all_epochs_and_read_in_other_processes() -> None:
    processes = set()
    for batch in Feed(Noisy(), batch_size=10, micro_batches=2, epochs=3, workers=2, owned=range):
        for piece in batch.micro_batches:
            processes |= set(piece.data["process"].tolist())
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_random_states_of_the_process_are_not_touched() -> None:
    for data in (Noisy(), NoisyStream()):
        torch.manual_seed(1)
        random.seed(1)
        expected = torch.rand(()).item(), random.random()
        torch.manual_seed(1)
        random.seed(1)
        read(data, workers=1)
        assert (torch.rand(()).item(), random.random()) == expected


@pytest.mark.parametrize(("data", "workers"), [(Noisy(), 2), (NoisyStream(), 1)])
def test_a_loop_that_is_left_ends_the_workers(data: Any, workers: int) -> None:
    def first_batch() -> list[psutil.Process]:
        for _ in Feed(data, batch_size=4, workers=workers, owned=range):
            started = children()
            break
        return started

    started = first_batch()
    assert len(started) == workers
    assert gone(started)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample(workers: int) -> None:
    class UnpicklableError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("cannot see")

    class Broken(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 33:
                raise UnpicklableError(1, 2)
            return super().__getitem__(index)

    expected = "reading sample 33 of epoch 0 failed: UnpicklableError"
    with pytest.raises(DataError, match=expected) as e:
        read(Broken(), workers=workers)
    if workers:
        assert "raise UnpicklableError(1, 2)" in e.value.__notes__[0]


def test_an_error_in_a_stream_says_where() -> None:
    class Broken(NoisyStream):
        def __iter__(self) -> Iterator[Any]:
            yield from list(super().__iter__())[:7]
            raise OSError("connection lost")

    with pytest.raises(DataError, match="reading item 7 of the stream in epoch 0 failed: OSError"):
        read(Broken(), workers=1, batch_size=4)


def test_a_worker_that_dies_is_reported() -> None:
    class Deadly(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"a data worker ended .* Run with workers=0"):
        read(Deadly(), workers=1)


def test_settings_of_a_data_loader_are_kept(tmp_path: Path) -> None:
    def leave_a_note(worker: int) -> None:
        (tmp_path / str(worker)).write_text("")

    loader = DataLoader(Noisy(), batch_size=16, num_workers=2, worker_init_fn=leave_a_note)
    assert read(loader, batch_size=None) == read(Noisy(), shuffle=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_workers_let_go_of_the_connections_of_the_rank() -> None:
    """A peer sees that the rank has closed a connection, though workers live on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        theirs.settimeout(10)
        with theirs:
            batches = iter(Feed(Noisy(), batch_size=4, workers=1, owned=range))
            next(batches)
            mine.close()
            assert theirs.recv(1) == b""
            next(batches)


SCRIPT = """
    import os, sys, time, torch
    from torch.utils.data import Dataset
    from parti.data.batches import Feed

    class Slow(Dataset):
        num_read = 0
        def __len__(self): return 10**6
        def __getitem__(self, index):
            Slow.num_read += 1
            time.sleep(30 if Slow.num_read > 24 else 0.01)
            return index

    # no `if __name__ == "__main__"`, as in most training scripts
    feed = Feed(
        Slow(), batch_size=8, micro_batches=1, workers=2, owned=range,
        collate=lambda samples: os.getpid(),
    )
    batches = iter(feed)
    pids = sorted({next(batches).micro_batches[0].data for _ in range(6)})
    print(*pids, flush=True)
    if sys.argv[1:] == ["wait"]:
        time.sleep(60)
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_without_a_guard_just_works(tmp_path: Path) -> None:
    process = start(tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert len(out.split()) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_rank(tmp_path: Path, how: signal.Signals) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    process.send_signal(how)
    asked_s = time.monotonic()
    try:
        assert gone(workers, within_s=20)
        if how is signal.SIGKILL:
            assert time.monotonic() - asked_s < 10  # the kernel does it; they would read for 30 s
    finally:
        process.communicate(timeout=30)
