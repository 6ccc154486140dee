"""ExactSum: correctly rounded, whatever the order and the grouping."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.metrics import ExactSum

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def _sum(values: list[float]) -> ExactSum:
    total = ExactSum()
    for value in values:
        total.add(value)
    return total


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@given(st.lists(finite))
def test_value_is_the_exact_sum_rounded_once(values: list[float]) -> None:
    assert _sum(values).value() == _nearest(sum(map(Fraction, values), Fraction()))


@given(st.lists(st.floats(width=64)), st.randoms(use_true_random=False), st.integers(1, 5))
def test_order_and_grouping_leave_no_trace(values: list[float], random: object, parts: int) -> None:
    whole = _sum(values)
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = ExactSum()
    for part in range(parts):
        merged.merge(ExactSum.from_bytes(_sum(shuffled[part::parts]).to_bytes()))
    assert merged.to_bytes() == whole.to_bytes()


@given(st.lists(finite, min_size=1), st.integers(1, 10**9))
def test_a_quotient_is_rounded_once(values: list[float], count: int) -> None:
    exact = sum(map(Fraction, values), Fraction()) / count
    assert _sum(values).over(ExactSum(count)) == _nearest(exact)


def test_cancellation_that_plain_addition_loses() -> None:
    assert _sum([1e16, 1.0, -1e16]).value() == 1.0
    assert _sum([1e308, 1e308, -1e308]).value() == 1e308
    assert _sum([5e-324] * 3).value() == 1.5e-323


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([1.0, -math.inf], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1e308] * 10, math.inf),
    ],
)
def test_what_is_not_finite_stays_so(values: list[float], expected: float) -> None:
    assert _sum(values).value() == pytest.approx(expected, nan_ok=True)
    assert _sum(values[::-1]).value() == pytest.approx(expected, nan_ok=True)


def test_nothing_over_nothing_has_no_value() -> None:
    assert math.isnan(ExactSum().over(ExactSum()))
    assert ExactSum(1.0).over(ExactSum()) == math.inf
