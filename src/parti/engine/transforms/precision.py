"""The numbers that a forward pass computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from parti.errors import ConfigError

PRECISIONS = ("fp32", "bf16")


def check_precision(precision: str) -> None:
    """Refuse what is not offered, with the reason."""
    if precision in PRECISIONS:
        return
    known = ", ".join(map(repr, PRECISIONS))
    if precision == "fp16":
        raise ConfigError(
            'precision="fp16" is refused: its convolutions have no fast form on CPUs (one took '
            "1,584 ms instead of 9.8), and gradients below 6e-8 become zero without a scaled loss. "
            'Use precision="bf16", which has the range of fp32.'
        )
    raise ConfigError(f"precision={precision!r} is not known; expected one of {known}.")


def forward_context(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """What a forward pass runs in: nothing for "fp32", autocast to bfloat16 for "bf16".

    Weights, gradients and the optimizer's state stay in fp32 either way.
    """
    if precision == "bf16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    return nullcontext
