"""`parti run` on one host, with real processes: output, exit codes, failures."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import parti

if TYPE_CHECKING:
    from tests.multiprocess.launch.conftest import Bench, Hub

DEADLINE_S = 60.0


def test_rank_0_speaks_and_every_rank_has_its_log(bench: Bench) -> None:
    script = """
        print("hello from", rank, *sys.argv[1:])
        print("problem", rank, file=sys.stderr)
    """
    code, out, err = bench.finish(bench.run("-n 3 --name mine", script, "-n", "--x"))
    assert code == 0
    assert out == "hello from 0 -n --x\n"
    assert err == "problem 0\n"
    assert (bench.directory / "runs" / "latest").resolve().name == "mine"
    for rank in (1, 2):
        text = bench.read(f"rank{rank}.log")
        assert text == f"hello from {rank} -n --x\nproblem {rank}\n"
    assert "hello from 0" in bench.read("rank0.log")
    record = json.loads(bench.read("run.json"))
    assert record["world_size"] == 3
    assert record["exit_code"] == 0
    assert record["ended"] is not None
    assert bench.leftovers() == []


def test_a_module_finds_its_package(bench: Bench) -> None:
    (bench.directory / "job").mkdir()
    (bench.directory / "job" / "__main__.py").write_text(
        "import sys; print(__name__, sys.argv[1:])"
    )
    process = bench.run("-n 1 -m job a", "")
    code, out, _ = bench.finish(process)
    assert (code, out) == (0, "__main__ ['a', 'script.py']\n")


def test_the_first_failure_ends_the_job_within_a_second(bench: Bench, hub: Hub) -> None:
    script = """
        import parti.launch
        parti.launch.install()
        wait()
        if rank == 1:
            raise ValueError(f"boom at {time.monotonic()}")
        wait()
    """
    process = bench.run("-n 2", script)
    hub.gather(2)
    hub.release()
    code, _, err = bench.finish(process)
    ended_s = time.monotonic()
    hub.await_end()
    assert code == 1
    assert "parti: rank 1 failed with exit code 1\nTraceback (most recent call last):\n" in err
    assert 'script.py", line 14' in err
    failed_s = float(err.split("ValueError: boom at ")[1].split()[0])
    assert ended_s - failed_s < 1.0
    assert "ValueError: boom" in bench.read("rank1.log")
    record = json.loads(bench.read("run.json"))
    assert record["exit_code"] == 1
    assert "rank 1 failed" in record["failure"]
    assert bench.leftovers() == []


def test_only_the_cause_is_shown_in_full(bench: Bench, hub: Hub) -> None:
    script = """
        import parti.launch
        from parti.errors import PeerLost
        parti.launch.install()
        if rank == 1:
            raise ValueError("the cause")
        while not os.path.exists(os.environ["PARTI_HOST_DIR"] + "/failures/1.json"):
            time.sleep(0.001)
        raise PeerLost("rank 1 is gone")
    """
    code, out, err = bench.finish(bench.run("-n 2", script))
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert "ValueError: the cause" in err
    assert (out + err).count("Traceback (most recent call last)") == 1


def test_a_report_is_summed_up_without_notes(bench: Bench) -> None:
    """Notes come last where a traceback is printed; the line that is folded is the error's own."""
    bench.write(
        "script.py",
        """
import os
os.makedirs("failures")
os.environ |= {"PARTI_RANK": "3", "PARTI_HOST_DIR": os.getcwd()}
import parti.launch
parti.launch.install()
error = ValueError("the first line\\nand the second")
error.add_note("a note")
raise error
""",
    )
    code, _, _ = bench.finish(bench.python("script.py"))
    assert code == 1
    report = json.loads((bench.directory / "failures" / "3.json").read_text())
    assert report["summary"] == "ValueError: the first line"
    assert "a note" in report["traceback"]


def test_rank_0s_own_traceback_is_shown_once(bench: Bench) -> None:
    script = """
        import parti.launch
        parti.launch.install()
        if rank == 0:
            raise KeyError("mine")
        wait()
    """
    code, out, err = bench.finish(bench.run("-n 2", script))
    assert code == 1
    assert (out + err).count("KeyError: 'mine'") == 1


def test_without_a_report_the_output_tells(bench: Bench) -> None:
    code, _, err = bench.finish(bench.run("-n 2", "1 / 0 if rank == 1 else wait()"))
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert "ZeroDivisionError: division by zero" in err


def test_exit_codes_pass_through(bench: Bench) -> None:
    code, _, err = bench.finish(bench.run("-n 2", "sys.exit(7) if rank == 1 else wait()"))
    assert code == 7
    assert "rank 1 failed with exit code 7" in err


