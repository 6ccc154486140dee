"""Parti: train on many devices and hosts from one PyTorch script.

Names are loaded on first use, so that `parti run`, which only starts processes, never pays for
importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parti import cluster as cluster
    from parti import datasets as datasets
    from parti import testing as testing
    from parti.callbacks import EarlyStopping as EarlyStopping
    from parti.callbacks import LambdaCallback as LambdaCallback
    from parti.callbacks import Schedule as Schedule
    from parti.callbacks import Stop as Stop
    from parti.checkpoint.value import Checkpoint as Checkpoint
    from parti.cluster import ClusterSpec as ClusterSpec
    from parti.data.streams import ReadyBatches as ReadyBatches
    from parti.engine.forward import Forward as Forward
    from parti.engine.replica import Replica as Replica
    from parti.engine.report import StepReport as StepReport
    from parti.engine.tuning import Tuning as Tuning
    from parti.errors import CheckpointError as CheckpointError
    from parti.errors import CommError as CommError
    from parti.errors import CommTimeout as CommTimeout
    from parti.errors import ConfigError as ConfigError
    from parti.errors import DataError as DataError
    from parti.errors import NonFiniteLoss as NonFiniteLoss
    from parti.errors import PartiError as PartiError
    from parti.errors import PeerLost as PeerLost
    from parti.errors import PlanInfeasible as PlanInfeasible
    from parti.errors import Preempted as Preempted
    from parti.errors import RankMismatch as RankMismatch
    from parti.errors import WorkerFailed as WorkerFailed
    from parti.history import History as History
    from parti.launch import launch as launch
    from parti.metrics import Accuracy as Accuracy
    from parti.metrics import Mean as Mean
    from parti.metrics import TopK as TopK
    from parti.strategy.data_parallel import MirroredStrategy as MirroredStrategy
    from parti.strategy.data_parallel import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from parti.strategy.data_parallel import OneDeviceStrategy as OneDeviceStrategy
    from parti.trainer import Trainer as Trainer
    from parti.weights import EMA as EMA
    from parti.weights import SWA as SWA

__version__ = "0.1.0"

_HOMES = {
    "Accuracy": "parti.metrics",
    "Checkpoint": "parti.checkpoint.value",
    "EMA": "parti.weights",
    "EarlyStopping": "parti.callbacks",
    "History": "parti.history",
    "Mean": "parti.metrics",
    "SWA": "parti.weights",
    "Schedule": "parti.callbacks",
    "Stop": "parti.callbacks",
    "TopK": "parti.metrics",
    "Trainer": "parti.trainer",
    "ClusterSpec": "parti.cluster",
    "Forward": "parti.engine.forward",
    "MirroredStrategy": "parti.strategy.data_parallel",
    "MultiWorkerMirroredStrategy": "parti.strategy.data_parallel",
    "OneDeviceStrategy": "parti.strategy.data_parallel",
    "ReadyBatches": "parti.data.streams",
    "Replica": "parti.engine.replica",
    "StepReport": "parti.engine.report",
    "Tuning": "parti.engine.tuning",
    "CheckpointError": "parti.errors",
    "CommError": "parti.errors",
    "CommTimeout": "parti.errors",
    "ConfigError": "parti.errors",
    "DataError": "parti.errors",
    "LambdaCallback": "parti.callbacks",
    "NonFiniteLoss": "parti.errors",
    "PartiError": "parti.errors",
    "PeerLost": "parti.errors",
    "PlanInfeasible": "parti.errors",
    "Preempted": "parti.errors",
    "RankMismatch": "parti.errors",
    "WorkerFailed": "parti.errors",
}
_MODULES = ("cluster", "datasets", "launch", "testing")

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"parti.{name}")
    else:
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(__all__)}"
        # Without `name` and `obj` the interpreter adds no guess of its own to ours.
        raise AttributeError(f"module 'parti' has no attribute {name!r}; {hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
