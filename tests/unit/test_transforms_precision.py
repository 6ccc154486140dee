"""What a forward pass computes in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parti.engine.transforms.precision import PRECISIONS, check_precision, forward_context
from parti.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def test_the_offered_precisions_pass() -> None:
    for precision in PRECISIONS:
        check_precision(precision)


def test_fp16_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"1,584 ms instead of 9\.8.*Use precision=\"bf16\""):
        check_precision("fp16")


def test_a_misspelt_precision_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'bfloat16' is not known; expected one of 'fp32', 'bf16'"
    ):
        check_precision("bfloat16")


@pytest.mark.parametrize(
    ("precision", "computed"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_only_the_forward_pass_changes_its_type(precision: str, computed: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    context = forward_context(precision, CPU)
    for _ in range(2):  # a context for every micro-batch
        with context():
            outputs = model(torch.randn(4, 1, 4, 4))
        assert outputs.dtype is computed
        outputs.float().square().sum().backward()
        optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_in_another_type_compute_in_it(dtype: torch.dtype) -> None:
    with forward_context("fp32", CPU)():
        assert nn.Linear(8, 3, dtype=dtype)(torch.randn(4, 8, dtype=dtype)).dtype is dtype
