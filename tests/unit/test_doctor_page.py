"""The page that `parti doctor` prints, and what it says to a wrong path."""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parti.cli import application
from parti.data.batches import Batch
from parti.data.order import Position
from parti.doctor.check import check
from parti.doctor.command import find, look
from parti.doctor.page import page
from parti.doctor.run import State, read_run
from parti.engine.commit_log import CommitLog
from parti.errors import ConfigError
from parti.monitor.commits import CommitFile

CLOCK_S = 0.0
"""Where the times of these runs begin: every record is later than every event."""
FACTS = {
    "command": ["parti", "run", "-n", "2", "my script.py"],
    "job": "j",
    "hosts": ["here"],
    "world_size": 2,
    "started": "2026-01-02T03:04:05+0000",
    "ended": None,
    "exit_code": None,
    "failure": None,
}
PLACES = [
    {"member": 0, "rank": 0, "phase": "reduce", "step": 4, "for_s": 30.9, "is_waiting": True},
    {"member": 1, "rank": 1, "phase": "backward", "step": 4, "for_s": 31.0, "is_waiting": False},
]


def _write(directory: Path, *events: dict[str, object], **facts: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps({**FACTS, **facts}))
    began = {
        "kind": "began", "at_s": 0, "time": 0.0, "job": "j", "host": platform.node(),
        "world_size": 2, "clock_s": CLOCK_S,
    }  # fmt: skip
    called = {"kind": "called", "at_s": 1.5, "generation": 1, "members": [0, 1], "joining": []}
    lines = [json.dumps(event) + "\n" for event in (began, called, *events)]
    (directory / "events.jsonl").write_text("".join(lines))
    return directory


def _commit(log: CommitLog, steps: range, rank: int, size: int = 2, generation: int = 1) -> None:
    for step in steps:
        batch = Batch(
            step_in_epoch=step, epoch=0, num_samples=8, num_micro_batches=2, micro_batches=(),
            is_last_of_epoch=False, read=lambda numbers: (),
        )  # fmt: skip
        first, end = 2 * rank // size, 2 * (rank + 1) // size
        log.committed(
            generation, step, batch,
            first=first, end=end, num_samples=4 * (end - first), has_finished=False,
        )  # fmt: skip


def _log(directory: Path, member: int) -> CommitLog:
    return CommitFile(directory / f"commits-{member}.bin", job="j", member=member).log(0)


def _train(directory: Path, num_steps: int) -> None:
    for member in (0, 1):
        log = _log(directory, member)
        log.began(1, 0, Position())
        _commit(log, range(num_steps), member)


def _lost(**values: object) -> dict[str, object]:
    return {
        "kind": "lost", "at_s": 35.5, "member": 1, "rank": 1, "pid": 88, "how": "killed by SIGKILL",
        "is_consequence": False, "phase": "backward", "step": 4, "for_s": 0.125, "stack": None,
        **values,
    }  # fmt: skip


def _ended(code: int, reason: str = "all processes are through") -> dict[str, object]:
    return {"kind": "ended", "at_s": 36.0, "exit_code": code, "reason": reason}


def _page(directory: Path) -> str:
    run = read_run(directory)
    return page(run, check(run))


def test_a_run_that_ended_well(tmp_path: Path) -> None:
    """One was lost, and another came."""
    directory = _write(
        tmp_path / "well",
        _lost(),
        {"kind": "called", "at_s": 35.6, "generation": 2, "members": [0], "joining": []},
        {"kind": "called", "at_s": 35.7, "generation": 3, "members": [0, 2], "joining": [2]},
        {"kind": "settled", "at_s": 35.8, "generation": 3},
        _ended(0),
        ended="2026-01-02T03:04:41+0000",
        exit_code=0,
    )
    logs = [_log(directory, member) for member in (0, 1, 2)]
    for member in (0, 1):
        logs[member].began(1, 0, Position())
        _commit(logs[member], range(4), member)
    _commit(logs[0], range(4, 6), 0, size=1, generation=2)
    logs[2].joined(3, 6, 0)
    logs[2].began(3, 6, Position(step_in_epoch=6))
    _commit(logs[0], range(6, 8), 0, generation=3)
    _commit(logs[2], range(6, 8), 1, generation=3)
    text = _page(directory)
    first, command, hosts, started, last, *_ = text.splitlines()
    assert first == "run well: ended well, 36.0 s after its start"
    assert command == "  command: parti run -n 2 'my script.py'"
    assert hosts == "  hosts:   here; 2 processes"
    assert started == "  started: 2026-01-02T03:04:05+0000; ended: 2026-01-02T03:04:41+0000"
    assert last.startswith("  last committed: step 7, batch 7 of epoch 0, in generation 3, at ")
    told = " ".join(text.split())
    assert (
        "35.500 s process 1 (rank 1, pid 88) was lost in backward of step 4: killed by SIGKILL; "
        "step 0 was committed" in told
    )
    assert (
        "35.700 s process 2 joined (generation 3, 2 processes) at step 6, with the state of "
        "process 0; step 6 was committed 0.0" in told
    )
    assert told.endswith("every sample of it counted once")
    assert "diagnosis" not in text


