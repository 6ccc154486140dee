"""What batches, losses and models may look like, and what predict and metrics make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import parti
from parti.errors import ConfigError
from parti.metrics import Accuracy, Mean
from parti.trainer import Trainer

OnRanks = Callable[[int, Callable[[Any], Any]], Sequence[Any]]

X = torch.randn(21, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
SETTINGS: dict[str, Any] = {"batch_size": 8, "micro_batches": 3}


class Classifier(nn.Module):
    """Gives its loss itself, and its logits, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Mapping[str, Any] | Any:
        logits = self.head(pixels)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class AsDictionary(Classifier):
    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Mapping[str, Any]:
        return vars(super().forward(pixels, labels))


class Pair(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.head(a), {"square": b.square(), "sum": (a + b).sum(1)}


class Row(NamedTuple):
    pixels: Tensor
    label: Tensor


class Rows(Dataset[Row]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Row:
        return Row(X[index], Y[index])


def _trainer(strategy: Any, build: Callable[[], nn.Module], *args: Any, **named: Any) -> Trainer:
    with strategy.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Trainer(strategy, model, optimizer, *args, **named)


def _losses(trainer: Trainer, data: Any) -> list[float]:
    return trainer.fit(data, epochs=2, progress=False, **SETTINGS).step_losses.tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_all_ways_to_say_the_same_loss_give_the_same_numbers(size: int, on_ranks: OnRanks) -> None:
    named = {"pixels": X, "labels": Y}
    accuracy = {"accuracy": Accuracy()}

    def from_row(model: nn.Module, row: Any) -> parti.Forward:
        output = model(row.pixels)
        return parti.Forward(F.cross_entropy(output, row.label), aux=(output, row.label))

    def from_parts(model: nn.Module, batch: Any) -> parti.Forward:
        x, y = batch
        output = model(x)
        return parti.Forward(F.cross_entropy(output, y), aux=(output, y))

    ways: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any]] = {
        "loss": (lambda: nn.Linear(6, 3), {"loss": nn.CrossEntropyLoss()}, (X, Y)),
        "data set": (lambda: nn.Linear(6, 3), {"loss": F.cross_entropy}, TensorDataset(X, Y)),
        ".loss": (Classifier, {}, named),
        "['loss']": (AsDictionary, {"metrics": {}}, named),
        "named tuple": (lambda: nn.Linear(6, 3), {"forward": from_row}, Rows()),
        "forward": (lambda: nn.Linear(6, 3), {"forward": from_parts}, (X, Y)),
    }

    def body(strategy: Any) -> list[tuple[list[float], dict[str, float]]]:
        found = []
        for build, settings, data in ways.values():
            trainer = _trainer(strategy, build, **{"metrics": accuracy, **settings})
            losses = _losses(trainer, data)
            found.append((losses, trainer.evaluate(data, **SETTINGS)))
        return found

    for found in on_ranks(size, body):
        losses, evaluated = found[0]
        for name, (others, values) in zip(ways, found, strict=True):
            assert others == pytest.approx(losses, rel=1e-5), name
            assert values["loss"] == pytest.approx(evaluated["loss"], rel=1e-5), name
            assert values.get("accuracy", evaluated["accuracy"]) == evaluated["accuracy"], name


def test_predictions_come_in_sample_order_once_each(on_ranks: OnRanks) -> None:
    numbered = torch.arange(21.0).unsqueeze(1)

    def body(strategy: Any) -> list[Any]:
        trainer = _trainer(strategy, lambda: nn.Linear(1, 1))
        trainer.model.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        alone = trainer.predict(numbered, **SETTINGS)
        beside = trainer.predict((numbered, Y), **SETTINGS)
        short = trainer.predict(numbered[:2])
        doubled = trainer.predict(
            (numbered, Y), forward=lambda model, batch: model(batch[0]) * 2, **SETTINGS
        )
        return [alone, beside, short, doubled]

    for size in (1, 2, 5):
        for alone, beside, short, doubled in on_ranks(size, body):
            assert torch.equal(alone, numbered)
            assert torch.equal(beside, numbered)
            assert torch.equal(short, numbered[:2])
            assert torch.equal(doubled, numbered * 2)
            assert alone.device.type == "cpu"
            assert not alone.requires_grad


def test_predictions_of_several_inputs_and_outputs(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy, Pair)
        for data in ((X, X + 1), (X, X + 1, Y)):
            logits, rest = trainer.predict(data, **SETTINGS)
            torch.testing.assert_close(logits, trainer.model.head(X).detach())
            torch.testing.assert_close(rest["square"], (X + 1) ** 2)
            assert rest["sum"].shape == (21,)
        with_loss = _trainer(strategy, AsDictionary)
        named = {"pixels": X, "labels": Y}
        torch.testing.assert_close(
            with_loss.predict(named, **SETTINGS)["logits"], with_loss.model.head(X).detach()
        )
        as_object = _trainer(strategy, Classifier)
        assert as_object.predict({"pixels": X}, **SETTINGS).shape == (21, 3)

    on_ranks(2, body)


