"""Ranks are lost at every point of a step, and those who are left end with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from parti.comm.memory import Killed, run_ranks
from parti.comm.world import World
from parti.engine import layout
from parti.testing import FaultScript, fingerprint, on_threads

from .. import zoo

POINTS = ("forward", "backward", "reduce", "optimizer", "update", "hand_out", "user")


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model in as many pieces as a large one has."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 512)
    monkeypatch.setattr(layout, "CHUNK_BYTES", 256)


def outcome(world: World, optimizer: str = "adam", clip_norm: float | None = None) -> zoo.Outcome:
    model, made = zoo.make(optimizer)
    return zoo.train(zoo.bind(world, model, made), model, made, 4, clip_norm)


def undisturbed(optimizer: str = "adam", clip_norm: float | None = None) -> zoo.Outcome:
    return on_threads(1, lambda world: outcome(world, optimizer, clip_norm))[0]


@pytest.mark.parametrize("clip_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "plain sgd", "adafactor"])
def test_a_rank_is_lost_at_any_point_of_a_step(
    optimizer: str, point: str, clip_norm: float | None
) -> None:
    if optimizer == "adafactor" and point in ("update", "hand_out"):
        point = "optimizer"  # its update changes nothing of anybody else's
    found = on_threads(
        3,
        lambda world: outcome(world, optimizer, clip_norm),
        FaultScript().kill(rank=1, step=3, at=point),
    )
    assert found == [undisturbed(optimizer, clip_norm)] * 2


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_one_of_two_goes_on_alone(point: str, lost: int) -> None:
    found = on_threads(2, outcome, FaultScript().kill(rank=lost, step=2, at=point))
    assert found == [undisturbed()]


@pytest.mark.parametrize("step", [0, 1, 9])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", ["update", "hand_out"])
def test_every_piece_may_be_the_one_in_hand(point: str, nth: int, step: int) -> None:
    """The first step too, in which the optimizer makes its state."""
    found = on_threads(3, outcome, FaultScript().kill(rank=2, step=step, at=point, nth=nth))
    assert found == [undisturbed()] * 2


def test_one_after_the_other_is_lost() -> None:
    script = (
        FaultScript()
        .kill(rank=0, step=1, at="backward")
        .kill(rank=3, step=4, at="update", nth=2)
        .kill(rank=1, step=7, at="hand_out")
    )
    assert on_threads(4, outcome, script) == [undisturbed()]


@pytest.mark.parametrize("point", POINTS)
def test_two_are_lost_in_one_step(point: str) -> None:
    script = FaultScript().kill(rank=0, step=3, at=point).kill(rank=2, step=3, at="update")
    assert on_threads(4, outcome, script) == [undisturbed()] * 2


@pytest.mark.parametrize("point", ["recover", "update"])
@pytest.mark.parametrize("nth", [1, 2])
def test_who_takes_the_place_of_the_lost_is_lost_too(point: str, nth: int) -> None:
    """Rank 0 finishes what rank 3 has begun, its second piece and its third. Three of its own come
    first in the counting."""
    first = on_threads(
        4,
        outcome,
        FaultScript()
        .kill(rank=3, step=2, at="update", nth=2)
        .kill(rank=0, step=2, at=point, nth=1 if point == "recover" else 3 + nth),
    )
    assert first == [undisturbed()] * 2


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_a_half_changed_piece_is_changed_once_more_from_its_log(optimizer: str) -> None:
    def body(world: World) -> zoo.Outcome:
        model, made = zoo.make(optimizer)
        replica = zoo.bind(world, model, made)
        if world.rank == 1:
            _tear(replica, piece=1, step=3)
        return zoo.train(replica, model, made, 4)

    found = [each for each in run_ranks(3, body) if each is not None]
    assert found == [undisturbed(optimizer)] * 2


def _tear(replica: Any, piece: int, step: int) -> None:
    """Be killed while a piece of the weights and its state are half written."""
    (trained,) = replica._trained.values()
    update = trained.update
    change = update._step_piece
    seen = []

    def torn(part: Any, totals: Any, order: Any, *, is_last: bool) -> None:
        change(part, totals, order, is_last=is_last)
        if order.token == step + 1:
            seen.append(part)
        if len(seen) == piece + 1:
            for chunk in part.chunks:
                chunk[::2] = torch.nan
            for held in part.state:
                held[::3] = 77
            raise Killed

    update._step_piece = torn


def test_hooks_around_the_step_see_the_place_of_the_lost() -> None:
    def body(world: World) -> str:
        model, made = zoo.make("adam")
        made.register_step_pre_hook(_halve)
        replica = zoo.bind(world, model, made)
        zoo.train(replica, model, made, 4)
        return fingerprint(model, made)

    alone = on_threads(1, body)
    found = on_threads(3, body, FaultScript().kill(rank=1, step=3, at="hand_out"))
    assert found == [alone[0]] * 2


def _halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def test_a_loaded_state_is_taken_in_for_the_lost() -> None:
    """It is cut up within the update, where a rank may be lost before it has taken its part."""

    def body(world: World) -> str:
        model, made = zoo.make("adam")
        replica = zoo.bind(world, model, made)
        zoo.train(replica, model, made, 4)
        state = made.state_dict()
        for values in state["state"].values():
            values["exp_avg"].mul_(3.0)
        made.load_state_dict(state)
        zoo.train(replica, model, made, 4)
        return fingerprint(model, made)

    alone = on_threads(1, body)
    for point in ("reduce", "optimizer", "update"):
        found = on_threads(3, body, FaultScript().kill(rank=1, step=10, at=point))
        assert found == [alone[0]] * 2


def test_two_models_and_two_optimizers_in_one_step() -> None:
    def body(world: World) -> str:
        (one, first), (other, second) = zoo.make("adam"), zoo.make("sgd")
        replica = zoo.bind(world, one, other, first, second)

        def loss(words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            both = F.cross_entropy(one(words, 1), following)
            return both + F.cross_entropy(other(words, 1), following)

        for batch in replica.batches((zoo.WORDS, zoo.NEXT), batch_size=16, micro_batches=4):
            replica.step(loss, batch, clip_norm=1.0)
        return fingerprint(one, other, first, second)

    alone = on_threads(1, body)
    for nth in (1, 4, 7):
        found = on_threads(3, body, FaultScript().kill(rank=0, step=2, at="update", nth=nth))
        assert found == [alone[0]] * 2


def test_what_a_lost_rank_had_run_is_run_again() -> None:
    def body(world: World) -> list[Any]:
        model, made = zoo.make("sgd")
        replica = zoo.bind(world, model, made)
        values = []
        for batch in replica.batches((zoo.WORDS, zoo.NEXT), batch_size=16, micro_batches=4):
            parts = replica.run(lambda words, following: model(words, 1).argmax(1), batch)
            values.append(replica.gather(parts).tolist())
            replica.step(lambda words, y: F.cross_entropy(model(words, 1), y), batch)
            parts = replica.run(lambda words, y: (model(words, 1).argmax(1) == y).float(), batch)
            values.append(replica.reduce(parts, "mean", axis=0).item())
        return values

    alone = on_threads(1, body)
    for nth in (1, 2):
        found = on_threads(4, body, FaultScript().kill(rank=1, step=2, at="evaluate", nth=nth))
        assert found == [alone[0]] * 3
