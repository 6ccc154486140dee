"""Training that goes on with new data: a phase after another, in one script or in several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parti.callbacks import EarlyStopping, LambdaCallback, StepEnd
from parti.checkpoint.read import facts, newest_good
from parti.checkpoint.value import Checkpoint
from parti.errors import ConfigError
from parti.history import History
from parti.metrics import Mean
from parti.testing import FaultScript, fingerprint
from parti.trainer import Trainer
from parti.weights import SWA

OnRanks = Callable[..., Sequence[Any]]


def _data(day: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(day))
    return x, x.sum(1, keepdim=True) + day


MONDAY, TUESDAY = _data(1, 20), _data(2, 26)  # 3 and 4 steps an epoch
SETTINGS: dict[str, Any] = {"batch_size": 8, "micro_batches": 4, "progress": False}


def _trainer(strategy: Any, **named: Any) -> Trainer:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Trainer(
        strategy, model, optimizer, nn.MSELoss(), scheduler=schedule, average=SWA(3), **named
    )


def _known(trainer: Trainer, history: History) -> tuple[object, ...]:
    """What must not depend on interruptions."""
    assert trainer.optimizer is not None
    rows = [
        {name: value for name, value in row.items() if not name.endswith("_s")}
        for row in history.rows
    ]
    with trainer.averaged():
        average = fingerprint(trainer.model)
    weights = fingerprint(trainer.model, trainer.optimizer)
    return weights, average, rows, list(history.step_losses), trainer.step


def _both(strategy: Any, checkpoint: Checkpoint | None, **named: Any) -> tuple[object, ...]:
    """The script of Tuesday."""
    trainer = _trainer(strategy, **named)
    trainer.fit(MONDAY, epochs=2, checkpoint=checkpoint, phase="monday", **SETTINGS)
    history = trainer.fit(TUESDAY, epochs=2, checkpoint=checkpoint, phase="tuesday", **SETTINGS)
    return _known(trainer, history)


@pytest.fixture
def undisturbed(on_ranks: OnRanks) -> tuple[object, ...]:
    (known,) = on_ranks(1, lambda strategy: _both(strategy, None))
    return tuple(known)


class Died(Exception):
    """The process has ended here."""


def _dies_at(step: int) -> LambdaCallback:
    def die(event: StepEnd) -> None:
        if event.report.step == step:
            raise Died

    return LambdaCallback(on_step_end=die)


def test_a_phase_goes_on_from_the_one_before(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        first = trainer.fit(MONDAY, epochs=2, phase="monday", **SETTINGS)
        assert (trainer.epoch, trainer.step) == (2, 6)
        both = trainer.fit(TUESDAY, epochs=2, phase="tuesday", **SETTINGS)
        assert (trainer.epoch, trainer.step) == (2, 6 + 8)
        assert [(row["phase"], row["epoch"], row["step"]) for row in both.rows] == [
            (1, 1, 3), (1, 2, 6), (2, 1, 10), (2, 2, 14),
        ]  # fmt: skip
        assert both["lr"] == pytest.approx([0.01, 0.009, 0.0081, 0.00729]), "the schedule"
        assert first.rows == both.rows[:2] and len(first.step_losses) == 6
        assert [
            (each.name, each.number, each.num_samples, each.first_step, each.is_complete)
            for each in both.phases
        ] == [("monday", 1, 20, 0, True), ("tuesday", 2, 26, 6, True)]
        assert both.phases[0].fingerprint != both.phases[1].fingerprint
        assert History.from_json(both.to_json()).phases == both.phases
        assert both.only("tuesday").rows == both.rows[2:]
        assert both.only("tuesday").step_losses == both.step_losses[6:]

    on_ranks(2, body)


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("died_at", [2, 4, 8, 11], ids="died_at_{}".format)
def test_it_resumes_in_the_phase_it_was_in(
    on_ranks: OnRanks,
    undisturbed: tuple[object, ...],
    tmp_path: Path,
    before: int,
    died_at: int,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """On another number of processes, with the bits of the undisturbed run."""
    checkpoint = Checkpoint(tmp_path, every=2)

    def body(strategy: Any) -> None:
        with pytest.raises(Died):
            _both(strategy, checkpoint, callbacks=[_dies_at(died_at)])

    on_ranks(before, body)
    found = newest_good(tmp_path, lambda text: None)
    assert found is not None and 0 < found.step <= died_at
    told = facts(found.path)
    assert told["phase"] == ("monday" if found.step <= 6 else "tuesday")
    assert told["num_samples"] == (20 if told["phase"] == "monday" else 26)
    on = on_ranks(
        3 - before, lambda strategy: _both(strategy, checkpoint, callbacks=[LambdaCallback()])
    )
    assert set(map(str, on)) == {str(undisturbed)}
    again = on_ranks(1, lambda strategy: _both(strategy, checkpoint, callbacks=[LambdaCallback()]))
    assert str(again[0]) == str(undisturbed), "a script that is through stays so"


def test_a_later_script_with_new_data_alone(
    on_ranks: OnRanks, undisturbed: tuple[object, ...], tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path)

    def monday(strategy: Any) -> None:
        _trainer(strategy).fit(MONDAY, epochs=2, checkpoint=checkpoint, phase="monday", **SETTINGS)

    def tuesday(strategy: Any) -> tuple[object, ...]:
        trainer = _trainer(strategy, run_dir=tmp_path / "run")
        history = trainer.fit(TUESDAY, epochs=2, checkpoint=checkpoint, phase="tuesday", **SETTINGS)
        return _known(trainer, history)

    on_ranks(2, monday)
    assert set(map(str, on_ranks(2, tuesday))) == {str(undisturbed)}
    found = newest_good(tmp_path, lambda text: None)
    assert found is not None
    told = facts(found.path)
    assert (told["phase"], told["phase_number"], told["phase_first_step"]) == ("tuesday", 2, 6)
    assert told["phase_is_complete"] and told["phase_began"] and told["fingerprint"]
    run = json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[0])
    assert (run["phase"]["name"], run["phase"]["num_samples"]) == ("tuesday", 26)


def test_without_names_phases_are_numbered_by_calls(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpoint(tmp_path)

    def body(strategy: Any) -> tuple[object, ...]:
        trainer = _trainer(strategy)
        trainer.fit(MONDAY, epochs=2, checkpoint=checkpoint, **SETTINGS)
        history = trainer.fit(TUESDAY, epochs=2, checkpoint=checkpoint, **SETTINGS)
        assert [phase.name for phase in history.phases] == ["1", "2"]
        return _known(trainer, history)

    (first,) = on_ranks(1, body)
    assert "left out" not in capsys.readouterr().err
    (second,) = on_ranks(1, body)
    assert str(first) == str(second)
    told = capsys.readouterr().err
    assert "phase '1' is complete and left out. '2' is under way." in told
    assert "phase '2' is complete and left out." in told


def test_more_epochs_of_the_phase_under_way(on_ranks: OnRanks, tmp_path: Path) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        trainer.fit(MONDAY, epochs=1, phase="a", **SETTINGS)
        history = trainer.fit(MONDAY, epochs=3, phase="a", **SETTINGS)
        assert [row["epoch"] for row in history.rows] == [1, 2, 3]
        assert [phase.epochs for phase in history.phases] == [3]

    on_ranks(1, body)


def test_other_data_in_the_phase_under_way_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)

    def body(strategy: Any) -> None:
        _trainer(strategy).fit(MONDAY, epochs=1, checkpoint=checkpoint, **SETTINGS)
        with pytest.raises(ConfigError, match=r"under way with 20 samples.* given 26 samples"):
            _trainer(strategy).fit(TUESDAY, epochs=2, checkpoint=checkpoint, **SETTINGS)
        with pytest.warns(UserWarning, match="other data than it began with"):
            _trainer(strategy).fit(_data(3, 20), epochs=2, checkpoint=checkpoint, **SETTINGS)
        with pytest.raises(ConfigError, match="phase=2; expected a name"):
            _trainer(strategy).fit(MONDAY, phase=2, **SETTINGS)  # type: ignore[arg-type]

    on_ranks(1, body)


def test_a_phase_that_is_left_is_told(on_ranks: OnRanks, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, every=2)

    def body(strategy: Any) -> None:
        with pytest.raises(Died):
            _both(strategy, checkpoint, callbacks=[_dies_at(4)])
        with pytest.warns(UserWarning, match=r"'monday' had done \d of its 2 epochs: it is left"):
            _trainer(strategy, callbacks=[LambdaCallback()]).fit(
                TUESDAY, checkpoint=checkpoint, phase="tuesday", **SETTINGS
            )

    on_ranks(1, body)


def test_a_phase_that_was_stopped_early_is_complete(on_ranks: OnRanks, tmp_path: Path) -> None:
    """With the best weights, which come back at its end, as the others begin there."""
    checkpoint = Checkpoint(tmp_path)

    def body(strategy: Any) -> tuple[object, ...]:
        stopping = EarlyStopping("loss", mode="max", patience=2, restore_best=True)
        trainer = _trainer(strategy, callbacks=[stopping], metrics={"mean": Mean(lambda p, y: p)})
        history = trainer.fit(MONDAY, epochs=9, checkpoint=checkpoint, **SETTINGS)
        assert history.stop_reason and len(history) < 9
        return _known(trainer, history)

    (first,) = on_ranks(1, body)
    (second,) = on_ranks(2, body)[:1]
    assert str(first) == str(second)


def test_a_loss_in_the_second_phase_changes_nothing(
    on_ranks: OnRanks, undisturbed: tuple[object, ...], tmp_path: Path
) -> None:
    faults = FaultScript().kill(rank=1, step=9, at="backward")
    left = on_ranks(3, lambda strategy: _both(strategy, Checkpoint(tmp_path, every=2)), faults)
    assert set(map(str, left)) == {str(undisturbed)}
