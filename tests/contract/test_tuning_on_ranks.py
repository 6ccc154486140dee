"""Tuning keeps the promise: the same bits on any number of ranks, and right ones, whatever it does.

The kind of processor decides about fp32 products, so here it is said to be the right one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from parti.comm.solo import Solo
from parti.comm.world import World
from parti.engine.replica import Replica
from parti.engine.transforms import fp32_products
from parti.engine.transforms.change import Change, Effect, Patch
from parti.engine.transforms.first_batch import FirstBatchCheck
from parti.engine.transforms.precision import forward_context
from parti.engine.tuning import Applied, Tuning, apply
from parti.testing import fingerprint, on_threads

CPU = torch.device("cpu")
RANKS = (1, 2, 3)
_generator = torch.Generator().manual_seed(2)
IMAGES = torch.randn(44, 1, 12, 12, generator=_generator)
LABELS = torch.randint(0, 10, (44,), generator=_generator)


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_products, "pays_on", lambda processor: True)
    monkeypatch.setattr(fp32_products, "MIN_MULTIPLICATIONS", 1 << 10)


class Net(nn.Module):
    """Statistics, dropout, a view, calls to exchange and layers to route."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.more = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.dropout = nn.Dropout2d(0.25)
        self.hidden = nn.Linear(64, 128)
        self.classes = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.convolution(images))), 2)
        x = self.dropout(self.more(x))
        x = F.dropout(F.relu(self.hidden(x.view(len(x), -1))), 0.3, self.training)
        return self.classes(x)


