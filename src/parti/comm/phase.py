"""What a rank can say of itself. No torch: supervisors read it, too."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a rank last said it was doing; shown when others wait for it."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCE = 4
    OPTIMIZER = 5
    EVALUATE = 6
    USER = 7
    SAVE = 8
    UPDATE = 9
    """One piece of the weights is about to change."""
    HAND_OUT = 10
    """It has changed here, and not yet everywhere."""
    RECOVER = 11
    """Joining those who are left, or those who have come."""
    WAIT = 12
    """For a place in the world."""


LENIENT = frozenset({Phase.START, Phase.DATA, Phase.SAVE, Phase.RECOVER, Phase.WAIT})
"""What may take long without anything being wrong."""
