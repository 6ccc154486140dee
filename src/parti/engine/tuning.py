"""What is done to make one process faster: a value in which each part can be turned off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All on by default; each can be turned off."""

    fused_optimizer: bool = True
    allocator: bool = True
    layout: bool = True
    fast_matmul: bool = True

    @classmethod
    def none(cls) -> Tuning:
        return cls(fused_optimizer=False, allocator=False, layout=False, fast_matmul=False)
