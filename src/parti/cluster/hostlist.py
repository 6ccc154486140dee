"""Slurm's host lists: `rack[1-2]node[01-03,7]` to names and back. Pure; knows no environment.

    list   = item ("," item)*            commas outside of brackets
    item   = (text | "[" ranges "]")+    any number of brackets, text before, between, after
    ranges = range ("," range)*
    range  = low | low "-" high          zero-padded to the width of low

The last bracket varies fastest, order and duplicates are kept, and blanks around items and empty
items are ignored, as `scontrol show hostnames` has it. Brackets do not nest there, nor here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

from parti.errors import ConfigError

MAX_HOSTS = 1 << 20
"""More than any cluster has: a longer list is a slip, and is refused before memory is spent."""

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
# A longer run of digits is text: no bracket may count it.
_DIGITS = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")
_HOST = re.compile(r"[^\s,\[\]]+")


def expand(hostlist: str) -> tuple[str, ...]:
    """The host names that `hostlist` stands for, in order.

    >>> expand("rack[1-2]n[08-09,7],login")
    ('rack1n08', 'rack1n09', 'rack1n7', 'rack2n08', 'rack2n09', 'rack2n7', 'login')
    """
    hosts: list[str] = []
    for item in _split(hostlist):
        pieces = _pieces(item, hostlist)
        if len(hosts) + prod(map(len, pieces)) > MAX_HOSTS:
            raise _wrong(hostlist, f"{item!r} brings it beyond {MAX_HOSTS:,} hosts")
        hosts.extend(map("".join, product(*pieces)))
    return tuple(hosts)


def compress(hosts: Sequence[str]) -> str:
    """The short host list that `expand` turns back into exactly `hosts`.

    >>> compress(["rack1n08", "rack1n09", "rack2n08", "rack2n09", "login"])
    'rack[1-2]n[08-09],login'
    """
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise _wrong(host, "a host name is not empty and holds no blank, comma or bracket")
    # Text stands at even positions of an entry and numbers at odd ones. Folding from the right
    # keeps the order: in a list the rightmost bracket varies fastest.
    entries: list[tuple[str, ...]] = [tuple(_DIGITS.split(host)) for host in hosts]
    longest = max(map(len, entries), default=0)
    for position in range(longest - 2, 0, -2):
        entries = _fold(entries, position)
    return ",".join(map("".join, entries))


def expand_counts(counts: str) -> tuple[int, ...]:
    """Slurm's repeated counts, as in SLURM_TASKS_PER_NODE.

    >>> expand_counts("2(x3),1")
    (2, 2, 2, 1)
    """
    numbers: list[int] = []
    for item in counts.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise _wrong(counts, f"{item!r} is no count; expected counts like '2(x3),1'")
        repeats = int(match[2]) if match[2] else 1
        if len(numbers) + repeats > MAX_HOSTS:
            raise _wrong(counts, f"{item!r} brings it beyond {MAX_HOSTS:,} hosts")
        numbers.extend([int(match[1])] * repeats)
    return tuple(numbers)


def _split(hostlist: str) -> list[str]:
    """The items between the commas that stand outside of brackets."""
    items, start, inside = [], 0, False
    for position, character in enumerate(hostlist):
        if character == "[":
            if inside:
                raise _wrong(hostlist, f"a bracket within a bracket at {hostlist[position:]!r}")
            inside = True
        elif character == "]":
            if not inside:
                raise _wrong(hostlist, f"a ']' that closes nothing at {hostlist[position:]!r}")
            inside = False
        elif character == "," and not inside:
            items.append(hostlist[start:position])
            start = position + 1
    if inside:
        raise _wrong(hostlist, "a '[' that is not closed")
    items.append(hostlist[start:])
    return [item.strip() for item in items if item.strip()]


def _pieces(item: str, hostlist: str) -> list[tuple[str, ...]]:
    """The alternatives at each place of an item: one for text, several for a bracket."""
    pieces: list[tuple[str, ...]] = []
    for part in re.split(r"(\[[^\]]*\])", item):
        if part.startswith("["):
            pieces.append(_numbers(part[1:-1], hostlist))
        elif part:
            if not _HOST.fullmatch(part):
                raise _wrong(hostlist, f"a blank within {item!r}")
            pieces.append((part,))
    return pieces


def _numbers(ranges: str, hostlist: str) -> tuple[str, ...]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise _wrong(hostlist, f"{text!r} is no range; expected numbers like '3' or '01-16'")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _wrong(hostlist, f"the range {text!r} runs backwards")
        if len(numbers) + high - low >= MAX_HOSTS:
            raise _wrong(hostlist, f"{text!r} brings it beyond {MAX_HOSTS:,} hosts")
        width = len(match[1])
        numbers.extend(str(number).zfill(width) for number in range(low, high + 1))
    return tuple(numbers)


def _fold(entries: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    """Join neighbours that differ in the number at `position` only."""
    folded: list[tuple[str, ...]] = []
    run: list[str] = []
    frame: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    for entry in [*entries, ()]:
        here = (entry[:position], entry[position + 1 :]) if len(entry) > position else None
        if run and frame is not None and here != frame:
            folded.append((*frame[0], _bracket(run), *frame[1]))
            run = []
        frame = here
        if here is not None:
            run.append(entry[position])
        elif entry:
            folded.append(entry)
    return folded


def _bracket(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and _follows(ranges[-1], number):
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return "[" + ",".join("-".join(ends) for ends in ranges) + "]"


def _follows(ends: list[str], number: str) -> bool:
    """Whether a range from ends[0] that now stops at ends[-1] writes `number` next."""
    return str(int(ends[-1]) + 1).zfill(len(ends[0])) == number


def _wrong(text: str, fact: str) -> ConfigError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return ConfigError(
        f"Host list {shown!r}: {fact}. Expected a list as Slurm writes it, like 'node[01-16],gpu7'."
    )
