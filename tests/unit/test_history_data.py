"""History: columns, best values, and what is written and read back."""

from __future__ import annotations

import csv
import json
import math
import sys
from array import array
from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.history import History, guess_mode


@pytest.fixture
def history() -> History:
    made = History(first_step=10)
    made.rows = [
        {"epoch": 3, "step": 12, "loss": 2.0, "val_accuracy": 0.5, "time_s": 1.0},
        {"epoch": 4, "step": 14, "loss": 1.0, "val_accuracy": 0.5, "time_s": 1.5},
        {"epoch": 5, "step": 16, "loss": math.nan, "time_s": 1.5, "lr": 0.1},
    ]
    made.step_losses = array("d", [2.5, 1.5, math.inf, 1.0, math.nan, 1.0])
    made.stop_reason = "val_loss stood still"
    return made


def test_columns_have_one_value_an_epoch(history: History) -> None:
    assert history.names() == ["epoch", "step", "loss", "val_accuracy", "time_s", "lr"]
    assert history["loss"][:2] == [2.0, 1.0]
    assert math.isnan(history["lr"][0])
    assert history.to_dict()["epoch"] == [3, 4, 5]
    assert len(history) == 3
    with pytest.raises(KeyError, match=r"accuracy.*it has epoch, step, loss"):
        history["accuracy"]


def test_best_takes_the_earliest_of_equals_and_skips_nan(history: History) -> None:
    assert history.best("loss") == (4, 1.0)
    assert history.best("loss", "max") == (3, 2.0)
    assert history.best("val_accuracy") == (3, 0.5)
    history.rows = [{"epoch": 1, "loss": math.nan}]
    with pytest.raises(ConfigError, match="nothing but NaN"):
        history.best("loss")


def test_json_is_strict_and_comes_back_whole(history: History, tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    text = history.to_json(path)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    for back in (History.from_json(path), History.from_json(str(path)), History.from_json(text)):
        assert str(back.rows) == str(history.rows)
        assert str(back.step_losses) == str(history.step_losses)
        assert back.stop_reason == history.stop_reason
        assert back.first_step == 10


def test_csv_has_a_column_for_every_name(history: History, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    history.to_csv(path)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert rows[0]["loss"] == "2.0"
    assert rows[0]["lr"] == ""
    assert rows[2]["lr"] == "0.1"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_mean_squared_error", "min"),
        ("accuracy", "max"),
        ("val_top5", "max"),
        ("lossless", "max"),
    ],
)
def test_mode_is_guessed_from_the_name(name: str, mode: str) -> None:
    assert guess_mode(name) == mode


def test_the_plot_holds_every_step_and_every_metric(history: History, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "history.png"
    figure = history.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["loss", "accuracy"]
    steps = figure.axes[0].lines[0]
    assert list(steps.get_xdata()) == [2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


def test_the_plot_of_an_unfinished_epoch_and_of_many_steps() -> None:
    pytest.importorskip("matplotlib")
    history = History()
    history.step_losses = array("d", [1.0 / (1 + i) for i in range(9999)])
    assert len(history.plot().axes[0].lines[0].get_xdata()) <= 2000
    history.rows = [{"epoch": 1, "step": 5000, "loss": 1.0}]
    assert history.plot().axes[0].lines[0].get_xdata()[-1] == pytest.approx(1.9998)
    with pytest.raises(ConfigError, match="empty"):
        History().plot()


def test_without_matplotlib_the_remedy_is_named(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'parti\[plot\]'"):
        history.plot()