def test_a_worker_that_is_killed_is_named(bench: Bench, hub: Hub) -> None:
    process = bench.run("-n 2", "wait()")
    pids = hub.gather(2)
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = bench.finish(process)
    hub.await_end()
    assert code == 137
    assert "rank 1 was killed by SIGKILL" in err


def test_a_crash_shows_where_python_was(bench: Bench) -> None:
    script = """
        import faulthandler
        faulthandler._sigsegv() if rank == 1 else wait()
    """
    code, _, err = bench.finish(bench.run("-n 2", script))
    assert code == 139
    assert "rank 1 was killed by SIGSEGV" in err
    assert "Segmentation fault" in err
    assert "script.py" in err


def test_one_that_raised_but_cannot_exit_ends_the_job(bench: Bench, hub: Hub) -> None:
    script = """
        import threading
        import parti.launch
        parti.launch.install()
        if rank == 1:
            threading.Thread(target=wait).start()
            raise ValueError("and a thread lives on")
        wait()
    """
    code, _, err = bench.finish(bench.run("-n 2", script))
    assert code == 1
    assert "ValueError: and a thread lives on" in err


def test_workers_that_ignore_sigterm_are_killed(bench: Bench, hub: Hub) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
        sys.exit(5) if rank == 1 else wait()
    """
    process = bench.run("-n 2", script)
    hub.gather(2)
    hub.release()
    code, _, _ = bench.finish(process)
    hub.await_end()
    assert code == 5


def test_what_a_worker_started_ends_with_it(bench: Bench, hub: Hub) -> None:
    script = """
        child = os.fork()
        if child == 0:
            rank = 10
            wait()
        elif rank == 0:
            wait()
            sys.exit(0)
        sys.exit(3) if rank == 1 else wait()
    """
    process = bench.run("-n 1", script)
    hub.gather(2)
    hub.release()
    code, _, _ = bench.finish(process)
    hub.await_end()
    assert code == 0


def test_a_console_nobody_reads_holds_up_nobody_but_rank_0(bench: Bench, hub: Hub) -> None:
    script = """
        print("x" * 5_000_000) if rank == 0 else None
        wait()
        sys.exit(4 if rank == 1 else 0)
    """
    process = bench.run("-n 2", script)
    hub.gather(1)  # rank 1; rank 0 is held at its output
    hub.release()
    assert process.wait(DEADLINE_S) == 4


def test_a_closed_console_does_not_stop_the_training(bench: Bench, hub: Hub) -> None:
    process = bench.run("-n 1", "wait()\nfor k in range(100): print(k)")
    hub.gather(1)
    assert process.stdout is not None
    process.stdout.close()
    hub.release()
    assert process.wait(DEADLINE_S) == 0
    assert bench.read("rank0.log").endswith("98\n99\n")


def test_a_full_disk_does_not_stop_the_training(bench: Bench) -> None:
    run = bench.directory / "runs" / "full"
    run.mkdir(parents=True)
    for rank in range(2):
        (run / f"rank{rank}.log").symlink_to("/dev/full")
    code, out, err = bench.finish(bench.run("-n 2 --name full", "print('a'); print('b')"))
    assert (code, out) == (0, "a\nb\n")
    assert err.count("No space left on device") == 1
    assert "training goes on" in err


def test_mistakes_are_told_without_a_traceback(bench: Bench) -> None:
    (bench.directory / "runs").touch()
    code, _, err = bench.finish(bench.run("-n 1", "pass"))
    assert code == 2
    assert err.startswith("parti: cannot write the run's logs to ")
    assert "Traceback" not in err


def test_the_supervisor_never_imports_torch(bench: Bench) -> None:
    script = """
        maps = open(f"/proc/{os.getppid()}/maps").read()
        print("libtorch" in maps or "libc10" in maps)
    """
    assert bench.finish(bench.run("-n 1", script))[:2] == (0, "False\n")


def test_more_processes_than_cores_are_remarked_on(bench: Bench) -> None:
    count = len(os.sched_getaffinity(0)) + 1
    _, err = bench.run(f"-n {count}", "pass").communicate(timeout=DEADLINE_S)
    assert err.startswith(f"parti: {count} processes share ")
    assert err.count("\n") == 1


def test_the_command_line_without_a_command(bench: Bench) -> None:
    assert bench.finish(bench.python("-m", "parti", "--version")) == (
        0,
        f"parti {parti.__version__}\n",
        "",
    )
    code, out, _ = bench.finish(bench.python("-m", "parti", "--help"))
    assert code == 0
    assert "Run a script on every device" in out
    code, out, _ = bench.finish(bench.python("-m", "parti", "run", "--help"))
    assert code == 0
    assert "--node-rank" in out