def test_the_process_that_ended_a_run_is_shown_with_those_who_waited(tmp_path: Path) -> None:
    stack = "Traceback (most recent call last):\n  File ...\nValueError: boom"
    directory = _write(
        tmp_path / "bad",
        {"kind": "seen", "at_s": 35.4, "why": "the job is ended", "places": PLACES},
        _lost(how="ValueError: boom", stack=stack),
        _lost(member=0, rank=0, how="PeerLost: rank 1 has ended", is_consequence=True, at_s=35.6),
        _ended(1, "rank 1 failed with exit code 1"),
        exit_code=1,
        failure=f"rank 1 failed with exit code 1\n{stack}",
    )
    _train(directory, 4)
    text = _page(directory)
    assert text.startswith("run bad: ended with exit code 1, 36.0 s after its start\n")
    assert (
        f"process 1 (rank 1, pid 88) on {platform.node()} ended the run: ValueError: boom" in text
    )
    assert (
        "  it was in backward of step 4 (the backward pass) for 0.1 s, 35.5 s after the start\n"
        "  process 0 (rank 0) waited for others in reduce of step 4 (adding up gradients with the "
        "others) for\n    30.9 s\n"
        "  stack:\n"
        "    Traceback (most recent call last):\n"
        "      File ...\n"
        "    ValueError: boom\n" in text
    )
    assert "process 0 (rank 0, pid 88) ended because of it: PeerLost: rank 1 has ended" in text


def test_a_failure_without_a_stack_is_told_in_the_words_of_its_time(tmp_path: Path) -> None:
    failure = "rank 1 failed with exit code 3\nthe last line of its output\nlog: runs/x/rank1.log"
    directory = _write(
        tmp_path / "bad",
        _lost(how="exit code 3", phase=None, step=None, for_s=None),
        _ended(3, "rank 1 failed with exit code 3"),
        failure=failure,
    )
    text = _page(directory)
    assert "ended the run: exit code 3\n  it had committed no step yet, 35.5 s after" in text
    assert "    the last line of its output\n    log: runs/x/rank1.log" in text
    assert "was lost: exit code 3\n" in text
    assert "history of commits: no step was recorded" in text


def test_a_failure_on_another_host_is_told_with_its_host(tmp_path: Path) -> None:
    """Its supervisor counts its own processes, and its own seconds."""
    directory = _write(
        tmp_path / "hosts",
        _lost(member=0, rank=0, how="PeerLost: rank 2 has ended", is_consequence=True, at_s=9.0),
        _ended(1, "rank 2 on there failed with exit code 1"),
        hosts=["here", "there"],
        world_size=3,
    )
    there = {"kind": "began", "at_s": 0, "time": 3.0, "job": "j", "host": "there", "clock_s": 777.0}
    lost = _lost(member=0, rank=2, how="ValueError: boom", at_s=5.5, phase=None)
    lines = [json.dumps(event) + "\n" for event in (there, lost)]
    (directory / "events-node1.jsonl").write_text("".join(lines))
    text = _page(directory)
    assert "  process 2 (rank 2, pid 88) on there ended the run: ValueError: boom\n" in text
    assert "  it had committed no step yet, 8.5 s after the start" in text


def test_commits_that_other_hosts_have_are_asked_for(tmp_path: Path) -> None:
    directory = _write(tmp_path / "hosts", _ended(0), hosts=["here", "there"])
    log = _log(directory, 0)
    log.began(1, 0, Position())
    _commit(log, range(3), 0)
    (words,) = check(read_run(directory))
    assert words.startswith("the commits of process 1 are not in this directory")


