"""Processes that are asked for from Python: a plainly started script, and a function."""

from __future__ import annotations

import io
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import parti.launch
from parti.errors import ConfigError, WorkerFailed
from parti.launch.notebook import launch

if TYPE_CHECKING:
    from tests.multiprocess.launch.conftest import Bench, Hub

ENSURE = """
import os, sys
import parti.launch
print("before", "PARTI_RANK" in os.environ, flush=True)
parti.launch.ensure(2)
print("rank", os.environ["PARTI_RANK"], "of", os.environ["PARTI_WORLD_SIZE"], *sys.argv[1:])
"""


def test_a_script_without_a_main_guard_puts_itself_under_a_supervisor(bench: Bench) -> None:
    bench.write("train.py", ENSURE)
    code, out, err = bench.finish(bench.python("train.py", "--epochs", "3"))
    assert (code, err) == (0, "")
    assert out == "before False\nbefore True\nrank 0 of 2 --epochs 3\n"
    assert bench.read("rank1.log") == "before True\nrank 1 of 2 --epochs 3\n"
    assert bench.leftovers() == []


def test_a_module_and_a_command_do_too(bench: Bench) -> None:
    (bench.directory / "package").mkdir()
    bench.write("package/__main__.py", ENSURE)
    for arguments in (("-m", "package"), ("-c", ENSURE)):
        code, out, err = bench.finish(bench.python(*arguments, "x"))
        assert (code, err) == (0, "")
        assert out.endswith("rank 0 of 2 x\n")


def test_workers_start_where_the_script_did(bench: Bench) -> None:
    (bench.directory / "data").mkdir()
    script = 'import os, parti.launch\nos.chdir("data")\nparti.launch.ensure(2)\nprint(os.getcwd())'
    bench.write("train.py", script)
    code, out, err = bench.finish(bench.python("train.py"))
    assert (code, err) == (0, "")
    assert out == f"{bench.directory / 'data'}\n"


def test_the_exit_code_is_the_jobs(bench: Bench) -> None:
    script = """
        import os, sys, parti.launch
        try:
            parti.launch.ensure(2)
        finally:
            print("tidied up", os.environ.get("PARTI_RANK"), flush=True)
        sys.exit(6 if os.environ["PARTI_RANK"] == "1" else 0)
    """
    bench.write("train.py", textwrap.dedent(script))
    code, out, err = bench.finish(bench.python("train.py"))
    assert code == 6
    assert out == "tidied up 0\ntidied up None\n"
    assert "rank 1 failed with exit code 6" in err


def test_a_script_on_standard_input_cannot_be_run_again(bench: Bench) -> None:
    bench.write("stdin", "import parti.launch; parti.launch.ensure(2)")
    with (bench.directory / "stdin").open() as stdin:
        code, _, err = bench.finish(bench.python("-", stdin=stdin))
    assert code == 1
    assert "ConfigError: several processes cannot be started from the interactive" in err
    assert "parti.launch(fn, strategy)" in err


class TwoProcesses:
    """What the launcher needs to know of a strategy."""

    def num_local_processes(self) -> int:
        return 2


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import tempfile

    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in (directory / "tmp").glob("parti-*/*")]


def test_a_function_runs_on_every_rank_and_rank_0s_result_comes_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = 40

    def train(more: int) -> tuple[int, str, str]:
        print("printed by", os.environ["PARTI_RANK"])
        return captured + more, os.environ["PARTI_RANK"], os.environ["PARTI_WORLD_SIZE"]

    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    assert launch(train, TwoProcesses(), 2) == (42, "0", "2")
    assert shown.getvalue() == "printed by 0\n"
    assert (directory / "runs/latest/rank1.log").read_text() == "printed by 1\n"
    assert leftovers(directory) == []


def test_the_package_itself_is_what_a_user_calls(directory: Path) -> None:
    assert parti.launch(lambda: "done", 1) == "done"  # type: ignore[operator]


def test_a_failure_is_raised_here_with_the_workers_traceback(directory: Path) -> None:
    def train() -> None:
        if os.environ["PARTI_RANK"] == "1":
            raise ValueError("boom")
        signal.pause()

    with pytest.raises(WorkerFailed) as failed:
        launch(train, 2)
    text = str(failed.value)
    assert text.startswith("rank 1 failed with exit code 1\nTraceback")
    assert 'raise ValueError("boom")' in text
    assert leftovers(directory) == []


def test_a_result_that_cannot_travel_is_the_workers_failure(directory: Path) -> None:
    def train() -> object:
        import threading

        return threading.Lock()

    with pytest.raises(WorkerFailed, match=r"cannot pickle '_thread\.lock' object"):
        launch(train, 1)


def test_a_function_that_cannot_travel_is_refused(directory: Path) -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match="'<lambda>' cannot be sent to other processes"):
        launch(lambda: lock, 1)


def test_arguments_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="got a TwoProcesses and a function; expected a function"):
        launch(TwoProcesses(), lambda: None)  # type: ignore[arg-type]


def test_an_interrupt_stays_one_and_leaves_no_worker(bench: Bench, hub: Hub) -> None:
    script = """
        import os, signal
        from parti.launch.notebook import launch
        def train():
            import socket
            hub = socket.create_connection(("127.0.0.1", int(os.environ["HUB"])))
            hub.sendall(f"{os.environ['PARTI_RANK']} {os.getpid()}\\n".encode())
            hub.recv(1)
        try:
            launch(train, 2)
        except KeyboardInterrupt:
            print("interrupted")
    """
    bench.write("notebook.py", textwrap.dedent(script))
    process = bench.python("notebook.py")
    hub.gather(2)
    process.send_signal(signal.SIGINT)
    assert bench.finish(process) == (0, "interrupted\n", "")
    hub.await_end()
    assert bench.leftovers() == []
