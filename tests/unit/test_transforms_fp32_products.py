"""fp32 products through oneDNN: `F.linear` to rounding, forward, backward and backward's backward.

They pay on one kind of processor only, so here the processor is said to be of that kind. Whether a
product went through oneDNN shows in the graph that autograd keeps.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parti.engine.transforms import fp32_products
from parti.engine.transforms.change import Change, Effect
from parti.engine.transforms.direct_gradients import Destinations
from parti.engine.transforms.fp32_products import linear, pays_on, route_products
from parti.engine.tuning import Tuning, change_models

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-6
"""Largest relative norm of an error. fp32 has 6e-8 for one operation; bfloat16 would make 3e-3."""


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_products, "pays_on", lambda processor: True)


def routed(*models: nn.Module) -> Change:
    change = route_products(models)
    assert change is not None and change.effect is Effect.ROUNDING
    change.on()
    return change


def is_routed(outputs: Tensor) -> bool:
    """Whether the last operation of the graph is our product."""
    return outputs.grad_fn is not None and "Product" in outputs.grad_fn.name()


def assert_to_rounding(some: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(some, exact, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < ROUNDING, f"{a.shape}: {error:.2g}"


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def three_times(product: Product, operands: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The product, its gradients, and the gradients of a function of its gradients."""
    leaves = [each.detach().requires_grad_() for each in operands]
    outputs = product(*leaves, *[None] * (3 - len(leaves)))
    first = torch.autograd.grad((outputs * weights).square().sum(), leaves, create_graph=True)
    penalty = sum(each.square().sum() for each in first)
    second = torch.autograd.grad(penalty, leaves)  # type: ignore[arg-type]
    return [outputs, *first, *second]


INPUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(96, 256),
    "few rows": lambda: torch.randn(16, 256),
    "three dimensions": lambda: torch.randn(4, 24, 256),
    "transposed": lambda: torch.randn(256, 96).t(),
    "a slice": lambda: torch.randn(96, 512)[:, :256],
    "every other column": lambda: torch.randn(96, 512)[:, ::2],
    "expanded": lambda: torch.randn(1, 256).expand(96, 256),
    "off a cache line": lambda: torch.randn(96 * 256 + 1)[1:].view(96, 256),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", list(INPUTS))
def test_a_product_and_both_of_its_derivatives(name: str, with_bias: bool) -> None:
    torch.manual_seed(0)
    operands = [
        INPUTS[name](),
        torch.randn(192, 256) if name != "few rows" else torch.randn(1100, 256),
    ]
    if with_bias:
        operands.append(torch.randn(len(operands[1])))
    weights = torch.randn(*operands[0].shape[:-1], len(operands[1]))
    leaves = [each.detach().requires_grad_() for each in operands]
    assert is_routed(linear(*leaves))
    exact = three_times(F.linear, [each.double() for each in operands], weights.double())
    assert_to_rounding(three_times(linear, operands, weights), exact)


@pytest.mark.parametrize("shape", [(512, 64, 320), (64, 512, 320), (8, 1024, 1024)])
def test_gradients_of_weights_are_taken_either_way_round(shape: tuple[int, int, int]) -> None:
    """`g.T @ x` or `(x.T @ g).T`, by what is cheaper to copy."""
    torch.manual_seed(0)
    rows, num_in, num_out = shape
    operands = [torch.randn(rows, num_in), torch.randn(num_out, num_in)]
    weights = torch.randn(rows, num_out)
    exact = three_times(F.linear, [each.double() for each in operands], weights.double())
    made = three_times(linear, operands, weights)
    assert_to_rounding(made, exact)
    assert made[2].is_contiguous()


@pytest.mark.parametrize("rows", [64, 3000])
def test_gradients_are_written_where_they_belong(rows: int) -> None:
    layer = nn.Linear(1600, 2048)  # more than one block
    routed(layer)
    inputs, outer = torch.randn(rows, 1600), torch.randn(rows, 2048)
    layer(inputs).backward(outer)
    assert layer.weight.grad is not None
    expected = layer.weight.grad
    for _ in range(3):
        layer.weight.grad = None
        home = torch.full_like(layer.weight, 7.0)
        with Destinations([{id(layer.weight): home}]):
            layer(inputs).backward(outer)
        assert layer.weight.grad is home
        assert torch.equal(home, expected)


