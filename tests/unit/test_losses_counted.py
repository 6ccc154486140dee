"""A loss over uneven slices equals the same loss over the whole batch, value and gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parti.errors import ConfigError
from parti.losses import Loss, Scale, counted

SPLITS: list[tuple[int, ...]] = [(12,), (6, 6), (5, 4, 3), (1, 10, 1), (1,) * 12]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(), dtype=torch.float64)


def _labels(*shape: int, ignored: int | None = None) -> Tensor:
    labels = torch.randint(0, 5, shape, generator=_generator())
    if ignored is not None:
        labels.flatten()[::3] = ignored
    return labels


def _probabilities(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_generator(), dtype=torch.float64)


WEIGHT = torch.tensor([0.3, 1.7, 0.01, 5.0, 1.1], dtype=torch.float64)
SIGNS = torch.where(_probabilities(12, 5) < 0.5, -1.0, 1.0).double()
LABEL_SETS = torch.tensor([[1, 3, -1, 0, 2]] * 12)

CASES: dict[str, tuple[Loss, Tensor, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), _logits(12, 5), _labels(12)),
    "ignored": (nn.CrossEntropyLoss(), _logits(12, 5), _labels(12, ignored=-100)),
    "ignored 2": (nn.CrossEntropyLoss(ignore_index=2), _logits(12, 5), _labels(12, ignored=2)),
    "weights": (nn.CrossEntropyLoss(WEIGHT), _logits(12, 5), _labels(12)),
    "weights and ignored": (
        nn.CrossEntropyLoss(WEIGHT, ignore_index=-1),
        _logits(12, 5),
        _labels(12, ignored=-1),
    ),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), _logits(12, 5), _labels(12)),
    "smoothing, ignored": (
        nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1),
        _logits(12, 5),
        _labels(12, ignored=1),
    ),
    "smoothing, weights": (
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2),
        _logits(12, 5),
        _labels(12),
    ),
    "tokens": (nn.CrossEntropyLoss(), _logits(12, 5, 7), _labels(12, 7, ignored=-100)),
    "class probabilities": (
        nn.CrossEntropyLoss(WEIGHT),
        _logits(12, 5, 3),
        _probabilities(12, 5, 3).softmax(1),
    ),
    "nll": (nn.NLLLoss(WEIGHT, ignore_index=0), _logits(12, 5).log_softmax(1), _labels(12)),
    "nll of images": (nn.NLLLoss(), _logits(12, 5, 2, 2).log_softmax(1), _labels(12, 2, 2)),
    "mse": (nn.MSELoss(), _logits(12, 3, 2), _probabilities(12, 3, 2)),
    "l1 against one column": (nn.L1Loss(), _logits(12, 3), _probabilities(12, 1)),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), _logits(12, 3), _probabilities(12, 3)),
    "huber": (nn.HuberLoss(delta=0.2), _logits(12), _probabilities(12)),
    "bce": (nn.BCELoss(), _probabilities(12, 3), _labels(12, 3).ne(0).double()),
    "bce with logits": (
        nn.BCEWithLogitsLoss(pos_weight=WEIGHT),
        _logits(12, 5),
        _labels(12, 5).ne(0).double(),
    ),
    "bce weighed": (nn.BCEWithLogitsLoss(weight=WEIGHT), _logits(12, 5), _probabilities(12, 5)),
    "kl batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        _logits(12, 5).log_softmax(1),
        _probabilities(12, 5).softmax(1),
    ),
    "kl of logs": (
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        _logits(12, 5, 2).log_softmax(1),
        _probabilities(12, 5, 2).log_softmax(1),
    ),
    "poisson": (nn.PoissonNLLLoss(), _logits(12, 2), _labels(12, 2).double()),
    "soft margin": (nn.SoftMarginLoss(), _logits(12, 5), SIGNS),
    "hinge": (nn.HingeEmbeddingLoss(), _logits(12, 5), SIGNS),
    "multi margin": (nn.MultiMarginLoss(p=2, weight=WEIGHT), _logits(12, 5), _labels(12)),
    "multi-label margin": (nn.MultiLabelMarginLoss(), _logits(12, 5), LABEL_SETS),
    "multi-label soft margin": (
        nn.MultiLabelSoftMarginLoss(weight=WEIGHT),
        _logits(12, 5),
        _labels(12, 5).ne(0).double(),
    ),
    "function": (F.cross_entropy, _logits(12, 5), _labels(12, ignored=-100)),
    "partial": (
        functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=3, label_smoothing=0.1),
        _logits(12, 5),
        _labels(12),
    ),
    "partial batchmean": (
        functools.partial(F.kl_div, reduction="batchmean"),
        _logits(12, 5).log_softmax(1),
        _probabilities(12, 5).softmax(1),
    ),
    "mse function": (F.mse_loss, _logits(12, 4), _probabilities(12, 4)),
}


def _in_slices(loss: Loss, output: Tensor, target: Tensor, split: Sequence[int]) -> Tensor:
    """What a step over these slices minimises."""
    measured = counted(loss)
    assert measured.scale is Scale.MEAN
    ends = list(itertools.accumulate(split))
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for low, high in zip([0, *ends], ends, strict=False):
        value = measured.measure(output[low:high], target[low:high])
        assert isinstance(value, tuple)
        total = total + value[0]
        weight += float(value[1])
    return total / weight


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", CASES)
def test_slices_equal_the_whole_batch(name: str) -> None:
    loss, output, target = CASES[name]
    output = output.clone().requires_grad_()
    whole = loss(output, target)
    assert isinstance(whole, Tensor)
    (expected,) = torch.autograd.grad(whole, output)
    for split in SPLITS:
        value = _in_slices(loss, output, target, split)
        (gradient,) = torch.autograd.grad(value, output)
        torch.testing.assert_close(value, whole, rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-16)


def test_a_slice_of_nothing_but_ignored_targets_weighs_nothing() -> None:
    output = _logits(4, 5).requires_grad_()
    value = counted(nn.CrossEntropyLoss()).measure(output, torch.full((4,), -100))
    assert isinstance(value, tuple)
    assert (value[0].item(), value[1].item()) == (0.0, 0.0)
    (gradient,) = torch.autograd.grad(value[0], output)
    assert gradient.abs().max() == 0


def test_a_linear_cross_entropy_counts_targets_not_rows_of_its_matrix() -> None:
    torch.manual_seed(0)
    loss = nn.LinearCrossEntropyLoss(3, 5, weight=WEIGHT, dtype=torch.float64, ignore_index=1)
    features, target = _logits(12, 3), _labels(12)
    for split in SPLITS:
        value = _in_slices(loss, features, target, split)
        torch.testing.assert_close(value, loss(features, target), rtol=1e-13, atol=0)


def test_the_users_module_stays_as_it_is() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT)
    counted(loss)
    assert loss.reduction == "mean"
    assert loss.weight is WEIGHT


def test_class_weights_follow_the_module_to_another_type() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT)
    measured = counted(loss)
    loss.float()
    value = measured.measure(_logits(12, 5).float(), _labels(12))
    assert isinstance(value, tuple)
    assert value[0].dtype is torch.float32


def test_no_reduction_hands_the_tensor_on() -> None:
    value = counted(nn.MSELoss(reduction="none")).measure(_logits(4, 2), _probabilities(4, 2))
    assert isinstance(value, Tensor)
    assert value.shape == (4, 2)


class _Masked(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 3


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (nn.MSELoss(reduction="sum"), Scale.SUM),
        (functools.partial(F.mse_loss, reduction="sum"), Scale.SUM),
        (_Masked(reduction="sum"), Scale.SUM),
        (_Masked(), Scale.MEAN),
        (lambda output, target: output.mean(), Scale.MEAN),
    ],
)
def test_strangers_and_sums_are_left_alone(loss: Loss, scale: Scale) -> None:
    measured = counted(loss)
    assert measured.measure is loss
    assert measured.scale is scale


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(ConfigError, match="reduction='median'"):
        counted(functools.partial(F.mse_loss, reduction="median"))