NOTES = (
    "fused AdamW",
    "ReLU behind max-pool (2)",
    "channels_last (2 convolutions)",
    "oneDNN fp32 products (1 linear)",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has to be the same on every rank, and for any number of them."""

    fingerprint: str
    losses: tuple[float, ...]
    notes: tuple[str, ...]
    complaint: str | None


Forward = Callable[[Net, Tensor, Tensor], Any]
Apply = Callable[[Net, Optimizer], Applied]


def cross_entropy(model: Net, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def tuned(tuning: Tuning, precision: str = "fp32", compile: bool = False) -> Apply:
    return lambda model, optimizer: apply(
        tuning, [model], [optimizer], device=CPU, precision=precision, compile=compile
    )


ON = Tuning(allocator=False)
ONLY_FUSED = Tuning(allocator=False, layout=False, fast_matmul=False)


def replica_of(
    world: World, model: nn.Module, optimizer: Optimizer, applied: Applied, precision: str = "fp32"
) -> Replica:
    return Replica(
        strategy=None,
        world=world,
        device=CPU,
        models=[model],
        optimizers=[optimizer],
        seed=3,
        exact=True,
        applied=applied,
        precision=nullcontext if precision == "fp32" else forward_context(precision, CPU),
    )


def train(
    world: World,
    put_on: Apply,
    forward: Forward = cross_entropy,
    *,
    epochs: int = 2,
    precision: str = "fp32",
    make: Callable[[], Net] = Net,
) -> Outcome:
    """Batches of 16, the last one of 12, in five micro-batches."""
    torch.manual_seed(0)
    model = make()
    keys = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    applied = put_on(model, optimizer)
    replica = replica_of(world, model, optimizer, applied, precision)
    losses = []
    for batch in replica.batches((IMAGES, LABELS), batch_size=16, micro_batches=5, epochs=epochs):
        losses.append(replica.step(functools.partial(forward, model), batch).loss)
    assert list(model.state_dict()) == keys
    assert applied.check is None and not model._forward_pre_hooks
    is_changed = any("forward" in module.__dict__ for module in model.modules())
    assert is_changed is bool(applied.changes)
    return Outcome(fingerprint(model, optimizer), tuple(losses), applied.notes, applied.complaint)


def on_any_number_of_ranks(body: Callable[[World], Outcome]) -> Outcome:
    (outcome,) = {each for n in RANKS for each in on_threads(n, body)}
    return outcome


def alone(body: Callable[[World], Outcome]) -> Outcome:
    return body(World(0, 1, Solo()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_ranks_gives_one_fingerprint(precision: str) -> None:
    body = functools.partial(train, put_on=tuned(ON, precision), precision=precision)
    outcome = on_any_number_of_ranks(body)
    assert outcome.notes == (NOTES if precision == "fp32" else NOTES[:-1])
    assert outcome.complaint is None


def test_tuning_changes_roundings_and_nothing_else() -> None:
    """Without dropout, whose draws follow the order in memory. SGD, as Adam's first steps make
    something of roundings."""

    def outcome(tuning: Tuning) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net().double()
        model.dropout.p, model.train_dropout = 0.0, 0.0
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        applied = apply(tuning, [model], [optimizer], device=CPU)
        replica = replica_of(World(0, 1, Solo()), model, optimizer, applied)

        def forward(images: Tensor, labels: Tensor) -> Tensor:
            with _no_dropout():
                return F.cross_entropy(model(images), labels)

        data = (IMAGES.double(), LABELS)
        for batch in replica.batches(data, batch_size=16, micro_batches=5, epochs=2):
            replica.step(forward, batch)
        assert applied.complaint is None
        return list(model.state_dict().values())

    torch.testing.assert_close(outcome(ON), outcome(Tuning.none()), rtol=1e-9, atol=1e-11)


class _no_dropout(torch.overrides.TorchFunctionMode):  # noqa: N801
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is F.dropout else func(*args, **(kwargs or {}))


def negated(self: nn.Linear, input: Tensor) -> Tensor:
    return -nn.Linear.forward(self, input)


def raises(self: nn.Linear, input: Tensor) -> Tensor:
    raise ZeroDivisionError("by design")


def raises_in_backward(self: nn.Linear, input: Tensor) -> Tensor:
    outputs = nn.Linear.forward(self, input)
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: 1 // 0)  # type: ignore[no-untyped-call]
    return outputs


def with_a_wrong_change(function: Callable[..., Tensor], effect: Effect) -> Apply:
    """All that tuning does, and one change more that is wrong."""

    def put_on(model: Net, optimizer: Optimizer) -> Applied:
        applied = apply(ON, [model], [optimizer], device=CPU)
        wrong = Change(
            note="wrong", effect=effect, patches=(Patch(model.classes, "forward", function),)
        )
        wrong.on()
        applied.changes = (*applied.changes, wrong)
        applied.notes = (*applied.notes, wrong.note)
        applied.check = FirstBatchCheck([model], applied.changes)
        return applied

    return put_on


@pytest.mark.parametrize(
    ("function", "effect", "complaint"),
    [
        (negated, Effect.EQUAL, "exchanged operations gave other values"),
        (negated, Effect.ROUNDING, "the outputs differ 2e+03 times as much as allowed"),
        (raises, Effect.EQUAL, "the model raised ZeroDivisionError: by design"),
        (
            raises_in_backward,
            Effect.ROUNDING,
            "the step raised ZeroDivisionError: integer division or modulo by zero",
        ),
    ],
)
def test_a_wrong_change_leaves_no_trace_in_the_numbers(
    function: Callable[..., Tensor], effect: Effect, complaint: str
) -> None:
    """Everything is taken off on every rank, and the first step has the bits of an untuned one."""
    put_on = with_a_wrong_change(function, effect)
    outcome = on_any_number_of_ranks(functools.partial(train, put_on=put_on))
    plain = alone(functools.partial(train, put_on=tuned(ONLY_FUSED)))
    assert outcome.complaint == complaint
    assert outcome.notes == (NOTES[0], f"layout and products left as they were: {complaint}")
    assert (outcome.fingerprint, outcome.losses) == (plain.fingerprint, plain.losses)


def by_parts(model: Net, images: Tensor, labels: Tensor) -> Tensor:
    """A loss that calls parts of the model, and minds the order of an image in memory."""
    x = model.more(model.norm(model.convolution(images)))
    return F.cross_entropy(x.view(len(x), -1), labels)


def test_code_around_the_model_that_minds_the_order_gets_the_default_one() -> None:
    outcome = on_any_number_of_ranks(functools.partial(train, put_on=tuned(ON), forward=by_parts))
    plain = alone(functools.partial(train, put_on=tuned(ONLY_FUSED), forward=by_parts))
    assert "the step raised RuntimeError: view size is not compatible" in str(outcome.complaint)
    assert (outcome.fingerprint, outcome.losses) == (plain.fingerprint, plain.losses)


def by_number(model: Net, images: Tensor, labels: Tensor) -> Tensor:
    """Only the micro-batch with the last image minds the order."""
    return (by_parts if images[-1].equal(IMAGES[-1]) else cross_entropy)(model, images, labels)


def test_a_step_that_fails_on_another_rank_than_the_one_that_checks() -> None:
    """In the first step it counts wherever it is computed."""

    def first_step(world: World, put_on: Apply) -> tuple[str, str | None, list[int]]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        applied = put_on(model, optimizer)
        replica = replica_of(world, model, optimizer, applied)
        (batch,) = replica.batches((IMAGES, LABELS), batch_size=44, micro_batches=5, shuffle=False)
        replica.step(functools.partial(by_number, model), batch)
        mine = [piece.number for piece in batch.micro_batches]
        return fingerprint(model, optimizer), applied.complaint, mine

    plain = on_threads(1, functools.partial(first_step, put_on=tuned(ONLY_FUSED)))[0]
    for num_ranks in RANKS:
        outcomes = on_threads(num_ranks, functools.partial(first_step, put_on=tuned(ON)))
        assert 0 in outcomes[0][2] and 4 in outcomes[-1][2]
        for made, complaint, _ in outcomes:
            assert made == plain[0]
            assert "the step raised RuntimeError: view size" in str(complaint)


def test_an_error_of_the_users_is_raised_as_it_is() -> None:
    def forward(model: Net, images: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("the user's own")

    for num_ranks in RANKS:
        with pytest.raises(KeyError, match="the user's own") as caught:
            on_threads(num_ranks, functools.partial(train, put_on=tuned(ON), forward=forward))
        assert caught.value.__context__ is None


def test_a_model_that_is_not_called_is_not_waited_for_longer_than_a_few_steps() -> None:
    def forward(model: Net, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.classes(model.hidden(images.flatten(1)[:, :64])), labels)

    outcome = on_any_number_of_ranks(
        functools.partial(train, put_on=tuned(ON), forward=forward, epochs=3)
    )
    assert outcome.complaint is None and outcome.notes == NOTES


def test_every_model_of_several_is_checked() -> None:
    """The second is first called in the second step, by its own optimizer."""

    def body(world: World) -> tuple[str, bool, bool]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(400, 10)) for _ in "ab"]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        applied = apply(ON, models, optimizers, device=CPU)
        replica = Replica(
            strategy=None, world=world, device=CPU, models=models, optimizers=optimizers, seed=3,
            exact=True, applied=applied, precision=nullcontext,
        )  # fmt: skip
        batches = iter(replica.batches((IMAGES, LABELS), batch_size=16, micro_batches=4))
        done = []
        for model, optimizer in zip(models, optimizers, strict=True):
            forward = functools.partial(_loss_of, model)
            replica.step(forward, next(batches), optimizer=optimizer)
            done.append(applied.check is None)
        return (fingerprint(*models, *optimizers), *done)

    ((_, *done),) = {each for n in RANKS for each in on_threads(n, body)}
    assert done == [False, True]


def _loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def test_a_state_is_saved_and_loaded_under_the_fused_switch() -> None:
    """Saved by a plain optimizer, loaded where it is fused, on other numbers of ranks."""

    def first(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Linear(144, 10)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        replica = replica_of(world, model, optimizer, Applied(()))
        for batch in replica.batches((IMAGES.flatten(1), LABELS), batch_size=16, micro_batches=4):
            replica.step(functools.partial(_loss_of, model), batch)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def second(world: World) -> tuple[str, bool]:
        model = nn.Linear(144, 10)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        applied = apply(ONLY_FUSED, [model], [optimizer], device=CPU)
        replica = replica_of(world, model, optimizer, applied)
        weights, state = saved
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for batch in replica.batches((IMAGES.flatten(1), LABELS), batch_size=16, micro_batches=4):
            replica.step(functools.partial(_loss_of, model), batch)
        steps = {float(each["step"]) for each in optimizer.state_dict()["state"].values()}
        assert steps == {6.0}
        return fingerprint(model, optimizer), bool(optimizer.param_groups[0]["fused"])

    saved = on_threads(2, first)[0]
    assert saved[1]["param_groups"][0]["fused"] is None
    ((_, fused),) = {each for n in RANKS for each in on_threads(n, second)}
    assert fused


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, while it loads the compiler
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_trains() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler on CPU, and this machine has none")

    def outcome(compile: bool) -> tuple[list[Tensor], tuple[str, ...]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        applied = apply(ON, [model], [optimizer], device=CPU, compile=compile)
        replica = replica_of(World(0, 1, Solo()), model, optimizer, applied)
        for batch in replica.batches((IMAGES.flatten(1), LABELS), batch_size=22, micro_batches=2):
            replica.step(functools.partial(_loss_of, model), batch)
        return [parameter.detach() for parameter in model.parameters()], applied.notes

    (compiled, notes), (plain, _) = outcome(True), outcome(False)
    assert notes == ("fused SGD", "torch.compile (1 model)")
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
