"""The state of torch's random generators as a function of (seed, step, micro-batch).

Between steps every rank holds the same state again, whichever micro-batches it has computed.
"""

from __future__ import annotations

import torch

from parti.data.seeds import derive

_AFTER_STEP = 1 << 32
"""Stands where the number of a micro-batch stands, for the state left behind by a step."""


class Randomness:
    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def before_micro_batch(self, step: int, micro_batch: int) -> None:
        self._set(derive(self._seed, step, micro_batch))

    def after_step(self, step: int) -> None:
        self._set(derive(self._seed, step, _AFTER_STEP))

    def _set(self, value: int) -> None:
        for generator in self._generators:
            generator.manual_seed(value)
