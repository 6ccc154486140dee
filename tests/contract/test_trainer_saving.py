"""Saved weights and training states: whole files, on every rank, and training that goes on."""

from __future__ import annotations

import datetime
import math
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.optim import lr_scheduler

from parti import saving
from parti.callbacks import EarlyStopping, LambdaCallback, StepEnd
from parti.errors import CheckpointError, ConfigError
from parti.trainer import Trainer
from parti.weights import EMA

OnRanks = Callable[[int, Callable[[Any], Any]], Sequence[Any]]

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
SETTINGS: dict[str, Any] = {"batch_size": 8, "micro_batches": 2, "progress": False}  # 3 steps


class Tied(nn.Module):
    """The last layer's matrix is the first one's; the middle layer's is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.middle = nn.Linear(3, 4)
        self.middle.weight = nn.Parameter(torch.randn(3, 4).t())
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.norm(self.middle(self.first(x))))
        return hidden


def _trainer(strategy: Any, build: Callable[[], nn.Module] = Tied, **named: Any) -> Trainer:
    with strategy.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    return Trainer(strategy, model, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, **named)


def _state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("size", [1, 3])
def test_weights_come_back_whole(size: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"

    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        trainer.fit((X, Y), **SETTINGS)
        saved = _state(trainer)
        trainer.save(path)
        trainer.fit((X, Y), epochs=2, **SETTINGS)
        trainer.load(str(path))
        _assert_same(_state(trainer), saved)
        assert trainer.model.last.weight is trainer.model.first.weight
        assert trainer.step == 6

    on_ranks(size, body)
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    assert "last.weight" not in load_file(path)
    other = Tied()
    load_model(other, path)
    assert torch.equal(other.last.weight, load_file(path)["first.weight"])


def test_the_average_is_what_is_saved(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def body(strategy: Any) -> None:
        trainer = _trainer(strategy, average=EMA(0.9))
        trainer.fit((X, Y), **SETTINGS)
        live = _state(trainer)
        with trainer.averaged():
            judged = _state(trainer)
        trainer.save(path)
        _assert_same(_state(trainer), live)
        held = load_file(path)
        assert all(torch.equal(judged[name], value) for name, value in held.items())
        assert not torch.equal(live["first.weight"], held["first.weight"])

    on_ranks(2, body)


@pytest.mark.parametrize(("size", "resumed_size"), [(1, 1), (2, 3), (3, 1)])
def test_training_goes_on_as_if_it_had_never_stopped(
    size: int, resumed_size: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"

    def made(strategy: Any, *callbacks: object) -> Trainer:
        stopping = EarlyStopping("loss", patience=99, restore_best=True)
        return _trainer(strategy, average=EMA(0.9), callbacks=[stopping, *callbacks])

    def whole(strategy: Any) -> tuple[Any, ...]:
        def save_in_the_middle(event: StepEnd) -> None:
            if event.report.step == 4:
                event.trainer.save(path)

        trainer = made(strategy, LambdaCallback(on_step_end=save_in_the_middle))
        history = trainer.fit((X, Y), epochs=4, **SETTINGS)
        return (
            _state(trainer),
            history.step_losses.tolist()[5:],
            trainer.evaluate((X, Y), batch_size=8),
        )

    def resumed(strategy: Any) -> tuple[Any, ...]:
        trainer = made(strategy, LambdaCallback(on_step_end=lambda event: None))
        trainer.load(path)
        assert (trainer.step, trainer.epoch) == (5, 1)
        history = trainer.fit((X, Y), epochs=4, **SETTINGS)
        assert [row["epoch"] for row in history.rows] == [2, 3, 4]
        return _state(trainer), history.step_losses.tolist(), trainer.evaluate((X, Y), batch_size=8)

    state, losses, evaluated = on_ranks(size, whole)[0]
    for found in on_ranks(resumed_size, resumed):
        _assert_same(found[0], state)
        assert found[1:] == (losses, evaluated)


def test_a_bare_state_dict_loads_as_weights(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    model = Tied()
    torch.save(model.state_dict(), path)

    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        trainer.load(path)
        _assert_same(_state(trainer), model.state_dict())

    on_ranks(2, body)


def test_a_failed_write_is_an_error_on_every_rank_and_leaves_the_old_file(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")

    def full(state: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    def body(strategy: Any) -> str:
        trainer = _trainer(strategy)
        monkeypatch.setattr(saving.torch, "save", full)
        with pytest.raises(CheckpointError) as caught:
            trainer.save(path)
        return str(caught.value)

    assert set(on_ranks(3, body)) == {f"rank 0 could not write {path}: No space left on device."}
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("state.pt", b"old")]


@pytest.mark.parametrize("name", ["state.pt", "weights.safetensors"])
def test_a_disk_that_fills_up_is_named_as_that(
    on_ranks: OnRanks, tmp_path: Path, name: str
) -> None:
    """A limit on the size of files stands for the disk."""

    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            trainer.save(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(CheckpointError, match=f"rank 0 could not write .*{name}: .*File too large"):
        on_ranks(1, body)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_the_same_error_on_every_rank(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    (tmp_path / "odd.pt").write_bytes(b"1234")
    torch.save([1, 2], tmp_path / "list.pt")

    def body(strategy: Any) -> None:
        trainer = _trainer(strategy)
        with pytest.raises(CheckpointError, match=r"rank 0 could not read .*No such file"):
            trainer.load(tmp_path / "missing.pt")
        for name, match in (
            ("cut.safetensors", "rank 0 could not read"),
            ("odd.pt", "rank 0 could not read"),
            ("list.pt", "holds a list that is neither"),
        ):
            with pytest.raises(CheckpointError, match=match):
                trainer.load(tmp_path / name)
        mine = tmp_path / f"{strategy.rank}.safetensors"
        saving.write_weights(mine, Tied())
        with pytest.raises(CheckpointError, match="different files"):
            trainer.load(mine)
        with pytest.raises(ConfigError, match=r"'model\.bin' does not say.*\.safetensors"):
            trainer.save("model.bin")

    on_ranks(2, body)


def test_a_state_of_another_trainer_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def body(strategy: Any) -> None:
        _trainer(strategy).save(path)
        with pytest.raises(CheckpointError, match=r"no averaged weights.*EMA\(decay=0\.9"):
            _trainer(strategy, average=EMA(0.9)).load(path)
        with pytest.raises(CheckpointError, match="0 callbacks and an optimizer"):
            _trainer(strategy, callbacks=[EarlyStopping("loss")]).load(path)
        with pytest.raises(CheckpointError, match="do not fit this model"):
            _trainer(strategy, lambda: nn.Linear(4, 3)).load(path)

    on_ranks(1, body)


def test_a_state_holds_nothing_that_would_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\[0\]\.when is a datetime"):
        saving.write_state(tmp_path / "s.pt", {"callbacks": [{"when": datetime.date(2020, 1, 1)}]})
    saving.write_state(tmp_path / "s.pt", {"x": [1, math.nan, None, ("a", torch.ones(1))]})
    assert saving.read_state(tmp_path / "s.pt")["x"][3] == ("a", torch.ones(1))
