"""The course of training: epochs, schedules, callbacks, early stopping, averages, bad losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from parti.callbacks import EarlyStopping, EpochEnd, LambdaCallback, Schedule, StepEnd, Stop
from parti.errors import ConfigError, NonFiniteLoss
from parti.metrics import Accuracy
from parti.trainer import Trainer
from parti.weights import EMA, SWA

OnRanks = Callable[[int, Callable[[Any], Any]], Sequence[Any]]

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
SETTINGS: dict[str, Any] = {"batch_size": 8, "micro_batches": 4, "progress": False}  # 3 steps


def _trainer(strategy: Any, rate: float = 0.1, **named: Any) -> Trainer:
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if "scheduler" in named:
        named["scheduler"] = named["scheduler"](optimizer)
    return Trainer(strategy, model, optimizer, nn.MSELoss(), **named)


def _weight(trainer: Trainer) -> Tensor:
    assert isinstance(trainer.model, nn.Linear)
    return trainer.model.weight.detach().clone()


def test_epochs_count_from_the_beginning_of_the_training(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        whole, parts = _trainer(strategy), _trainer(strategy)
        rows = whole.fit((X, Y), epochs=3, **SETTINGS).rows
        first = parts.fit((X, Y), epochs=1, **SETTINGS)
        second = parts.fit((X, Y), epochs=3, **SETTINGS)
        assert [row["epoch"] for row in second.rows] == [2, 3]
        assert [row["step"] for row in rows] == [3, 6, 9]
        assert second.first_step == 3
        assert first["loss"] + second["loss"] == [row["loss"] for row in rows]
        assert torch.equal(_weight(whole), _weight(parts))
        assert (parts.epoch, parts.step) == (3, 9)
        with pytest.warns(UserWarning, match="epochs=3 are done already.*ask for epochs=6"):
            assert len(parts.fit((X, Y), epochs=3, **SETTINGS)) == 0

    on_ranks(2, body)


def test_the_epochs_loss_weighs_steps_by_their_samples(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy, rate=1e-30)
        history = trainer.fit((X, Y), validation=(X, Y), **SETTINGS)
        assert history["loss"][0] == pytest.approx(history["val_loss"][0], rel=1e-5)
        assert history["samples"] == [20]

    on_ranks(3, body)


def test_schedules_move_when_they_should(on_ranks: OnRanks) -> None:
    def per_epoch(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def per_step(optimizer: Any) -> Any:
        return Schedule(lr_scheduler.StepLR(optimizer, 1, gamma=0.5), every="step")

    def one_cycle(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)

    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=1e9, threshold_mode="abs"
        )

    def body(strategy: Any) -> None:
        rates = {}
        for make in (per_epoch, per_step, one_cycle, plateau):
            trainer = _trainer(strategy, rate=1e-3, scheduler=make)
            history = trainer.fit((X, Y), epochs=3, validation=(X, Y), **SETTINGS)
            assert trainer.optimizer is not None
            rates[make.__name__] = [*history["lr"], trainer.optimizer.param_groups[0]["lr"]]
        assert rates["per_epoch"] == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])
        assert rates["per_step"] == pytest.approx([1e-3 / 8, 1e-3 / 64, 1e-3 / 512, 1e-3 / 512])
        alone = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-3)
        schedule = one_cycle(alone)
        by_hand = []
        for _ in range(9):
            alone.step()
            schedule.step()
            by_hand.append(alone.param_groups[0]["lr"])
        assert rates["one_cycle"] == [*by_hand[2::3], by_hand[-1]]
        assert rates["plateau"] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5])

    on_ranks(2, body)


def test_a_schedule_that_cannot_work_is_refused(on_ranks: OnRanks) -> None:
    def plateau(optimizer: Any) -> Any:
        return Schedule(lr_scheduler.ReduceLROnPlateau(optimizer), monitor="val_los")

    def elsewhere(optimizer: Any) -> Any:
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return lr_scheduler.StepLR(other, 1)

    def body(strategy: Any) -> None:
        with pytest.raises(ConfigError, match=r"measures loss, val_loss.*mean 'val_loss'"):
            _trainer(strategy, scheduler=plateau).fit((X, Y), validation=(X, Y), **SETTINGS)
        with pytest.raises(ConfigError, match="another optimizer"):
            _trainer(strategy, scheduler=elsewhere)
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="expected 'epoch'"):
            Schedule(lr_scheduler.ReduceLROnPlateau(optimizer), every="step")
        with pytest.raises(ConfigError, match="only ReduceLROnPlateau"):
            Schedule(lr_scheduler.StepLR(optimizer, 1), monitor="loss")

    on_ranks(1, body)


def test_one_rank_that_stops_stops_all(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> tuple[int, str | None, int]:
        def impatient(event: StepEnd) -> Stop | None:
            tired = strategy.rank == 1 and event.report.step == 3
            return Stop("rank 1 is tired") if tired else None

        trainer = _trainer(strategy, callbacks=[LambdaCallback(on_step_end=impatient)])
        history = trainer.fit((X, Y), epochs=5, **SETTINGS)
        assert trainer.epoch == 1
        return trainer.step, history.stop_reason, len(history)

    assert set(on_ranks(3, body)) == {(4, "rank 1 is tired", 2)}


def test_callbacks_see_every_moment(on_ranks: OnRanks) -> None:
    class Witness:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_fit_begin(self, event: Any) -> None:
            self.seen.append(" ".join(event.names))

        def on_step_end(self, event: Any) -> None:
            self.seen.append(f"{event.epoch}.{event.report.step}")

        def on_epoch_end(self, event: Any) -> None:
            self.seen.append(f"{event.epoch} {event.row['val_accuracy']:.0f}")
            assert event.history.rows[-1] is event.row

        def on_fit_end(self, event: Any) -> None:
            self.seen.append(str(len(event.history)))

    def body(strategy: Any) -> None:
        witness = Witness()
        trainer = _trainer(
            strategy, metrics={"accuracy": Accuracy(threshold=-1e9)}, callbacks=[witness]
        )
        trainer.fit((X, Y.clamp(min=1.0)), epochs=2, validation=(X, Y.clamp(min=1.0)), **SETTINGS)
        assert witness.seen == [
            "loss accuracy val_loss val_accuracy",
            *("1.0", "1.1", "1.2", "1 1", "2.3", "2.4", "2.5", "2 1", "2"),
        ]

    on_ranks(2, body)


def test_objects_that_are_no_callbacks_are_refused(on_ranks: OnRanks) -> None:
    class Misspelt:
        def on_epoch_ended(self, event: Any) -> None: ...

    def body(strategy: Any) -> None:
        with pytest.raises(ConfigError, match="has on_epoch_ended; the moments are on_fit_begin"):
            _trainer(strategy, callbacks=[Misspelt()])
        with pytest.raises(ConfigError, match="int has none of the methods"):
            _trainer(strategy, callbacks=[3])

    on_ranks(1, body)


def _rising(trainer: Trainer) -> None:
    """From now on every step makes the model worse."""
    assert trainer.optimizer is not None
    trainer.optimizer.param_groups[0]["lr"] = -0.1


@pytest.mark.parametrize("average", [None, EMA(0.5)])
def test_early_stopping_and_the_best_weights(on_ranks: OnRanks, average: EMA | None) -> None:
    def body(strategy: Any) -> None:
        kept: list[Tensor] = []

        def turn(event: EpochEnd) -> None:
            if event.epoch == 2:
                kept.append(_weight(event.trainer))
                _rising(event.trainer)

        stopping = EarlyStopping(patience=2, restore_best=True)
        trainer = _trainer(
            strategy, callbacks=[LambdaCallback(on_epoch_end=turn), stopping], average=average
        )
        history = trainer.fit((X, Y), epochs=9, validation=(X, Y), **SETTINGS)
        best, value = history.best("val_loss")
        assert len(history) == best + 2
        assert stopping.best == value
        assert "for 2 epochs" in (history.stop_reason or "")
        assert trainer.evaluate((X, Y), batch_size=8, micro_batches=4)["loss"] == value
        if best == 2:
            assert torch.equal(_weight(trainer), kept[0])

    for size in (1, 3):
        on_ranks(size, body)


@pytest.mark.parametrize(
    ("monitor", "match"),
    [
        ("val_loss", r"measures loss\. Give fit a `validation=` set"),
        ("los", "Did you mean 'loss'"),
        ("time_s", "ranks would disagree"),
    ],
)
def test_monitoring_what_is_not_measured_is_refused(
    on_ranks: OnRanks, monitor: str, match: str
) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy, callbacks=[EarlyStopping(monitor)])
        with pytest.raises(ConfigError, match=match):
            trainer.fit((X, Y), **SETTINGS)

    on_ranks(1, body)


def test_early_stopping_decides_by_the_rules() -> None:
    def run(values: list[float], **named: Any) -> int:
        stopping = EarlyStopping("x", **named)
        for epoch, value in enumerate(values, start=1):
            event = EpochEnd(trainer=None, epoch=epoch, row={"x": value}, history=None)  # type: ignore[arg-type]
            if stopping.on_epoch_end(event) is not None:
                return epoch
        return 0

    assert run([3, 2, 1, 1, 1], mode="min", patience=2) == 5
    assert run([3, 2, 1, 1, 0.5, 0.5], mode="min", patience=2) == 0
    assert run([1, 2, 3, 2, 2], patience=2) == 5
    assert run([3, 2.95, 2.9], mode="min", patience=2, min_delta=0.2) == 3
    assert run([math.nan, math.nan], mode="min", patience=2) == 2
    assert run([math.nan, 1, math.nan, 0], mode="min", patience=2) == 0
    assert run([1, 1], mode="min", patience=0) == 2
    with pytest.raises(ConfigError, match="patience=-1"):
        EarlyStopping(patience=-1)


def test_an_exponential_average_is_what_its_formula_says(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        expected = torch.zeros(0)
        rates = iter([0.0, *(1 - min(0.5, (1 + t) / (10 + t)) for t in range(1, 99))])

        def follow(event: StepEnd) -> None:
            nonlocal expected
            weight, rate = _weight(event.trainer), next(rates)
            expected = weight if rate == 0 else torch.lerp(expected, weight, rate)

        trainer = _trainer(
            strategy, average=EMA(0.5), callbacks=[LambdaCallback(on_step_end=follow)]
        )
        trainer.fit((X, Y), epochs=2, **SETTINGS)
        live = _weight(trainer)
        with trainer.averaged():
            torch.testing.assert_close(_weight(trainer), expected)
            judged = trainer.predict(X, batch_size=20)
        assert torch.equal(_weight(trainer), live)
        assert torch.equal(trainer.predict(X, batch_size=20), judged)
        with pytest.raises(RuntimeError, match="in the middle"), trainer.averaged():
            raise RuntimeError("in the middle")
        assert torch.equal(_weight(trainer), live)

    on_ranks(2, body)


def test_a_plain_average_begins_with_its_epoch(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        ends: list[Tensor] = []
        note = LambdaCallback(on_epoch_end=lambda event: ends.append(_weight(event.trainer)))
        trainer = _trainer(strategy, average=SWA(start_epoch=3), callbacks=[note])
        trainer.fit((X, Y), epochs=2, **SETTINGS)
        with trainer.averaged():
            assert torch.equal(_weight(trainer), ends[-1])
        trainer.fit((X, Y), epochs=5, **SETTINGS)
        with trainer.averaged():
            torch.testing.assert_close(_weight(trainer), torch.stack(ends[2:]).mean(0))

    on_ranks(2, body)


def test_an_average_of_half_precision_weights_does_not_stand_still(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False).bfloat16()
            nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def move(event: StepEnd) -> None:
            with torch.no_grad():
                model.weight.fill_(2.0)

        trainer = Trainer(
            strategy,
            model,
            optimizer,
            nn.MSELoss(),
            average=EMA(0.999, warmup=False),
            callbacks=[LambdaCallback(on_step_end=move)],
        )
        data = (torch.zeros(201, 1).bfloat16(), torch.zeros(201, 1).bfloat16())

        trainer.fit(data, batch_size=1, progress=False)
        with trainer.averaged():
            assert model.weight.item() == pytest.approx(2 - 0.999**200, abs=0.01)

    on_ranks(1, body)


def test_a_loss_that_is_not_finite(on_ranks: OnRanks, recwarn: pytest.WarningsRecorder) -> None:
    x = X.clone()
    x[13] = math.inf

    def fit(strategy: Any, **named: Any) -> list[float]:
        trainer = _trainer(strategy, **named)
        return trainer.fit((x, Y), shuffle=False, **SETTINGS).step_losses.tolist()

    match = r"step 1 \(epoch 1\): the loss is (inf|nan).*last finite loss was .* in step 0"
    with pytest.raises(NonFiniteLoss, match=match):
        on_ranks(2, fit)
    losses = on_ranks(1, lambda strategy: fit(strategy, on_nan="ignore"))[0]
    assert [math.isfinite(loss) for loss in losses] == [True, False, False]
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="Training goes on") as caught:
        on_ranks(1, lambda strategy: fit(strategy, on_nan="warn"))
    assert len(caught) == 1
    with pytest.raises(ConfigError, match="on_nan='stop'"):
        on_ranks(1, lambda strategy: fit(strategy, on_nan="stop"))


def test_modes_of_modules_come_back(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        with strategy.scope():
            model = nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
            )
        trainer = Trainer(
            strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
        )
        model[1].eval()
        first = trainer.predict(X, batch_size=20)
        assert torch.equal(first, trainer.predict(X, batch_size=20))
        assert [module.training for module in model] == [True, False, True, True]

    on_ranks(1, body)


def test_what_a_trainer_is_made_of_is_checked(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        model, other = nn.Linear(4, 1), nn.Linear(4, 3)
        optimizer = torch.optim.SGD([*model.parameters(), other.weight], lr=0.1)
        with pytest.raises(ConfigError, match=r"1 of the optimizer's 3 parameters.*\(3, 4\)"):
            Trainer(strategy, model, optimizer, nn.MSELoss())
        with pytest.raises(ConfigError, match="optimizer is a MSELoss"):
            Trainer(strategy, model, nn.MSELoss())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="fit needs an optimizer"):
            Trainer(strategy, model, loss=nn.MSELoss()).fit((X, Y), **SETTINGS)
        with pytest.raises(ConfigError, match="clip_norm=0"):
            _trainer(strategy, clip_norm=0)
        with pytest.raises(ConfigError, match=r"2 of the model's parameters are not on cpu.*meta"):
            Trainer(strategy, nn.Linear(4, 1, device="meta"), loss=nn.MSELoss())
        trainer = _trainer(strategy)
        for wrong, words in ((X, "one value"), ((X, Y, Y), "3 parts"), ({"x": X}, "the keys x")):
            with pytest.raises(ConfigError, match=f"validation holds {words}.*2 parts"):
                trainer.fit((X, Y), validation=wrong, **SETTINGS)
        assert trainer.step == 0

    on_ranks(1, body)
