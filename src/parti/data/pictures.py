"""The value that the built-in data sets come as."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from parti.errors import ConfigError

Labelled = tuple[torch.Tensor, torch.Tensor]
"""Images [n, 1, height, width], and labels [n] of type int64."""


class Pictures(NamedTuple):
    """Labelled images, split once and for all: `train_set, test_set = datasets.digits()`."""

    train: Labelled
    test: Labelled


def labelled(
    pixels: NDArray[np.uint8], labels: NDArray[np.uint8], *, white: int, dtype: torch.dtype
) -> Labelled:
    """Images with one channel: from 0 to 1, or the stored bytes with `dtype=torch.uint8`."""
    images = torch.from_numpy(pixels.copy()).unsqueeze(1)
    if dtype != torch.uint8:
        images = images.to(dtype).div_(white)
    return images, torch.from_numpy(labels.astype(np.int64))


def check_dtype(dtype: torch.dtype) -> None:
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}; expected torch.uint8 or a floating-point type.")
