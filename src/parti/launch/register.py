"""Where the roll of a job lies, as one supervisor sees it."""

from __future__ import annotations

from typing import Protocol

from parti.elastic import membership
from parti.elastic.membership import Event
from parti.elastic.roll import Roll


class Register(Protocol):
    """Where the roll lies."""

    @property
    def roll(self) -> Roll:
        """The newest that is known here. Those of others may have come between."""
        ...

    @property
    def reached_since_s(self) -> float:
        """Since when what is told arrives; infinite as long as it does not."""
        ...

    def tell(self, event: Event) -> tuple[str, ...]:
        """Make the next roll of the newest one; what a person should know."""
        ...


class LocalRegister:
    """The roll of a job of one host, or of one host's part of a job that cannot lose any."""

    reached_since_s = 0.0

    def __init__(self, wanted: int, num_spares: int) -> None:
        self._roll = membership.of_one_host(wanted, num_spares)

    @property
    def roll(self) -> Roll:
        return self._roll

    def tell(self, event: Event) -> tuple[str, ...]:
        self._roll, words = membership.advance(self._roll, event)
        return words
