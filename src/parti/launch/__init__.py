"""Starts processes, watches them, and tells how they ended. The only spawner of processes.

    supervisor    the loop that watches the workers of one host; what it needs is in
                  spawn, lifeline, feed, output, signals, directories, environment, devices
    failure       which failure was the first, and how it is told (pure)
    job           one job from its command to its outcome
    rerun         `ensure`: a plainly started script puts itself under a supervisor
    notebook      `launch`: a function as the program of every worker
    worker        `install`: what a worker does so that its last exception is told
    hosts, store  how the supervisors of several hosts meet, agree and end together

Nothing here imports torch. This module can be called: `parti.launch(fn, strategy)` is
`parti.launch.notebook.launch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parti.launch.devices import num_cores as num_cores
    from parti.launch.devices import num_gpus as num_gpus
    from parti.launch.devices import num_local_devices as num_local_devices
    from parti.launch.environment import ProcessTuning as ProcessTuning
    from parti.launch.notebook import launch as launch
    from parti.launch.rerun import ensure as ensure
    from parti.launch.store import connect as connect_store
    from parti.launch.worker import install as install

_HOMES = {
    "ProcessTuning": ("environment", "ProcessTuning"),
    "connect_store": ("store", "connect"),
    "ensure": ("rerun", "ensure"),
    "install": ("worker", "install"),
    "launch": ("notebook", "launch"),
    "num_cores": ("devices", "num_cores"),
    "num_gpus": ("devices", "num_gpus"),
    "num_local_devices": ("devices", "num_local_devices"),
}

__all__ = [
    "ProcessTuning",
    "connect_store",
    "ensure",
    "install",
    "launch",
    "num_cores",
    "num_gpus",
    "num_local_devices",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)


class _CallableModule(ModuleType):
    """`parti.launch` is this package as soon as anything of it is imported, and has to remain what
    the user calls."""

    def __call__(self, fn: Callable[..., object], strategy: object, *args: object) -> object:
        launch: Callable[..., object] = __getattr__("launch")  # type: ignore[assignment]
        return launch(fn, strategy, *args)


sys.modules[__name__].__class__ = _CallableModule
