"""The numbers that a forward pass computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from parti.errors import ConfigError

PRECISIONS = ("fp32", "bf16")


def forward_context(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """What a forward pass runs in: nothing for "fp32", autocast to bfloat16 for "bf16".

    Weights, gradients and the optimizer's state stay in fp32 either way.
    """
    match precision:
        case "fp32":
            return nullcontext
        case "bf16":
            return partial(torch.autocast, device.type, torch.bfloat16)
        case "fp16" if device.type == "cpu":
            raise ConfigError(
                'precision="fp16" is refused on CPU: its convolutions have no fast form there '
                '(one took 1,584 ms instead of 9.8). Use precision="bf16".'
            )
        case "fp16":
            raise ConfigError(
                'precision="fp16" is refused: gradients below 6e-8 become zero without a scaled '
                'loss. Use precision="bf16", which has the range of fp32.'
            )
        case _:
            raise ConfigError(
                f"precision={precision!r} is not known; expected one of "
                f"{', '.join(map(repr, PRECISIONS))}."
            )
