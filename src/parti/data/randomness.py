"""The random generators that a user's data set draws from: torch's, Python's and numpy's.

They are the process's own, the same that dropout draws from, so whoever seeds them here puts them
back as they were. A data set with a generator of its own can make it from `torch.initial_seed()`,
which is the sample's seed while the sample is read.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SEED_BITS_OF_NUMPY = 32
_State = tuple[torch.Tensor, Any, Any]
_lock = threading.RLock()


def seed_generators(seed: int) -> None:
    # Not torch.manual_seed: it visits every kind of device, which takes a hundred times as long.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> (64 - _SEED_BITS_OF_NUMPY))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever happens to the generators inside, outside they are as before.

    One thread at a time: ranks that run as threads share these generators.
    """
    with _lock:
        before = _state()
        try:
            yield
        finally:
            _restore(before)


class OwnRandomness:
    """A strand of randomness that is taken up and laid down again, beside the process's own.

    For a stream: its state lives on from one batch to the next, while the model draws in between.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _State | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        with generators_kept():
            if self._own is None:
                seed_generators(self._seed)
            else:
                _restore(self._own)
            try:
                yield
            finally:
                self._own = _state()


def _state() -> _State:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _restore(state: _State) -> None:
    of_torch, of_python, of_numpy = state
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
