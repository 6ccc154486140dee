"""Mistakes that users make with a Trainer: each is told before or where it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parti import Accuracy, MirroredStrategy, Trainer, datasets
from parti.errors import CheckpointError, ConfigError, DataError

OnRanks = Callable[[int, Callable[[Any], Any]], Sequence[Any]]
X = torch.arange(24.0).view(12, 2) / 10
Y = torch.arange(12) % 3


def _trainer(strategy: Any, **settings: Any) -> Trainer:
    model = settings.pop("model", None) or nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(strategy, model, optimizer, **{"loss": nn.CrossEntropyLoss(), **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "cross_entropy"}, "loss is 'cross_entropy'; expected a function or a module"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; expected a function"),
        ({"loss": None, "forward": 5}, "forward is 5; expected a function"),
        ({"metrics": ["accuracy"]}, r"metrics=\['accuracy'\]; expected metrics by name"),
        ({"metrics": {"accuracy": Accuracy}}, r"metrics\['accuracy'\] is the class Accuracy"),
        ({"scheduler": "cosine"}, "scheduler='cosine'; expected one of torch.optim.lr_scheduler"),
        ({"clip_norm": "1"}, "clip_norm='1': expected a positive number, or None"),
        ({"on_nan": "rise"}, "on_nan='rise': expected 'raise', 'warn' or 'ignore'"),
    ],
)
def test_settings_of_the_wrong_kind(on_ranks: OnRanks, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        on_ranks(1, lambda strategy: _trainer(strategy, **settings))


def test_a_strategy_or_a_model_that_is_none(on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="strategy is 'mirrored'; expected a strategy such as"):
        _trainer("mirrored")
    with pytest.raises(ConfigError, match="the class MirroredStrategy; make one of it"):
        _trainer(MirroredStrategy)
    with pytest.raises(ConfigError, match=r"model is the class Linear; expected a torch\.nn"):
        on_ranks(1, lambda strategy: Trainer(strategy, nn.Linear))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs=0; expected a whole number from 1 on"),
        ({"checkpoint": "saved"}, r"checkpoint=.saved.; expected parti\.Checkpoint\(directory\)"),
        ({"epochs": "3"}, "epochs='3'; expected a whole number from 1 on"),
        ({"epochs": True}, "epochs=True; expected a whole number from 1 on"),
        ({"batch_size": 0}, "batch_size=0; expected a whole number from 1 on"),
        ({"batch_size": "64"}, "batch_size='64'; expected a whole number from 1 on"),
        ({"batch_size": 8, "micro_batches": 9}, "micro_batches=9 is more than batch_size=8"),
        ({"batch_size": 99, "drop_last": True}, "batch_size=99 with drop_last leaves no batch"),
        ({"validation": (X, Y), "validation_batch_size": 0}, "batch_size=0; expected a whole"),
    ],
)
def test_settings_of_fit(on_ranks: OnRanks, settings: Any, words: str) -> None:
    def body(strategy: Any) -> None:
        _trainer(strategy).fit((X, Y), **{"batch_size": 4, "progress": False, **settings})

    with pytest.raises(ConfigError, match=words):
        on_ranks(1, body)


NO_DATA_SETS: list[tuple[Any, str]] = [
    (5, "data of type int is not a data set"),
    ((X[:0], Y[:0]), "the data set is empty: its tuple has 0 samples"),
    ((X, Y[:-1]), r"\[0\] has 12, \[1\] has 11"),
    (datasets.digits(), r"the splits 'train' and 'test'; pass one of them: `data\.train`"),
]


@pytest.mark.parametrize(("data", "words"), [(None, "of type NoneType is not"), *NO_DATA_SETS])
def test_what_is_no_data_set(on_ranks: OnRanks, data: Any, words: str) -> None:
    def body(strategy: Any) -> None:
        _trainer(strategy).fit(data, batch_size=4, progress=False)

    with pytest.raises(DataError, match=words):
        on_ranks(1, body)


@pytest.mark.parametrize(("data", "words"), NO_DATA_SETS)
def test_what_is_no_validation_set_is_told_before_training(
    on_ranks: OnRanks, data: Any, words: str
) -> None:
    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        with pytest.raises(DataError, match=words):
            trainer.fit((X, Y), batch_size=4, validation=data, progress=False)
        assert trainer.step == 0

    on_ranks(1, body)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


@pytest.mark.parametrize(
    ("model", "data", "note"),
    [
        (Pair(), (X, Y), r"output, a tuple of 2 \(a tensor of shape \(4, 3\) and type float32, "),
        (nn.Linear(2, 3), (X, Y.float()), r"target, a tensor of shape \(4,\) and type float32"),
        (nn.Linear(2, 3), (X.long(), Y), r"Linear was called with 1 part \(a tensor .* int64"),
        (nn.Linear(5, 3), (X, Y), r"Linear was called with 1 part \(a tensor of shape \(4, 2\)"),
    ],
)
def test_torchs_own_errors_say_what_was_computed(
    on_ranks: OnRanks, model: nn.Module, data: Any, note: str
) -> None:
    def body(strategy: Any) -> None:
        _trainer(strategy, model=model).fit(
            data, batch_size=4, micro_batches=1, shuffle=False, progress=False
        )

    with pytest.raises((RuntimeError, TypeError)) as caught:
        on_ranks(1, body)
    (said,) = caught.value.__notes__
    assert re.search(note, said), said


def test_a_loss_without_a_gradient(on_ranks: OnRanks) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.detach(), target)

    def body(strategy: Any) -> None:
        _trainer(strategy, loss=loss).fit((X, Y), batch_size=4, progress=False)

    with pytest.raises(ConfigError, match=r"no trainable parameter.*Look for \.detach\(\)"):
        on_ranks(1, body)


def test_a_step_on_what_is_no_batch(on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="train_step got a tuple; expected a batch that"):
        on_ranks(1, lambda strategy: _trainer(strategy).train_step((X, Y)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["state.pt", "weights.safetensors"])
def test_a_file_that_is_something_else(on_ranks: OnRanks, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("hello")
    with pytest.raises(CheckpointError, match=f"could not read .*{name}: .*trainer.save wrote"):
        on_ranks(2, lambda strategy: _trainer(strategy).load(tmp_path / name))
