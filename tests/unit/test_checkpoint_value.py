"""`Checkpoint`: what it accepts, and when one is due."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from parti.checkpoint.value import Checkpoint
from parti.errors import ConfigError


def is_due(settings: Checkpoint, step: int, last: bool = False, seconds: float = 0.0) -> bool:
    return settings.is_due(step=step, is_last_of_epoch=last, seconds_since_last=seconds)


def test_every_so_many_steps() -> None:
    due = [step for step in range(1, 11) if is_due(Checkpoint("here", every=3), step, last=True)]
    assert due == [3, 6, 9]


def test_every_epoch_is_the_default() -> None:
    assert is_due(Checkpoint("here"), 7, last=True)
    assert not is_due(Checkpoint("here"), 7, seconds=1e9)


def test_every_so_many_minutes() -> None:
    settings = Checkpoint("here", every=timedelta(minutes=10))
    assert not is_due(settings, 7, last=True, seconds=599.9)
    assert is_due(settings, 7, seconds=600.0)


def test_it_is_a_value() -> None:
    settings = Checkpoint("here", every=timedelta(hours=1), keep=5)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings != Checkpoint("here")
    with pytest.raises(AttributeError):
        settings.keep = 1  # type: ignore[misc]


def test_the_directory_does_not_follow_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoint("here").path == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Checkpoint("~/here").path == tmp_path / "home" / "here"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every", 0),
        ("every", -5),
        ("every", 2.5),
        ("every", True),
        ("every", "step"),
        ("every", None),
        ("every", timedelta(0)),
        ("keep", 0),
        ("keep", True),
        ("keep", 1.5),
        ("on_error", "ignore"),
        ("directory", ""),
        ("directory", None),
        ("directory", 7),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(setting: str, value: Any) -> None:
    settings = {"directory": "here", setting: value}
    with pytest.raises(ConfigError) as caught:
        Checkpoint(**settings)
    assert f"{setting}={value!r}" in str(caught.value)
    assert "expected" in str(caught.value)
