"""Records: valid JSON a line, added to, and cheap in between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.monitor.header import RunFacts
from parti.monitor.records import FILE_NAME, NoRecords, RecordFile, StepValues, keep_records

FACTS = RunFacts(
    name=None,
    strategy="OneDeviceStrategy()",
    processes=1,
    hosts=1,
    devices="cpu",
    comm="none",
    precision="fp32",
    threads=1,
    exact=True,
    num_parameters=10,
    batch_size=4,
    micro_batches=1,
    epochs=1,
    num_samples=None,
    steps_per_epoch=None,
)


def _step(number: int) -> StepValues:
    return (number, 1, math.nan if number == 1 else 0.5, 4, None, 0.1, 0.0, 0.01, 0.0)


def _fit(run_dir: Path) -> None:
    records = keep_records(run_dir, is_chief=True)
    records.begin(FACTS)
    for number in range(3):
        records.step(_step(number))
    records.epoch({"epoch": 1, "loss": 0.5, "val_loss": math.inf})
    records.end("all epochs done")


def test_a_run_is_one_object_a_line_and_a_second_is_added(tmp_path: Path) -> None:
    _fit(tmp_path / "run")
    _fit(tmp_path / "run")
    text = (tmp_path / "run" / FILE_NAME).read_text()
    objects = [json.loads(line, parse_constant=lambda word: 1 / 0) for line in text.splitlines()]
    assert [each["kind"] for each in objects] == ["run", *["step"] * 3, "epoch", "end"] * 2
    assert objects[0]["strategy"] == "OneDeviceStrategy()"
    assert [each["step"] for each in objects[1:4]] == [0, 1, 2]
    assert [each["loss"] for each in objects[1:4]] == [0.5, None, 0.5]
    assert objects[4]["val_loss"] is None


def test_steps_are_written_together(tmp_path: Path) -> None:
    records = RecordFile(tmp_path / FILE_NAME)
    records.begin(FACTS)
    size = (tmp_path / FILE_NAME).stat().st_size
    for number in range(100):
        records.step(_step(number))
    assert (tmp_path / FILE_NAME).stat().st_size == size
    records.end("done")
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 102


def test_only_rank_0_with_a_directory_keeps_records(tmp_path: Path) -> None:
    assert isinstance(keep_records(tmp_path, is_chief=False), NoRecords)
    assert isinstance(keep_records(None, is_chief=True), NoRecords)
    records = NoRecords()
    records.begin(FACTS)
    records.step(_step(0))
    records.epoch({})
    records.end("")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"run_dir='.*': records\.jsonl cannot .*: No space left"):
        keep_records(tmp_path, is_chief=True).begin(FACTS)
    with pytest.raises(ConfigError, match="Choose another directory, or leave run_dir out"):
        keep_records(tmp_path / FILE_NAME, is_chief=True).begin(FACTS)


def test_a_disk_that_fills_up_is_told_once_and_does_not_stop_the_training(tmp_path: Path) -> None:
    records = keep_records(tmp_path, is_chief=True)
    records.begin(FACTS)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="No space left on device.: training goes on"):
        records.epoch({"epoch": 1})
    records.step(_step(0))
    records.epoch({"epoch": 2})
    records.end("all epochs done")
