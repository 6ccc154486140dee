"""The promise: the same bits on any number of ranks. Over ranks as threads, so all can be tried."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parti.comm.world import World
from parti.errors import CommTimeout, ConfigError, RankMismatch
from parti.testing import fingerprint, on_threads

from ..zoo import NEXT, OPTIMIZERS, WORDS, Outcome, Zoo, bind, make, train

RANKS = (1, 2, 3, 4, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("micro_batches", [4, 6])
def test_any_number_of_ranks_gives_one_fingerprint(
    optimizer: str, micro_batches: int, dtype: torch.dtype
) -> None:
    def body(world: World) -> Outcome:
        model, its_optimizer = make(optimizer, dtype)
        replica = bind(world, model, its_optimizer)
        return train(replica, model, its_optimizer, micro_batches, clip_norm=1.0)

    outcomes = {outcome for num_ranks in RANKS for outcome in on_threads(num_ranks, body)}
    assert len(outcomes) == 1


def test_the_order_of_micro_batches_matters_to_a_plain_sum() -> None:
    """The property above is not trivial: without the tree the bits differ."""

    def body(world: World) -> Outcome:
        model, optimizer = make("adam")
        return train(bind(world, model, optimizer, exact=False), model, optimizer, 6)

    outcomes = [on_threads(num_ranks, body)[0] for num_ranks in (1, 2, 3)]
    assert len({outcome.fingerprint for outcome in outcomes}) > 1
    for outcome in outcomes[1:]:
        torch.testing.assert_close(
            torch.tensor(outcome.losses), torch.tensor(outcomes[0].losses), rtol=1e-4, atol=1e-5
        )


def test_one_micro_batch_is_the_plain_pytorch_loop_to_the_bit() -> None:
    """With batches of a power of two, summing and dividing once loses nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 20))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    its_optimizer = torch.optim.AdamW(twin.parameters(), 1e-2)
    replica = bind(World(0, 1, _solo()), model, optimizer)
    for batch in replica.batches(
        (WORDS.float()[:64], NEXT[:64]), batch_size=16, micro_batches=1, epochs=3
    ):
        replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
        x, y = batch.micro_batches[0].data
        its_optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        its_optimizer.step()
    assert fingerprint(model) == fingerprint(twin)


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    """Uneven micro-batches and a short last batch: still the true global mean."""
    torch.manual_seed(0)
    model = nn.Linear(6, 20).double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    its_optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    data = (WORDS.double(), NEXT)

    def body(world: World) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        replica = bind(world, mine, torch.optim.SGD(mine.parameters(), 0.1))
        for batch in replica.batches(data, batch_size=16, micro_batches=5):
            replica.step(lambda x, y: F.cross_entropy(mine(x), y), batch)
        return [p.detach() for p in mine.parameters()]

    alone = bind(World(0, 1, _solo()), model, optimizer)
    for batch in alone.batches(data, batch_size=16, micro_batches=1):
        x, y = batch.micro_batches[0].data
        its_optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        its_optimizer.step()
    for weights in on_threads(3, body):
        torch.testing.assert_close(weights, [p.detach() for p in twin.parameters()])


def test_a_gan_trains_two_models_with_two_optimizers() -> None:
    def body(world: World) -> str:
        torch.manual_seed(0)
        generator, critic = (
            nn.Linear(4, 6),
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        its = torch.optim.Adam(generator.parameters(), 1e-2)
        others = torch.optim.Adam(critic.parameters(), 1e-2)
        replica = bind(world, generator, critic, its, others)

        def critics_loss(words: torch.Tensor) -> torch.Tensor:
            made = generator(torch.randn(len(words), 4))  # not detached, as in careless code
            return F.softplus(critic(made)).mean() + F.softplus(-critic(words.float())).mean()

        def generators_loss(words: torch.Tensor) -> torch.Tensor:
            return F.softplus(-critic(generator(torch.randn(len(words), 4)))).mean()

        for batch in replica.batches((WORDS,), batch_size=16, micro_batches=4):
            replica.step(critics_loss, batch, optimizer=others)
            replica.step(generators_loss, batch, optimizer=its)
        return fingerprint(generator, critic, its, others)

    assert len({each for n in (1, 2, 3) for each in on_threads(n, body)}) == 1


def test_freezing_and_thawing_midway_keeps_the_optimizer_state() -> None:
    def body(world: World) -> str:
        model, optimizer = make("adam")
        replica = bind(world, model, optimizer)
        train(replica, model, optimizer, 4)
        model.embedding.weight.requires_grad_(False)
        train(replica, model, optimizer, 4)
        model.embedding.weight.requires_grad_(True)
        return train(replica, model, optimizer, 4).fingerprint

    assert len({each for n in (1, 2, 3) for each in on_threads(n, body)}) == 1


def test_optimizer_state_survives_a_save_and_a_load_on_other_ranks() -> None:
    def first(world: World) -> tuple[dict, dict]:  # type: ignore[type-arg]
        model, optimizer = make("adamw")
        train(bind(world, model, optimizer), model, optimizer, 4)
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    saved = [on_threads(n, first)[-1] for n in (1, 3)]

    def second(world: World) -> str:
        model, optimizer = make("adamw")
        replica = bind(world, model, optimizer)
        model.load_state_dict(saved[1][0])
        optimizer.load_state_dict(saved[1][1])
        return train(replica, model, optimizer, 4).fingerprint

    assert len({each for n in (1, 2, 4) for each in on_threads(n, second)}) == 1
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)


