"""fp32 products of linear layers through oneDNN where torch's default, MKL, is slow.

On AMD processors MKL uses half the width of the vector units that AVX-512 processors have; oneDNN
uses all of it, in the forward product and in both products of backward. Nothing is rounded to
another type on the way: oneDNN's operator is called with its default, strict fp32, unlike
`torch.set_float32_matmul_precision("medium")`, which allows bfloat16 where the processor has it.
See docs/decisions/0006-fast-fp32-products.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from parti.engine.transforms.change import Change, Effect, Patch, each_module, is_plain
from parti.engine.transforms.direct_gradients import take_home

MIN_MULTIPLICATIONS = 1 << 22
"""Below it, what a call of oneDNN costs beside the product is more than it saves."""
MIN_ROWS = 4
"""Below it, a product only reads the weights once, and MKL does that as well."""
_BLOCK_BYTES = 1 << 22
_MIN_WEIGHTS = 1 << 12
"""A layer smaller than this would need batches beyond a thousand rows to gain anything."""


def route_products(models: Sequence[nn.Module]) -> Change | None:
    """Send large fp32 products of linear and attention layers through oneDNN."""
    if not pays_on(torch.cpu.get_capabilities()) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    patches = []
    num_linear = num_attention = 0
    for module in each_module(models):
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue  # attention's own last projection, which it never calls
        if is_plain(module, nn.Linear) and _is_large(module.weight):
            patches.append(Patch(module, "forward", linear_forward))
            num_linear += 1
        elif is_plain(module, nn.MultiheadAttention) and _is_large(
            module.get_parameter("out_proj.weight")
        ):
            patches.append(Patch(module, "forward", attention_forward))
            num_attention += 1
    if not patches:
        return None
    layers = [f"{num_linear} linear"] * (num_linear > 0)
    layers += [f"{num_attention} attention"] * (num_attention > 0)
    return Change(
        note=f"oneDNN fp32 products ({', '.join(layers)})",
        effect=Effect.ROUNDING,
        patches=tuple(patches),
    )


def pays_on(processor: Mapping[str, Any]) -> bool:
    """Whether oneDNN's fp32 is faster than MKL's. Intel's own library favours Intel's processors,
    which leaves those of AMD that have AVX-512. Any rank on such a processor decides the same."""
    return str(processor.get("cpu_name", "")).startswith("AMD") and all(
        processor.get(feature) for feature in ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
    )


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear`, through oneDNN where that is known to pay and to work."""
    if not _suits(input, weight, bias):
        return F.linear(input, weight, bias)
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Product.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _product(input, weight, bias)


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return linear(input, self.weight, self.bias)


def _rebound(function: Any, names: dict[str, Any]) -> Any:
    """The same code with other globals."""
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _attention_forward() -> Any:
    """`nn.MultiheadAttention.forward` whose projections call our `linear` in place of `F.linear`.

    They are calls inside torch's own functions, out of reach of any patch on a module."""
    names = dict(vars(F), linear=linear)
    for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward"):
        names[name] = _rebound(vars(F)[name], names)
    original = nn.MultiheadAttention.forward
    return _rebound(original, {**original.__globals__, "F": SimpleNamespace(**names)})


attention_forward = _attention_forward()

# A pickled module finds its class's own method under this name.
linear_forward.__name__ = "forward"


class _Product(torch.autograd.Function):
    """`input @ weight.T + bias`. Its backward is made of the same, so it differentiates again."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if for_input:
            of_input = linear(gradient, weight.t())
        if for_weight:
            inputs = input.reshape(-1, input.shape[-1])
            home = take_home(weight)
            if home is None:
                of_weight = _gradient_of_weight(rows, inputs)
            else:
                weight.grad = _write_gradient(home, rows, inputs)
        if for_bias:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias


def _gradient_of_weight(gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """`gradient.T @ input`. oneDNN wants its first operand in order, and so copies what is
    transposed there; the product can be taken either way round, so that less is copied."""
    if _is_taken_straight(gradient, input):
        return linear(gradient.t(), input.t())
    return linear(input.t(), gradient.t()).t().contiguous()


def _is_taken_straight(gradient: torch.Tensor, input: torch.Tensor) -> bool:
    rows, num_out = gradient.shape
    num_in = input.shape[1]
    return rows * num_out <= rows * num_in + num_in * num_out


def _write_gradient(
    home: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor
) -> torch.Tensor:
    """The same values in memory that is given. oneDNN's operator makes memory of its own, so they
    are copied: block by block, while they are in cache."""
    if not _is_taken_straight(gradient, input):
        return home.copy_(linear(input.t(), gradient.t()).t())
    num_blocks = home.numel() * home.element_size() // _BLOCK_BYTES
    shape = (*gradient.shape, input.shape[1])
    if num_blocks > 1 and _equal_in_blocks.get(shape, True):
        for block, part in zip(home.chunk(num_blocks), gradient.t().chunk(num_blocks), strict=True):
            block.copy_(linear(part, input.t()))
        if shape in _equal_in_blocks:
            return home
    whole = linear(gradient.t(), input.t())
    if shape not in _equal_in_blocks:
        _equal_in_blocks[shape] = num_blocks > 1 and torch.equal(home, whole)
    return home.copy_(whole)


_equal_in_blocks: dict[tuple[int, ...], bool] = {}
"""By the shape of a product: whether its blocks by themselves have the same bits. oneDNN does not
promise it, so the first product of a shape is taken both ways."""


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        # With gaps in its second operand, such as a slice, oneDNN takes a path of plain loops.
        weight = weight.contiguous()
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        input, weight, bias, "none", [], None
    )
    return result


def _suits(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if type(input) is not torch.Tensor or input.dtype is not torch.float32 or input.dim() < 2:
        return False
    num_out, num_in = weight.shape
    if num_in != input.shape[-1] or num_in == 0:
        return False
    rows = input.numel() // num_in
    return (
        rows >= MIN_ROWS
        and rows * num_in * num_out >= MIN_MULTIPLICATIONS
        and weight.dtype is torch.float32
        and (bias is None or bias.dtype is torch.float32)
        and input.device.type == "cpu"
        and weight.device.type == "cpu"
        # Other ways to run a model, which need torch's own operators.
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def _is_large(weight: torch.Tensor) -> bool:
    return (
        not isinstance(weight, nn.parameter.UninitializedParameter)
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.numel() >= _MIN_WEIGHTS
    )
