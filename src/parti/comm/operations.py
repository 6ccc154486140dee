"""What is under way between hosts: whom it still waits for, and the sentences when it fails.

Pure but for the gate that its waiter stands at.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from parti.comm.wait import name_ranks
from parti.errors import CommError, CommTimeout, PeerLost, RankMismatch

KINDS: tuple[type[CommError], ...] = (CommError, PeerLost, CommTimeout, RankMismatch)
"""What a failure can be; its place here stands for it on the wire."""


class Operation:
    """One exchange or transfer, from its start until every byte of it has moved."""

    __slots__ = ("finished", "gate", "name", "number", "unreceived", "unsent")

    def __init__(
        self, name: str, number: int, *, unsent: Collection[int], unreceived: Collection[int]
    ) -> None:
        """`unsent` and `unreceived` are ranks."""
        self.name = name
        self.number = number
        self.unsent = set(unsent)
        self.unreceived = set(unreceived)
        self.finished = False
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def missing(self) -> set[int]:
        return self.unsent | self.unreceived


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank's communication has ended. The first one stays."""

    kind: type[CommError]
    fact: str
    is_told: bool
    """Whether the other ranks shall hear of it from this one."""
    ranks: tuple[int, ...] = ()
    """Who is to blame, as far as this rank knows by itself."""

    def error(self, rank: int, operation: Operation, waited_s: float | None) -> CommError:
        """What one operation raises. None: it was not begun."""
        if waited_s is None:
            text = f"rank {rank}: {operation.name} cannot begin: {self.fact}"
        else:
            missing = operation.missing
            whom = f" for {name_ranks(missing)}" if missing else ""
            text = f"rank {rank}: {operation.name} waited {waited_s:.1f} s{whom}: {self.fact}"
        error = self.kind(text)
        error.ranks = self.ranks
        return error


def describe_lost(reasons: Mapping[int, str]) -> str:
    """Ranks whose connections broke, and what the system said."""
    names = name_ranks(reasons)
    are, their = ("is", "its") if len(reasons) == 1 else ("are", "their")
    said = ", ".join(sorted(set(reasons.values())))
    return (
        f"{names} {are} gone: {their} connection ended without a farewell ({said}). A process or "
        "its host was killed."
    )


def describe_left(ranks: Collection[int]) -> str:
    """Ranks that closed in good order while others still need them."""
    has = "has" if len(ranks) == 1 else "have"
    return (
        f"{name_ranks(ranks)} {has} left in good order: the script there ended before that of the "
        "others."
    )


def describe_silent(ages_s: Mapping[int, float]) -> str:
    """Ranks that give no sign of life."""
    are = "is" if len(ages_s) == 1 else "are"
    return (
        f"{name_ranks(ages_s)} {are} silent: no sign of life for {min(ages_s.values()):.1f} s. A "
        "process is frozen, its host is down, or the network to it is cut."
    )


def describe_late(operation: Operation, ages_s: Mapping[int, float], patience_s: float) -> str:
    """Ranks that live and do not come."""
    are, have = ("is", "has") if len(ages_s) == 1 else ("are", "have")
    return (
        f"{name_ranks(ages_s)} {are} alive (heard of {max(ages_s.values()):.1f} s ago) but {have} "
        f"not come to {operation.name} within {patience_s:g} s. Raise `patience_s` if this is "
        "expected."
    )


def describe_mismatch(rank: int, came: str, expected: str) -> str:
    """A rank that is at another operation than this one."""
    return (
        f"rank {rank} sent {came}, where {expected} was expected. Every rank must call the same "
        "operations in the same order, with the same sizes."
    )
