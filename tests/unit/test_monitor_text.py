"""Numbers and lines as text, and that they fit."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.monitor.text import (
    Field,
    bar,
    clock,
    count,
    duration,
    fit_columns,
    fit_encoding,
    line,
    number,
    rate,
    share,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (-0.12345, "-0.1235"),
        (12.345, "12.35"),
        (1234.5, "1,234"),
        (1.5e-5, "1.500e-5"),
        (2.5e7, "2.500e7"),
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_words_for_times_and_amounts() -> None:
    assert [clock(s) for s in (0, 59.2, 61, 3723, 90000)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:02:03",
        "1d 01:00",
    ]
    assert [duration(s) for s in (0.123, 12.34, 250, 11100)] == [
        "0.12 s",
        "12.3 s",
        "4 min 10 s",
        "3 h 05 min",
    ]
    assert [rate(r) for r in (12345.6, 42.25, 0.5)] == ["12,346", "42.2", "0.500"]
    assert share(0.034) == "3%"
    assert [count(1, "host"), count(1200, "batch", "batches")] == ["1 host", "1,200 batches"]


@given(st.floats(-1, 2), st.integers(1, 60), st.booleans())
def test_a_bar_has_its_width(part: float, width: int, ascii_only: bool) -> None:
    done, left = bar(part, width, ascii_only)
    assert len(done) + len(left) == width
    if part >= 1:
        assert not left
    if part <= 0:
        assert not done


def _visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9]*m", "", text)


@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(0, 6)), min_size=1, max_size=9),
    st.integers(30, 150),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_a_line_fits_and_loses_what_matters_least(
    sizes: list[tuple[int, int]], width: int, part: float | None
) -> None:
    fields = [Field(chr(97 + i) * size, rank, "dim") for i, (size, rank) in enumerate(sizes)]
    text = _visible(line(fields, width, part=part, colors=True))
    assert len(text) <= width
    assert text.startswith("a" * sizes[0][0])
    kept = [field for field in fields[1:] if field.text in text]
    lost = [field for field in fields[1:] if field.text not in text]
    assert not kept or not lost or max(f.rank for f in kept) <= min(f.rank for f in lost)


def test_columns_fit_and_the_least_go_first() -> None:
    columns = [("epoch", 5, 0), ("loss", 7, 1), ("val_loss", 7, 1), ("data", 4, 5), ("time", 6, 2)]
    assert [c.name for c in fit_columns(columns, 80)] == [name for name, _, _ in columns]
    assert [c.name for c in fit_columns(columns, 35)] == ["epoch", "loss", "val_loss", "time"]
    assert [c.name for c in fit_columns(columns, 20)] == ["epoch", "loss"]
    assert [c.name for c in fit_columns(columns, 1)] == ["epoch"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp1252"])
def test_text_can_always_be_written(encoding: str) -> None:
    text = fit_encoding("Parti · 2 × cpu ━╸ ╭─ 日本", encoding)
    assert text.encode(encoding)
    if encoding == "ascii":
        assert text.startswith("Parti - 2 x cpu =-")
