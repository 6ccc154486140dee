"""Numbers as tensors without dimensions, made once.

A number from Python is made a tensor at every call it is passed to, which takes longer than the
operation on a small operand.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Shared: not to be written to."""
    return torch.tensor(value, dtype=dtype, device=device)