def test_who_holds_up_a_run_that_goes_on(tmp_path: Path) -> None:
    now_s = time.monotonic()
    seen = {"kind": "seen", "at_s": now_s - 5, "why": "no step for 40 s", "places": PLACES}
    directory = _write(tmp_path / "stalled", seen)
    with (directory / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        text = _page(directory)
        assert text.startswith("run stalled: running, for ")
        assert f"  at {now_s - 5:.1f} s: no step for 40 s" in text
        assert (
            f"process 1 (rank 1) on {platform.node()} held up the others: in backward of step 4 "
            "(the backward pass) for 31.0 s"
        ) in " ".join(text.split())
        assert "process 0 (rank 0) waited for others in reduce of step 4" in text
        _train(directory, 5)  # it goes on
        assert "diagnosis" not in _page(directory)


def test_a_run_ended_by_a_person_is_told_who_was_behind(tmp_path: Path) -> None:
    directory = _write(
        tmp_path / "stalled",
        {"kind": "seen", "at_s": 35.9, "why": "the job is ended", "places": PLACES},
        _ended(130, "ended by SIGINT"),
        failure="ended by SIGINT",
    )
    text = _page(directory)
    assert "  at 35.9 s: the job is ended (ended by SIGINT)" in text
    assert "held up the others: in backward of step 4" in text


def test_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    directory = _write(tmp_path / "gone")
    _train(directory, 3)
    assert read_run(directory).state is State.GONE
    text = _page(directory)
    assert text.startswith("run gone: its supervisor ended without a word (it was killed, or its")
    assert text.endswith("every sample of it counted once")


def test_a_directory_without_events_tells_its_facts(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**FACTS, "ended": "later", "exit_code": 0}))
    text = _page(tmp_path)
    assert text.startswith(f"run {tmp_path.name}: ended well\n")
    assert "history of commits: no step was recorded" in text


def test_the_last_job_of_a_directory_is_told(tmp_path: Path) -> None:
    directory = _write(tmp_path / "again", _lost(), _ended(137, "rank 1 was killed"))
    lines = (directory / "events.jsonl").read_text()
    second = lines.replace('"job": "j"', '"job": "k"').splitlines()
    torn = '{"kind": "lost", "at_s": 3.'
    (directory / "events.jsonl").write_text(lines + "\n".join([*second[:2], torn]) + "\n")
    run = read_run(directory)
    assert [event.kind for event in run.events] == ["called"]
    assert run.state is State.GONE
    assert run.began is not None and run.began.text("job") == "k"


def test_many_losses_are_one_page(tmp_path: Path) -> None:
    losses = [_lost(at_s=2.0 + number, member=number) for number in range(200)]
    text = _page(_write(tmp_path / "chaos", *losses, _ended(0), exit_code=0))
    assert len(text.splitlines()) < 60
    assert "… 178 more, in events.jsonl …" in text


def test_what_is_wrong_with_the_history_is_listed(tmp_path: Path) -> None:
    directory = _write(tmp_path / "odd", _ended(0), exit_code=0)
    _train(directory, 3)
    log = _log(directory, 2)
    log.began(1, 0, Position())
    _commit(log, range(3), 1)
    said: list[str] = []
    assert look(str(directory), tmp_path, said.append) == 1
    (text,) = said
    assert "history of commits: one thing is wrong\n  process 2 committed steps in gen" in text


# ---- finding the run


def _runs(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in ("digits-1", "digits-2", "other"):
        _write(runs / name, _ended(0), exit_code=0)
    (runs / "latest").symlink_to("digits-2")
    return runs


def test_a_run_is_found_by_path_by_name_and_as_the_latest(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    assert find("digits-1", runs) == runs / "digits-1"
    assert find(str(runs / "other"), Path("elsewhere")) == runs / "other"
    assert find(None, runs).resolve() == runs / "digits-2"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("digit-2", r"there is no run 'digit-2', .*; runs there: digits-2, digits-1$"),
        ("runs/other/run.json", "run.json is a file; name the directory of a run, as "),
        ("runs", "runs is not the directory of a run: it holds neither run.json nor events.jsonl"),
    ],
)
def test_a_wrong_path_is_told_with_what_is_there(tmp_path: Path, named: str, words: str) -> None:
    runs = _runs(tmp_path)
    path = tmp_path / named
    with pytest.raises(ConfigError, match=words):
        find(str(path) if path.exists() else named, runs)


def test_where_there_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no latest run in .*: start one with"):
        find(None, tmp_path / "runs")
    with pytest.raises(ConfigError, match="there is no run 'x', here or in "):
        find("x", tmp_path / "runs")


def test_the_command(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    done = CliRunner().invoke(application(), ["doctor", "other", "--runs-dir", str(runs)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("run other: ended well, 36.0 s after its start\n")


def test_the_doctor_shares_nothing_with_what_it_judges() -> None:
    script = (
        "import sys, parti.doctor.command;"
        "print(*sorted(name for name in sys.modules if name.startswith(('parti.', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    rooms = {name.split(".")[1] for name in done.stdout.split()}
    assert rooms == {"doctor", "errors"}