def test_a_gradient_that_is_one_number_everywhere() -> None:
    """`sum().backward()` hands back a tensor without memory of its own."""
    torch.manual_seed(0)
    input, weight = torch.randn(96, 256), torch.randn(192, 256, requires_grad=True)
    linear(input, weight).sum().backward()
    assert weight.grad is not None
    assert_to_rounding([weight.grad], [input.double().sum(0).expand(192, 256)])


@pytest.mark.parametrize("name", list(INPUTS))
def test_no_layout_of_the_inputs_is_slow(name: str) -> None:
    """oneDNN has a path of plain loops, hundreds of times slower, for operands with gaps."""
    weight = torch.randn(1100, 256, requires_grad=True)

    def step_s(product: Product) -> float:
        input = INPUTS[name]()
        gradient = torch.randn(*input.shape[:-1], 1100)
        start = time.perf_counter()
        torch.autograd.grad(product(input, weight, None), weight, gradient)
        return time.perf_counter() - start

    times = [(step_s(linear), step_s(F.linear)) for _ in range(3)]
    assert min(a for a, _ in times) < 20 * min(b for _, b in times)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_only_what_is_asked_for_gets_a_gradient(frozen: str) -> None:
    operands = {
        "input": torch.randn(96, 256), "weight": torch.randn(192, 256), "bias": torch.randn(192),
    }  # fmt: skip
    for name, each in operands.items():
        each.requires_grad_(name != frozen)
    outputs = linear(operands["input"], operands["weight"], operands["bias"])
    assert is_routed(outputs)
    outputs.sum().backward()
    assert [name for name, each in operands.items() if each.grad is None] == [frozen]


def test_without_gradients_no_graph_is_made() -> None:
    input, weight = torch.randn(96, 256), torch.randn(192, 256, requires_grad=True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = linear(input, weight)
            assert not outputs.requires_grad
            assert_to_rounding([outputs], [F.linear(input.double(), weight.double())])
    assert not linear(input, weight.detach()).requires_grad


def big() -> tuple[Tensor, Tensor]:
    return torch.randn(96, 256), torch.randn(192, 256, requires_grad=True)


def test_small_products_and_other_types_stay_with_torch() -> None:
    input, weight = big()
    assert is_routed(linear(input, weight))
    assert not is_routed(linear(input[:64], weight))
    assert not is_routed(linear(input[0], weight))
    assert not is_routed(linear(torch.randn(3, 4096), torch.randn(4096, 4096, requires_grad=True)))
    assert not is_routed(linear(input[:0], weight))
    assert not is_routed(linear(input.double(), weight.double()))
    assert not is_routed(linear(nn.Parameter(input), weight))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = linear(input, weight)
    assert outputs.dtype is torch.bfloat16 and not is_routed(outputs)


def test_an_error_is_torchs() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        linear(torch.randn(96, 255), torch.randn(192, 256))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own call
def test_other_ways_to_differentiate_work() -> None:
    input, weight = big()
    tangent = torch.randn_like(input)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input, tangent)
        made = torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent
    assert made.equal(F.linear(tangent, weight))
    each = torch.func.vmap(torch.func.grad(lambda x: linear(x, weight).sum()))(input[None])
    assert_to_rounding([each], [weight.double().sum(0).expand(1, *input.shape)])
    outputs = linear(input, weight)
    gradients = torch.randn(3, *outputs.shape)
    (several,) = torch.autograd.grad(outputs, weight, gradients, is_grads_batched=True)
    assert_to_rounding([several], [gradients.double().transpose(1, 2) @ input.double()])


def test_layers_are_routed_by_their_size() -> None:
    attention = nn.MultiheadAttention(128, 4)
    model = nn.Sequential(nn.Linear(256, 192), nn.Linear(256, 8), nn.Linear(192, 256).double())
    change = routed(model, attention)
    assert change.note == "oneDNN fp32 products (1 linear, 1 attention)"
    assert [patch.module for patch in change.patches] == [model[0], attention]
    assert is_routed(model[0](torch.randn(96, 256)))
    change.off()
    assert not is_routed(model[0](torch.randn(96, 256)))
    assert all("forward" not in each.__dict__ for each in (*model, attention))
    assert route_products([nn.Linear(8, 8)]) is None


