"""Numbers, bars and lines as text that fits a given width. Pure; knows nothing of terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STYLES = {
    "": "",
    "dim": "\x1b[2m",
    "bold": "\x1b[1m",
    "cyan": "\x1b[36m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "red": "\x1b[31m",
    "blue": "\x1b[34m",
}
_RESET = "\x1b[0m"
_SMALLEST_BAR = 8
_LARGEST_BAR = 40


def number(value: float) -> str:
    """Four or five digits that matter, of a width that does not jump from step to step."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.3e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"


def rate(per_s: float) -> str:
    """Samples a second."""
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.3f}"


def share(part: float) -> str:
    """A part of one, as a percentage."""
    return f"{100 * part:.0f}%"


def clock(seconds: float) -> str:
    """1:05, 2:03:09, 1d 04:10: for what is still running."""
    whole = max(0, math.ceil(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def duration(seconds: float) -> str:
    """0.42 s, 12.3 s, 4 min 10 s, 3 h 05 min: for what is over."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {s:02} s"
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02} min"


def count(amount: int, one: str, many: str | None = None) -> str:
    """1 host, 2 hosts."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def bar(part: float, width: int, ascii_only: bool) -> tuple[str, str]:
    """(done, still to do) as two strings that together have the width, to half a character."""
    part = min(max(part, 0.0), 1.0)
    if ascii_only:
        full = int(part * width)
        return "#" * full, "-" * (width - full)
    halves = int(part * width * 2)
    full, half = divmod(halves, 2)
    return "━" * full + "╸" * half, "━" * (width - full - half)


_PLAIN = str.maketrans({"━": "=", "╸": "-", "·": "-", "×": "x", "…": ".", "–": "-"})


def fit_encoding(text: str, encoding: str) -> str:
    """The text with nothing in it that a stream of this encoding cannot take."""
    if "utf" in encoding.lower():
        return text
    return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)


@dataclass(frozen=True, slots=True)
class Field:
    """A piece of a line. Where room is short, the pieces of highest `rank` go first."""

    text: str
    rank: int = 0
    style: str = ""


def styled(text: str, style: str, colors: bool) -> str:
    return f"{STYLES[style]}{text}{_RESET}" if colors and style and text else text


def line(
    fields: Sequence[Field],
    width: int,
    *,
    part: float | None = None,
    colors: bool = False,
    ascii_only: bool = False,
) -> str:
    """One line: the first field, a bar if `part` is given, and as many of the rest as fit."""
    kept = list(fields)
    shortest = 0 if part is None else _SMALLEST_BAR + 2
    while len(kept) > 1 and _length(kept) + shortest > width:
        kept.remove(max(kept[1:], key=lambda field: field.rank))
    room = width - _length(kept) - 2
    pieces = [styled(field.text, field.style, colors) for field in kept]
    if part is not None and room >= _SMALLEST_BAR:
        done, left = bar(part, min(room, _LARGEST_BAR), ascii_only)
        pieces.insert(1, styled(done, "cyan", colors) + styled(left, "dim", colors))
    if len(kept) == 1 and part is None:
        return styled(kept[0].text[:width], kept[0].style, colors)
    return "  ".join(pieces)


def _length(fields: Sequence[Field]) -> int:
    return sum(len(field.text) for field in fields) + 2 * (len(fields) - 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of epochs."""

    name: str
    width: int


def fit_columns(columns: Sequence[tuple[str, int, int]], width: int) -> list[Column]:
    """Of (name, width of its values, rank), as many as fit; those of highest rank go first."""
    kept = [(Column(name, max(len(name), size)), rank) for name, size, rank in columns]
    while len(kept) > 1 and sum(column.width + 2 for column, _ in kept) > width:
        # Of one rank the last goes first.
        kept.pop(max(range(1, len(kept)), key=lambda i: (kept[i][1], i)))
    return [column for column, _ in kept]
