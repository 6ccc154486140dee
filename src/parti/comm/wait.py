"""The sentence that is said when a wait passes its deadline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parti.comm.protocol import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The last word of a rank that others wait for."""

    rank: int
    phase: Phase
    step: int
    age_s: float

    def __str__(self) -> str:
        where = self.phase.name.lower()
        at = f" of step {self.step}" if self.step >= 0 else ""
        return f"last report from rank {self.rank}: {where}{at}, {self.age_s:.1f} s ago"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`, `no rank`."""
    names = [str(rank) for rank in sorted(ranks)]
    if not names:
        return "no rank"
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def describe_wait(
    *, rank: int, operation: int, waited_s: float, arrived: Iterable[int], missing: list[Sighting]
) -> str:
    """Who waits, for whom, since when, and what the missing last said."""
    absent = name_ranks(sighting.rank for sighting in missing)
    words = "; ".join(str(sighting) for sighting in missing)
    return (
        f"rank {rank}: exchange {operation} waited {waited_s:.1f} s for {absent}; "
        f"{name_ranks(arrived)} arrived. {words[:1].upper()}{words[1:]}."
    )