def test_layers_of_a_users_own_are_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    replaced = nn.Linear(256, 192)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    assert route_products([Own(256, 192), replaced, nn.LazyLinear(192)]) is None


def test_a_changed_layer_is_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(256, 192), nn.MultiheadAttention(192, 4))
    keys = list(model.state_dict())
    routed(model)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    input = torch.randn(96, 256)
    assert [is_routed(each[0](input)) for each in (model, twin, loaded)] == [True, True, False]
    for each in (model, twin, loaded):
        assert list(each.state_dict()) == keys
        assert_to_rounding([each[0](input)], [copy.deepcopy(loaded).double()[0](input.double())])
    assert route_products([loaded]) is not None


ATTENTION: dict[str, dict[str, object]] = {
    "packed": {},
    "batch first": {"batch_first": True},
    "other sizes": {"kdim": 96, "vdim": 160},
    "no bias": {"bias": False},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", list(ATTENTION))
def test_attention_is_equal_to_rounding(name: str, need_weights: bool, masked: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(128, 4, **ATTENTION[name])  # type: ignore[arg-type]
    exact = copy.deepcopy(model).double()
    sizes = (128, model.kdim, model.vdim)
    operands = [torch.randn(32, 16, size) for size in sizes]
    if name not in ("other sizes",):
        operands = operands[:1] * 3  # attention to itself takes another path
    mask = None
    if masked:
        length = 16 if model.batch_first else 32
        mask = torch.full((length, length), -torch.inf).triu(1)

    def run(module: nn.Module, kind: torch.dtype) -> list[Tensor]:
        inputs = [each.to(kind) for each in operands]
        if name != "other sizes":
            inputs = inputs[:1] * 3
        its_mask = None if mask is None else mask.to(kind)
        outputs, weights = module(*inputs, need_weights=need_weights, attn_mask=its_mask)
        module.zero_grad()
        outputs.square().sum().backward()
        gradients = [p.grad for p in module.parameters()]
        return [outputs, *([weights] if need_weights else []), *gradients]  # type: ignore[list-item]

    change = routed(model)
    assert change.note == "oneDNN fp32 products (1 attention)"
    made = run(model, torch.float32)
    assert _has_product(made[0])
    kept = [(a, b) for a, b in zip(made, run(exact, torch.float64), strict=True) if b.norm() > 1e-9]
    assert_to_rounding([a for a, _ in kept], [b for _, b in kept])


def _has_product(outputs: Tensor) -> bool:
    seen, left = set(), [outputs.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if "Product" in node.name():
                return True
            left += [parent for parent, _ in node.next_functions]
    return False


def test_a_transformer_trains_as_it_did() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    exact = copy.deepcopy(model).double()
    routed(model)
    texts, weights = torch.randn(8, 16, 128), torch.randn(8, 16, 128)
    for module, inputs in ((model, texts), (exact, texts.double())):
        (module(inputs) * weights).sum().backward()
    for (name, made), expected in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert made.grad is not None and expected.grad is not None
        error = (made.grad.double() - expected.grad).norm()
        assert error < 1e-5 * exact.linear2.weight.grad.norm(), name  # type: ignore[union-attr]
    model.eval(), exact.eval()
    assert_to_rounding([model(texts)], [exact(texts.double())])


def test_other_precisions_and_processors_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(256, 192)
    assert change_models(Tuning(), [model], precision="bf16") == ()
    assert change_models(Tuning(fast_matmul=False), [model]) == ()
    monkeypatch.setattr(fp32_products, "pays_on", pays_on)
    amd = {"cpu_name": "AMD EPYC", **dict.fromkeys(_AVX512, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**amd, "avx512_dq": False})
    assert route_products([model]) is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: amd)
    assert route_products([model]) is not None


_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")


def test_it_pays_on_one_makers_processors_with_wide_vectors() -> None:
    wide = dict.fromkeys(_AVX512, True)
    assert pays_on({"cpu_name": "AMD EPYC 9654", **wide})
    assert not pays_on({"cpu_name": "Intel(R) Xeon(R) Platinum", **wide})
    assert not pays_on({"cpu_name": "AMD EPYC 7742"})
    assert not pays_on({})
    assert set(_AVX512) | {"cpu_name"} <= set(torch.cpu.get_capabilities())  # type: ignore[no-untyped-call]
