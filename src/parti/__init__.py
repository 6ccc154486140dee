"""Parti: train on many devices and hosts from one PyTorch script.

Names are loaded on first use, so that `parti run`, which only starts processes, never pays for
importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parti.engine.tuning import Tuning as Tuning
    from parti.errors import PartiError as PartiError
    from parti.strategy.data_parallel import MirroredStrategy as MirroredStrategy
    from parti.strategy.data_parallel import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from parti.strategy.data_parallel import OneDeviceStrategy as OneDeviceStrategy

__version__ = "0.1.0"
