"""A Trainer's numbers: one set for any number of ranks, and those of a plain PyTorch loop."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parti
from parti.data.batches import Feed
from parti.metrics import Accuracy, Mean, TopK
from parti.trainer import Trainer

OnRanks = Callable[[int, Callable[[Any], Any]], Sequence[Any]]


def _classes(num: int, *, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 6, generator=generator)
    return x, (x[:, :4].argmax(1) + torch.randint(0, 2, (num,), generator=generator)) % 4


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def _digest(tensors: dict[str, Tensor] | Tensor) -> str:
    values = [tensors] if isinstance(tensors, Tensor) else list(tensors.values())
    joined = b"".join(value.detach().contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(joined).hexdigest()


def _exact(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.endswith("_s")}


def test_everything_is_the_same_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    train, held_out = _classes(75), _classes(41, seed=4)

    def body(strategy: Any) -> object:
        with strategy.scope():
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = Trainer(
            strategy,
            model,
            optimizer,
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.3, 2.0, 0.7]), ignore_index=3),
            metrics={
                "accuracy": Accuracy(),
                "top2": TopK(2),
                "margin": Mean(lambda output, target: output.amax(1) - output.mean(1)),
            },
            clip_norm=0.5,
            average=parti.EMA(0.9),
        )
        history = trainer.fit(
            train,
            batch_size=16,
            micro_batches=4,
            epochs=3,
            validation=held_out,
            validation_batch_size=20,
            progress=False,
        )
        evaluated = trainer.evaluate(held_out, batch_size=20, micro_batches=3)
        predicted = trainer.predict(held_out, batch_size=20, micro_batches=3)
        return (
            _digest(model.state_dict()),
            [_exact(row) for row in history.rows],
            history.step_losses.tolist(),
            evaluated,
            _digest(predicted),
            predicted.shape,
        )

    expected = on_ranks(1, body)[0]
    for size in (2, 3, 4, 6):
        assert all(found == expected for found in on_ranks(size, body)), f"{size} ranks"


Case = tuple[Any, Callable[[], nn.Module], Tensor, Tensor]

TOKENS = torch.randint(0, 9, (23, 5), generator=torch.Generator().manual_seed(1))
CASES: dict[str, Case] = {
    "mean with weights and ignored": (
        nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 0.3, 2.0, 0.7], dtype=torch.float64), ignore_index=2
        ),
        lambda: nn.Linear(6, 4),
        *_classes(23),
    ),
    "tokens": (
        nn.CrossEntropyLoss(ignore_index=0),
        lambda: nn.Sequential(nn.Embedding(9, 9), _Turned()),
        TOKENS,
        TOKENS.roll(1, 1),
    ),
    "sum": (nn.MSELoss(reduction="sum"), lambda: nn.Linear(6, 1), _classes(23)[0], TOKENS[:, :1]),
    "none": (
        functools.partial(F.l1_loss, reduction="none"),
        lambda: nn.Linear(6, 3),
        _classes(23)[0],
        TOKENS[:, :3],
    ),
    "a mean over samples": (
        lambda output, target: (output - target).abs().sum(1).mean(),
        lambda: nn.Linear(6, 3),
        _classes(23)[0],
        TOKENS[:, :3],
    ),
    "a sum and its count": (
        lambda output, target: ((output - target).square().sum(), target.ne(0).sum()),
        lambda: nn.Linear(6, 3),
        _classes(23)[0],
        TOKENS[:, :3],
    ),
}


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _plain(value: object) -> Tensor:
    """What one process would call backward on."""
    if isinstance(value, tuple):
        return value[0] / value[1]
    assert isinstance(value, Tensor)
    return value if value.dim() == 0 else value.mean()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plain_loop_over_whole_batches_agrees(name: str, size: int, on_ranks: OnRanks) -> None:
    loss, build, inputs, targets = CASES[name]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    targets = targets if "ignored" in name or name == "tokens" else targets.double()
    # Batches of 5 cut in 3, and a last batch of 3: every slice differs from its neighbour.
    settings = {"batch_size": 5, "micro_batches": 3, "epochs": 2}

    def body(strategy: Any) -> tuple[dict[str, Tensor], list[float]]:
        with strategy.scope():
            model = build().double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = Trainer(strategy, model, optimizer, loss)
        history = trainer.fit((inputs, targets), progress=False, **settings)
        return model.state_dict(), history.step_losses.tolist()

    def alone(strategy: Any) -> tuple[dict[str, Tensor], list[float]]:
        with strategy.scope():
            model = build().double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for batch in Feed((inputs, targets), owned=range, **settings):
            x = torch.cat([piece.data[0] for piece in batch.micro_batches])
            y = torch.cat([piece.data[1] for piece in batch.micro_batches])
            value = _plain(loss(model(x), y))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return model.state_dict(), losses

    (expected, losses) = on_ranks(1, alone)[0]
    for weights, found in on_ranks(size, body):
        assert found == pytest.approx(losses, rel=1e-12)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-13)


def test_evaluation_is_the_mean_over_all_samples(on_ranks: OnRanks) -> None:
    x, y = _classes(37)

    def body(strategy: Any) -> dict[str, float]:
        with strategy.scope():
            model = nn.Linear(6, 4).double()
        trainer = Trainer(
            strategy, model, loss=nn.CrossEntropyLoss(), metrics={"accuracy": Accuracy()}
        )
        found = trainer.evaluate((x.double(), y), batch_size=10, micro_batches=4)
        with torch.no_grad():
            output = model(x.double())
        assert found["loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-13)
        assert found["accuracy"] == (output.argmax(1) == y).sum().item() / 37
        return found

    expected = on_ranks(1, body)
    for size in (2, 5):
        assert set(map(str, on_ranks(size, body))) == {str(expected[0])}


def test_a_batch_in_which_nothing_counts_changes_nothing(on_ranks: OnRanks) -> None:
    x, y = _classes(8)
    y[:] = -100

    def body(strategy: Any) -> None:
        with strategy.scope():
            model = nn.Linear(6, 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trainer = Trainer(
            strategy,
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            nn.CrossEntropyLoss(),
        )
        history = trainer.fit((x, y), batch_size=4, micro_batches=2, progress=False)
        assert str(history["loss"]) == "[nan]"
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    on_ranks(2, body)
