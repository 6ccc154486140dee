"""Notices that no step is being made. Pure: the time is handed in.

How long a step may take nobody knows: a first one compiles, an evaluation runs between two. So it
is told at twice the longest time without a step that was told before, which is seldom.
"""

from __future__ import annotations

_FIRST_S = 10.0


class Standstill:
    """For one host's processes together."""

    def __init__(self, now_s: float) -> None:
        self._last: object = None
        self._since_s = now_s
        self._limit_s = _FIRST_S

    def look(self, steps: object, now_s: float) -> float | None:
        """How long `steps` has been the same, if that is worth telling now."""
        if steps != self._last:
            self._last, self._since_s = steps, now_s
        lasted_s = now_s - self._since_s
        if lasted_s < self._limit_s:
            return None
        self._limit_s *= 2
        return lasted_s
