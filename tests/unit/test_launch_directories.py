"""The scratch of a job, and its record."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.launch.directories import (
    create_run_directory,
    create_scratch,
    scratch_root,
    sweep,
    write_json,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"parti-{os.getuid()}"


def test_scratch_is_private_and_gone_when_removed(root: Path) -> None:
    scratch = create_scratch("job")
    assert scratch.path == root / "job"
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o700
    (scratch.path / "file").touch()
    scratch.remove()
    assert list(root.iterdir()) == []


def test_what_nobody_owns_is_swept_and_what_somebody_owns_stays(root: Path) -> None:
    alive = create_scratch("alive")
    (root / "dead" / "failures").mkdir(parents=True)
    (root / "dead" / "owner").write_text("1\n")  # an owner's pid may be anybody's by now
    (root / "torn").mkdir()
    assert sorted(sweep(root)) == ["dead", "torn"]
    assert [path.name for path in root.iterdir()] == ["alive"]
    alive.remove()


def test_a_directory_in_the_making_is_left_alone_until_it_is_old(root: Path) -> None:
    scratch_root()
    young = root / ".new-job"
    young.mkdir()
    assert sweep(root) == []
    os.utime(young, (0, 0))
    assert sweep(root) == [".new-job"]


def test_a_root_that_others_can_enter_is_refused(root: Path) -> None:
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user can enter"):
        create_scratch("job")


def test_a_link_in_place_of_the_root_is_refused(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    root.symlink_to(target)
    with pytest.raises(ConfigError, match="only this user can enter"):
        create_scratch("job")


def test_runs_do_not_write_into_one_another(tmp_path: Path) -> None:
    first = create_run_directory(tmp_path / "runs", "digits", chosen_by_user=False)
    second = create_run_directory(tmp_path / "runs", "digits", chosen_by_user=False)
    assert (first.name, second.name) == ("digits", "digits-2")
    assert (tmp_path / "runs" / "latest").resolve() == second


def test_a_name_that_the_user_chose_is_used_again(tmp_path: Path) -> None:
    first = create_run_directory(tmp_path, "mine", chosen_by_user=True)
    assert create_run_directory(tmp_path, "mine", chosen_by_user=True) == first


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "latest", "-n"])
def test_names_that_are_no_directory_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="plain directory name"):
        create_run_directory(tmp_path, name, chosen_by_user=True)


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot write the run's logs to /proc/runs/a"):
        create_run_directory(Path("/proc/runs"), "a", chosen_by_user=False)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="File exists"):
        create_run_directory(tmp_path, "taken", chosen_by_user=True)


def test_something_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    create_run_directory(tmp_path, "a", chosen_by_user=False)
    assert (tmp_path / "latest" / "mine").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": 2})
    assert json.loads(path.read_text()) == {"b": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
