"""Events: a whole line each, whatever happens to the disk or to the supervisor."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from parti.launch import events
from parti.launch.events import Began, Called, Ended, EventFile, NoEvents, Settled, keep_events
from parti.launch.standstill import Standstill


def _began(clock_s: float) -> Began:
    return Began(job="j", host="h", node_rank=0, pid=7, world_size=2, clock_s=clock_s)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_there_as_soon_as_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = keep_events(path, _began, lambda words: pytest.fail(words))
    kept.tell(Called(generation=1, members=(0, 1), joining=(), why="all are here"))
    kept.tell(Settled(generation=1))
    began, called, settled = _lines(path)
    assert (began["kind"], began["job"], began["world_size"]) == ("began", "j", 2)
    assert (called["kind"], called["members"], called["joining"]) == ("called", [0, 1], [])
    assert settled["kind"] == "settled"
    assert 0 <= began["at_s"] <= called["at_s"] <= settled["at_s"] < 60  # type: ignore[operator]


def test_a_name_used_again_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for code in (1, 0):
        kept = keep_events(path, _began, lambda words: pytest.fail(words))
        kept.tell(Ended(exit_code=code, reason="so"))
        kept.close()
    assert [each["kind"] for each in _lines(path)] == ["began", "ended"] * 2


def test_a_reader_sees_whether_the_supervisor_lives(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = keep_events(path, _began, lambda words: pytest.fail(words))
    with path.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    kept = keep_events(tmp_path / "nowhere" / "events.jsonl", _began, told.append)
    assert isinstance(kept, NoEvents)
    kept.tell(Settled(generation=1))
    kept.close()
    assert len(told) == 1
    assert "No such file or directory" in told[0]


def test_a_full_disk_is_told_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half a line, then nothing, then all again: the lines behind it are whole."""
    told: list[str] = []
    path = tmp_path / "events.jsonl"
    kept = EventFile(path, told.append)
    write, room = os.write, [1 << 20, 10, 0]

    def limited(fd: int, data: bytes) -> int:
        left = room.pop(0) if room else 1 << 20
        if not left:
            raise OSError(28, "No space left on device")
        return write(fd, data[:left])

    monkeypatch.setattr(events.os, "write", limited)
    for generation in range(1, 6):
        kept.tell(Settled(generation=generation))
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line)["generation"] for line in (lines[0], *lines[2:])] == [1, 4, 5]
    assert len(told) == 1


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writers of the same file cannot come in between."""
    written: list[bytes] = []
    kept = EventFile(tmp_path / "events.jsonl", lambda words: pytest.fail(words))
    monkeypatch.setattr(events.os, "write", lambda fd, data: written.append(data) or len(data))
    kept.tell(Settled(generation=1))
    (line,) = written
    assert line.endswith(b"}\n")
    assert os.get_inheritable(kept._fd) is False


def test_a_standstill_is_told_at_twice_the_longest_before() -> None:
    watch = Standstill(0.0)
    told = [now for now in range(100) if watch.look([3, 3], float(now)) is not None]
    assert told == [10, 20, 40, 80]
    assert watch.look([3, 4], 100.0) is None
    assert watch.look([3, 4], 259.0) is None
    assert watch.look([3, 4], 260.0) == 160.0


def test_steps_that_go_on_are_no_standstill() -> None:
    watch = Standstill(0.0)
    assert all(watch.look([now // 9], float(now)) is None for now in range(200))
