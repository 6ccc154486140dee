"""A neighbourhood of one: nothing to wait for. The null object of communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parti.comm.protocol import Phase, Region

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Solo:
    """One rank alone with its memory, on any device."""

    rank: int = 0
    device: torch.device = _CPU

    @property
    def kind(self) -> str:
        return "none"

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    @property
    def index(self) -> int:
        return 0

    def exchange(self, payload: bytes) -> tuple[bytes, ...]:
        return (payload,)

    def allocate(self, num_bytes: int) -> Region:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return Region((memory,), 0)

    def report(self, phase: Phase, step: int) -> None:
        return None

    def check(self) -> None:
        return None

    def abandon(self) -> None:
        return None
