"""The order of samples: a bijection, random by the tests that numpy's shuffle passes, fixed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.data.order import (
    Indices,
    Position,
    default_micro_batches,
    num_steps,
    permute,
    split,
)
from parti.data.seeds import Purpose, derive, extend
from parti.errors import ConfigError

seeds = st.integers(-(2**70), 2**70)


def order(n: int, seed: int, epoch: int) -> Indices:
    return permute(np.arange(n), n, seed, epoch)


def deviations(counts: Indices, expected: float, freedom: float) -> float:
    """Chi-square, in standard deviations from what chance gives."""
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@given(n=st.integers(1, 5000), seed=seeds, epoch=st.integers(0, 2**40))
def test_every_sample_stands_at_one_position(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(order(n, seed, epoch)), np.arange(n))


@given(
    n=st.integers(1, 10**12) | st.integers(2**61, 2**62),
    seed=seeds,
    data=st.data(),
)
def test_any_position_of_any_size_on_its_own(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    together = permute(np.array(positions), n, seed, 3)
    alone = [int(permute(np.array([p]), n, seed, 3)[0]) for p in positions]
    assert together.tolist() == alone
    assert len(set(alone)) == len(positions)
    assert all(0 <= sample < n for sample in alone)


def test_the_order_is_part_of_the_contract() -> None:
    assert order(10, 0, 0).tolist() == [0, 9, 8, 6, 2, 1, 7, 5, 3, 4]
    assert permute(np.array([0, 1, 59_999]), 60_000, 7, 2).tolist() == [26776, 31201, 50345]
    ends = permute(np.array([0, 10**12 - 1]), 10**12, -1, 10**6)
    assert ends.tolist() == [212106159664, 714956082297]


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    n = 20_000
    orders = [order(n, seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # samples that stand at the same place in both: 1 on average, Poisson
            assert np.count_nonzero(one == other) < 9
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("n", [1797, 4096, 4097, 60_000, 65_536])
def test_looks_random(n: int) -> None:
    cells, near = [], []
    for epoch in range(12):
        p = order(n, 5, epoch)
        m = 10
        joint = np.bincount((np.arange(n) * m // n) * m + p * m // n, minlength=m * m)
        cells.append(deviations(joint, n / m**2, (m - 1) ** 2))
        for lag in (1, 2, n // 2):
            step = (np.roll(p, -lag) - p) % n
            counts = np.bincount((step - 1) * 32 // (n - 1), minlength=32)
            near.append(deviations(counts, n / 32, 31))
    # numpy's permutation stays within these; half the rounds do not
    assert abs(np.mean(cells)) < 1.2
    assert abs(np.mean(near)) < 1.2
    assert max(map(abs, cells + near)) < 7


def test_a_batch_of_sorted_data_holds_classes_as_chance_has_it() -> None:
    n, batch = 60_000, 64
    numbers = []
    for epoch in range(6):
        classes = (order(n, 1, epoch)[: n // batch * batch] * 10 // n).reshape(-1, batch)
        counts = np.stack([(classes == c).sum(1) for c in range(10)], 1)
        numbers.append(counts.var() / (batch * 0.1 * 0.9))
    assert np.mean(numbers) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_come_equally_often(n: int) -> None:
    num_orders = math.factorial(n)
    trials = max(4 * num_orders, 400)
    found = Counter(order(n, 11, epoch).tobytes() for epoch in range(trials))
    counts = np.array([*found.values(), *[0] * (num_orders - len(found))])
    assert abs(deviations(counts, trials / num_orders, num_orders - 1)) < 5


@pytest.mark.parametrize("n", [0, -3, 2**62 + 1])
def test_refuses_sizes_it_cannot_order(n: int) -> None:
    with pytest.raises(ConfigError, match="1 to 2\\^62"):
        permute(np.array([0]), n, 0, 0)


@given(n=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_split_is_balanced_and_has_no_empty_part(n: int, parts: int) -> None:
    sizes = split(n, parts)
    assert sum(sizes) == n
    assert len(sizes) == min(n, parts)
    assert list(sizes) == sorted(sizes, reverse=True)
    if sizes:
        assert sizes[-1] >= 1
        assert sizes[0] - sizes[-1] <= 1


def test_split_by_example() -> None:
    assert split(30, 4) == (8, 8, 7, 7)
    assert split(3, 8) == (1, 1, 1)


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [
        (1, 1),
        (3, 1),
        (4, 2),
        (31, 2),
        (64, 2),
        (127, 2),
        (128, 4),
        (255, 4),
        (256, 8),
        (10**6, 8),
    ],
)
def test_default_micro_batches(batch_size: int, expected: int) -> None:
    assert default_micro_batches(batch_size) == expected


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "whole", "started"),
    [(10, 5, 2, 2), (11, 5, 2, 3), (4, 5, 0, 1), (10**12, 7, 142857142857, 142857142858)],
)
def test_num_steps(num_samples: int, batch_size: int, whole: int, started: int) -> None:
    assert num_steps(num_samples, batch_size, drop_last=True) == whole
    assert num_steps(num_samples, batch_size, drop_last=False) == started


@given(step=st.integers(0, 10**9), steps_per_epoch=st.integers(1, 10**6))
def test_position_and_global_step_are_inverse(step: int, steps_per_epoch: int) -> None:
    position = Position.at(step, steps_per_epoch)
    assert position.global_step(steps_per_epoch) == step
    assert position.step_in_epoch < steps_per_epoch


def test_position_before_the_start() -> None:
    with pytest.raises(ConfigError, match="both count from 0"):
        Position(epoch=-1)


@given(seed=seeds, words=st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_derived_seeds_are_64_bits_and_depend_on_every_word(seed: int, words: list[int]) -> None:
    value = derive(seed, *words)
    assert 0 <= value < 2**64
    assert derive(seed, *words, 0) == extend(value, 0) != value
    for i, word in enumerate(words):
        assert derive(seed, *words[:i], word ^ 1, *words[i + 1 :]) != value


def test_derived_seeds_do_not_collide_or_commute() -> None:
    values = {derive(s, a, b) for s in range(12) for a in range(12) for b in range(12)}
    assert len(values) == 12**3
    assert derive(0, Purpose.ORDER, 1) not in {
        derive(0, a, b) for a in range(50) for b in range(50)
    }
    bits = np.array([[v >> b & 1 for b in range(64)] for v in values])
    assert np.all(abs(bits.mean(0) - 0.5) < 0.07)  # 6 standard deviations
