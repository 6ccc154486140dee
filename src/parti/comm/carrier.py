"""Neighbours that hand everything on to others, and let somebody hear of it.

Must not know who listens, or what for.
"""

from __future__ import annotations

from collections.abc import Callable

from parti.comm.protocol import Neighbours, Phase, Region


def _nobody(is_waiting: bool) -> None:
    return None


class Carrier:
    """`told` hears what the rank reports of itself, when the others can see it already. `waits`
    hears when it begins to wait for its neighbours, and when that is over. Of a rank that waits in
    its own way (`check`) it hears the first alone: the exchange that follows ends it."""

    def __init__(
        self,
        inside: Neighbours,
        *,
        told: Callable[[Phase, int], None],
        waits: Callable[[bool], None] = _nobody,
    ) -> None:
        self._inside = inside
        self._told = told
        self._waits = waits

    @property
    def kind(self) -> str:
        return self._inside.kind

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._inside.ranks

    @property
    def index(self) -> int:
        return self._inside.index

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        self._waits(True)
        try:
            return self._inside.exchange(payload)
        finally:
            self._waits(False)

    def allocate(self, num_bytes: int) -> Region:
        self._waits(True)
        try:
            return self._inside.allocate(num_bytes)
        finally:
            self._waits(False)

    def check(self) -> None:
        self._inside.check()
        self._waits(True)

    def abandon(self) -> None:
        self._inside.abandon()

    def report(self, phase: Phase, step: int) -> None:
        self._inside.report(phase, step)
        self._told(phase, step)