def test_metrics_of_torchmetrics_see_every_sample_once(on_ranks: OnRanks) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    classification = torchmetrics.classification

    def metrics() -> dict[str, Any]:
        return {
            "accuracy": Accuracy(),
            "theirs": classification.MulticlassAccuracy(3, average="micro"),
            "ap": classification.MulticlassAveragePrecision(3),
            "several": torchmetrics.MetricCollection(
                {
                    "recall": classification.MulticlassRecall(3),
                    "f1": classification.MulticlassF1Score(3),
                }
            ),
        }

    def body(strategy: Any) -> tuple[Any, dict[str, float]]:
        trainer = _trainer(
            strategy, lambda: nn.Linear(6, 3), nn.CrossEntropyLoss(), metrics=metrics()
        )
        history = trainer.fit((X, Y), progress=False, **SETTINGS)
        row = {n: v for n, v in history.rows[0].items() if not n.endswith("_s")}
        evaluated = trainer.evaluate((X, Y), **SETTINGS)
        plain = metrics()["ap"]
        plain.update(trainer.predict(X, **SETTINGS), Y)
        assert evaluated["ap"] == plain.compute().item()
        assert evaluated["theirs"] == pytest.approx(evaluated["accuracy"])
        names = {"loss", "accuracy", "theirs", "ap", "several/recall", "several/f1"}
        assert set(evaluated) == names
        return row, evaluated

    expected = on_ranks(1, body)[0]
    for size in (2, 5):
        assert all(found == expected for found in on_ranks(size, body))


class ConfusionMatrix:
    def update(self, output: Tensor, target: Tensor) -> None:
        self.value = torch.zeros(3, 3)

    def compute(self) -> Tensor:
        return self.value


def _refused(on_ranks: OnRanks, match: str, body: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=match):
        on_ranks(1, body)


def test_a_missing_loss_is_noticed(on_ranks: OnRanks) -> None:
    def fit(data: Any, build: Callable[[], nn.Module], **named: Any) -> Callable[[Any], Any]:
        return lambda strategy: _losses(_trainer(strategy, build, **named), data)

    def linear() -> nn.Module:
        return nn.Linear(6, 3)

    _refused(on_ranks, r"no loss.*tensor of shape \(3, 3\)", fit(X, linear))
    _refused(on_ranks, "loss is None.*'labels'", fit({"pixels": X}, Classifier))
    _refused(on_ranks, "1 part .*Yield", fit(X, linear, loss=nn.MSELoss()))
    _refused(
        on_ranks, "keys pixels, labels", fit({"pixels": X, "labels": Y}, linear, loss=F.l1_loss)
    )
    _refused(
        on_ranks,
        "both loss= and forward=",
        fit(X, linear, loss=nn.MSELoss(), forward=lambda model, batch: model(batch)),
    )


def test_metrics_without_an_output_and_odd_metrics_are_noticed(on_ranks: OnRanks) -> None:
    def fit(**named: Any) -> Callable[[Any], Any]:
        return lambda strategy: _losses(
            _trainer(strategy, lambda: nn.Linear(6, 3), **named), (X, Y)
        )

    accuracy = {"accuracy": Accuracy()}
    forward = {"forward": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])}
    _refused(on_ranks, r"aux=\(output, target\)", fit(metrics=accuracy, **forward))
    loss = {"loss": nn.CrossEntropyLoss()}
    _refused(on_ranks, "'lr' is taken", fit(metrics={"lr": Accuracy()}, **loss))
    _refused(on_ranks, "'val_x' is taken", fit(metrics={"val_x": Accuracy()}, **loss))
    _refused(on_ranks, "the class Accuracy", fit(metrics={"accuracy": Accuracy}, **loss))
    _refused(on_ranks, "update.output, target", fit(metrics={"a": max}, **loss))
    _refused(on_ranks, r"of shape \(3, 3\)", fit(metrics={"m": ConfusionMatrix()}, **loss))


def test_an_error_of_the_users_model_stays_visible(on_ranks: OnRanks) -> None:
    def fit(strategy: Any) -> None:
        _losses(_trainer(strategy, lambda: nn.Linear(6, 3), nn.CrossEntropyLoss()), (X, X, Y))

    with pytest.raises(TypeError, match="positional argument") as caught:
        on_ranks(1, fit)
    (note,) = caught.value.__notes__
    assert "2 parts" in note
    assert "forward=lambda" in note


def test_the_users_metric_is_not_changed(on_ranks: OnRanks) -> None:
    def body(strategy: Any) -> None:
        metric = Mean(lambda output, target: output.amax(1))
        before = metric.state()
        trainer = _trainer(
            strategy, lambda: nn.Linear(6, 3), nn.CrossEntropyLoss(), metrics={"highest": metric}
        )
        trainer.fit((X, Y), validation=(X, Y), progress=False, **SETTINGS)
        assert metric.state() == before

    on_ranks(2, body)
