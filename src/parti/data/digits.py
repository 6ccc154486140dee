"""The UCI optical digits, embedded in the package; `DIGITS.md` names source and licence."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from parti.data.pictures import Pictures, check_dtype, labelled

_WHITE = 16
_NUM_TRAIN = 1437


def digits(*, dtype: torch.dtype = torch.float32) -> Pictures:
    """Handwritten digits of 8×8 pixels: 1,437 to train with and 360 to test.

    `.train` and `.test` are (images [n, 1, 8, 8] from 0 to 1, labels [n]). With
    `dtype=torch.uint8` the images keep their 17 grey levels, 0 to 16.

    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998 (UCI Machine
    Learning Repository, CC BY 4.0).
    """
    check_dtype(dtype)
    with files("parti.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        pixels, labels = arrays["images"], arrays["labels"]
    return Pictures(
        train=labelled(pixels[:_NUM_TRAIN], labels[:_NUM_TRAIN], white=_WHITE, dtype=dtype),
        test=labelled(pixels[_NUM_TRAIN:], labels[_NUM_TRAIN:], white=_WHITE, dtype=dtype),
    )