def test_models_built_from_other_random_numbers_start_from_rank_0s() -> None:
    def body(world: World) -> str:
        torch.manual_seed(world.rank)
        model = Zoo()
        bind(world, model, torch.optim.SGD(model.parameters(), 0.1))
        return fingerprint(model)

    assert len(set(on_threads(3, body))) == 1


def test_different_models_are_a_mismatch_that_names_the_parameter() -> None:
    def body(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 5 if world.rank == 2 else 4), nn.Linear(4, 2))
        bind(world, model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(RankMismatch, match=r"ranks 0 and 2 .*0\.weight \[4, 4\] float32"):
        on_threads(3, body)


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(world: World) -> None:
        if world.rank != 1:
            world.exchange(b"")
        # rank 1 ends without a word

    with pytest.raises((CommTimeout, OSError, RuntimeError), match="rank 1"):
        on_threads(3, body)


def test_an_optimizer_that_was_not_bound_is_refused() -> None:
    model, optimizer = make("sgd")
    replica = bind(World(0, 1, _solo()), model, optimizer)
    stranger = torch.optim.SGD(model.parameters(), 0.1)
    batch = next(iter(replica.batches((WORDS, NEXT), batch_size=8)))
    with pytest.raises(ConfigError, match="SGD was not bound"):
        replica.step(lambda x, y: model(x, 0).sum(), batch, optimizer=stranger)


def test_reduce_and_gather_do_not_depend_on_the_number_of_ranks() -> None:
    def body(world: World) -> tuple[object, ...]:
        model, optimizer = make("sgd")
        replica = bind(world, model, optimizer)
        batch = next(iter(replica.batches((WORDS, NEXT), batch_size=13, micro_batches=4)))
        losses = replica.run(lambda x, y: F.cross_entropy(model(x, 0), y, reduction="none"), batch)
        first = replica.run(lambda x, y: {"y": y, "n": len(y)}, batch)
        return (
            replica.reduce(losses, "mean", axis=0).item(),
            replica.reduce(losses, "max", axis=0).item(),
            replica.gather(losses).tolist(),
            replica.gather(first)["y"].tolist(),
            replica.gather(first)["n"],
        )

    outcomes = [each for n in (1, 2, 5) for each in on_threads(n, body)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert len(outcomes[0][2]) == 13  # type: ignore[arg-type]
    assert outcomes[0][4] == [4, 3, 3, 3]


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("min", 1.0), ("max", 3.0)]
)
def test_plain_values_are_reduced_over_ranks(op: str, expected: float) -> None:
    def body(world: World) -> float:
        replica = bind(world, nn.Linear(1, 1))
        return float(replica.reduce(torch.tensor(float(world.rank + 1)), op))

    assert on_threads(3, body) == [expected] * 3


def test_a_mean_weighs_by_the_true_count() -> None:
    def body(world: World) -> float:
        replica = bind(world, nn.Linear(1, 1))
        value, count = ((1.0, 6), (4.0, 2))[world.rank]
        return float(replica.reduce(torch.tensor(value), "mean", count=count))

    assert on_threads(2, body) == [(1.0 * 6 + 4.0 * 2) / 8] * 2


def test_an_unknown_reduction_lists_the_known_ones() -> None:
    replica = bind(World(0, 1, _solo()), nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="'avg' is not known; expected one of 'sum', 'mean'"):
        replica.reduce(torch.tensor(1.0), "avg")


def _solo():  # type: ignore[no-untyped-def]
    from parti.comm.solo import Solo

    return Solo()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_large_layers_that_write_their_gradients_themselves(clip_norm: float | None) -> None:
    """Pieces of several chunks, gradients that are not copied, a layer that rests at times."""

    def body(world: World) -> str:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 700), nn.Linear(700, 1100), nn.Linear(1100, 1100)])
        head = nn.Linear(1100, 20)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3, fused=True)
        replica = bind(world, model, head, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for batch in replica.batches((WORDS.float(), NEXT), batch_size=20, micro_batches=3):
            odd = replica.step_number % 2

            def loss(x: torch.Tensor, y: torch.Tensor, odd: int = odd) -> torch.Tensor:
                hidden = model[1](F.relu(model[0](x)))
                return F.cross_entropy(head(model[2](hidden) if odd else hidden), y)

            replica.step(loss, batch, clip_norm=clip_norm)
            schedule.step()
        return fingerprint(model, head, optimizer)

    assert len({each for n in RANKS for each in on_threads(n, body)}) == 1


def test_hooks_around_the_optimizers_step_are_called_once_a_step() -> None:
    def body(world: World) -> tuple[int, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 20))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        replica = bind(world, model, optimizer)
        for batch in replica.batches((WORDS.float(), NEXT), batch_size=32, micro_batches=2):
            replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
        return len(calls), fingerprint(model, optimizer)

    assert len({each for n in (1, 2, 3) for each in on_threads(n, body)}) == 1
    assert on_threads(2, body)[0][0] == 3
