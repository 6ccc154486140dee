"""Phases of a training: stretches on one set of data each, one `fit` after the other. Pure.

A phase is known by its name. What a call of `fit` is to do follows from the phases that the
training has been through, the one it is in last.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from parti.errors import ConfigError
from parti.history import Phase


class Way(Enum):
    """What a call of `fit` does."""

    BEGINS = "a new phase begins"
    GOES_ON = "the phase under way goes on"
    IS_DONE = "the phase has all its epochs"
    IS_BEHIND = "a later phase is under way"


def way_of(phases: Sequence[Phase], name: str, *, epochs: int, epochs_done: int) -> Way:
    """`epochs` are asked for, `epochs_done` are those of the phase under way."""
    if name not in [phase.name for phase in phases]:
        return Way.BEGINS
    last = phases[-1]
    if last.name != name:
        return Way.IS_BEHIND
    # One that a callback has ended early is complete for as many epochs as were asked for then.
    done = max(epochs_done, last.epochs) if last.is_complete else epochs_done
    return Way.IS_DONE if epochs <= done else Way.GOES_ON


def check_data(phase: Phase, num_samples: int | None) -> None:
    """The phase under way goes on with the data it began with."""
    if phase.num_samples != num_samples:
        raise ConfigError(
            f"phase {phase.name!r} is under way with {_samples(phase.num_samples)}, and fit was "
            f"given {_samples(num_samples)}. Give it the same data; or begin a new phase, with a "
            f"name that is new: fit(..., phase=...)."
        )


def _samples(count: int | None) -> str:
    return "a stream" if count is None else f"{count} samples"


def check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"phase={name!r}; expected a name, such as 'tuesday'.")
