"""Accuracy, TopK and Mean: their values, and that merging equals seeing everything."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parti.errors import ConfigError
from parti.metrics import Accuracy, Mean, MergeableMetric, TopK, is_mergeable


def _scores(seed: int, *shape: int) -> Tensor:
    # Few distinct values, so that ties happen.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, shape, generator=generator) / 3


def _labels(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed + 1))


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target) ** 2


METRICS: list[MergeableMetric] = [
    Accuracy(),
    Accuracy(ignore_index=2),
    TopK(1),
    TopK(3, ignore_index=0),
    Mean(_squared_error),
    Mean(lambda output, target: output.mean() / 3),
    Mean(lambda output, target: (output.sum() / 7, target.sum().item())),
]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 99))
def test_merged_ranks_equal_one_process_to_the_bit(
    sizes: list[int], num_ranks: int, seed: int
) -> None:
    slices = [
        (_scores(seed + i, size, 5).exp(), _labels(seed + i, size)) for i, size in enumerate(sizes)
    ]
    for metric in METRICS:
        alone = copy.deepcopy(metric)
        ranks = [copy.deepcopy(metric) for _ in range(num_ranks)]
        for i, (output, target) in enumerate(slices):
            alone.update(output, target)
            ranks[i % num_ranks].update(output, target)
        merged = copy.deepcopy(metric)
        for rank in reversed(ranks):
            merged.merge(rank.state())
        assert merged.state() == alone.state()
        assert str(merged.compute()) == str(alone.compute())


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("shape", [(40,), (8, 3), (4, 2, 3)])
def test_top_k_against_a_stable_sort(k: int, shape: tuple[int, ...]) -> None:
    scores = _scores(3, shape[0], 5, *shape[1:])
    labels = _labels(3, *shape)
    metric = TopK(k)
    metric.update(scores, labels)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    expected = (order == labels.unsqueeze(1)).any(1).double().mean().item()
    assert metric.compute() == pytest.approx(expected, abs=1e-12)


def test_top_k_takes_nan_for_a_miss_and_refuses_more_classes_than_there_are() -> None:
    metric = TopK(2)
    metric.update(torch.full((3, 4), math.nan), torch.tensor([0, 1, 2]))
    assert metric.compute() == 0.0
    with pytest.raises(ConfigError, match=r"TopK\(k=9\).*at least 9 classes"):
        TopK(9).update(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError, match="k=0"):
        TopK(0)


@pytest.mark.parametrize(
    ("metric", "output", "target", "expected"),
    [
        (Accuracy(), [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], [1, 0, 0], 2 / 3),
        (Accuracy(), [3, 1, 2, 2], [3, 0, 2, 1], 0.5),
        (Accuracy(threshold=0.0), [-2.0, 3.0, 0.5], [0, 1, 0], 2 / 3),
        (Accuracy(threshold=0.5), [[0.4], [0.6]], [0.0, 0.0], 0.5),
        (Accuracy(threshold=0.5), [[0.4, 0.9], [0.6, 0.1]], [[0.0, 1.0], [0.0, 0.0]], 0.75),
        (Accuracy(ignore_index=-100), [[0.1, 0.9], [0.8, 0.2]], [1, -100], 1.0),
    ],
)
def test_accuracy(
    metric: Accuracy, output: list[object], target: list[object], expected: float
) -> None:
    metric.update(torch.tensor(output), torch.tensor(target))
    assert metric.compute() == pytest.approx(expected)


def test_accuracy_asks_rather_than_guesses() -> None:
    with pytest.raises(ConfigError, match=r"threshold=0\.0.*logits"):
        Accuracy().update(torch.randn(4), torch.ones(4))
    with pytest.raises(ConfigError, match=r"threshold=0\.0.*logits"):
        Accuracy().update(torch.randn(4, 1), torch.ones(4))
    with pytest.raises(ConfigError, match=r"\(4,\).*\(5,\)"):
        Accuracy().update(torch.randn(4, 3), torch.ones(5))


def test_mean_of_each_kind_of_value() -> None:
    output, target = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 0.0])
    for function, expected in [
        (lambda output, target: output - target, 2.0),
        (lambda output, target: output > 1.5, 2 / 3),
        (lambda output, target: 7.0, 7.0),
        (lambda output, target: (output.sum(), 4), 1.5),
    ]:
        metric = Mean(function)
        metric.update(output, target)
        assert metric.compute() == expected
    uneven = Mean(lambda output, target: output.mean())
    uneven.update(output, target)
    uneven.update(torch.tensor([10.0]), torch.tensor([0.0]))
    assert uneven.compute() == 4.0


def test_no_samples_no_value() -> None:
    assert all(math.isnan(metric.compute()) for metric in [Accuracy(), TopK(2), Mean(max)])


class _Stranger:
    def update(self, output: Tensor, target: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0


def test_only_what_can_be_merged_is_merged() -> None:
    assert not is_mergeable(_Stranger())
    assert all(is_mergeable(metric) for metric in METRICS)
