"""The strategies in which every replica is one process with the whole model.

They are values: constructing one does nothing, printing one shows the configuration. They differ in
how many processes they ask for, and where; the training step is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from parti.cluster import Level, Place
from parti.engine.replica import Replica
from parti.engine.transforms.precision import check_precision
from parti.engine.tuning import Tuning
from parti.errors import ConfigError
from parti.launch.devices import num_local_devices
from parti.strategy import session


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What all of them have in common. Use one of the classes below."""

    seed: int = 0
    """Fixes initial weights, sample order, dropout and augmentation."""
    exact: bool = True
    """The same weights to the last bit on any number of processes. False lets the library add in
    whatever order is fastest."""
    precision: str = "fp32"
    """What the forward pass computes in: "fp32" or "bf16". Weights stay as they are."""
    compile: bool = False
    """Compile the models with torch.compile."""
    tuning: Tuning = field(default_factory=Tuning)
    """What is done to make one process faster; each part can be turned off."""
    patience_s: float = 60.0
    """How long a rank waits for another before it gives up and says whom it waited for."""
    recovery: bool = True
    """Go on without a process that is killed, and start another in its place."""
    threads: int | None = None
    """Threads of each process. None: the cores of the host divided by its processes."""

    one_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} is not a whole number.")
        if not self.patience_s > 0:
            raise ConfigError(f"patience_s={self.patience_s!r}; expected a time above 0 seconds.")
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ConfigError(f"threads={self.threads!r}; expected at least 1, or None.")
        if not isinstance(self.tuning, Tuning):
            raise ConfigError(
                f"tuning={self.tuning!r}; expected parti.Tuning(...), or parti.Tuning.none() to "
                "turn everything off."
            )
        for name in ("exact", "compile", "recovery"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}; expected True or False.")

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Build models and optimizers inside: every process starts from the same weights.

        In a plainly started script this is where the processes come from: the script is run again
        by each of them, and this one looks after them and ends when they have.
        """
        session.enter(self)
        session.seed_everything(self.seed)
        yield

    def bind(self, *objects: nn.Module | Optimizer) -> Replica:
        """Make the strategy live for these models and optimizers, in any number and order."""
        models = [each for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        for each in objects:
            if not isinstance(each, (nn.Module, Optimizer)):
                raise ConfigError(
                    f"bind() got a {type(each).__name__}; expected models (torch.nn.Module) and "
                    "optimizers (torch.optim.Optimizer)."
                )
        if not models:
            raise ConfigError("bind() got no model; expected bind(model, optimizer).")
        known = {id(p) for model in models for p in model.parameters()}
        for optimizer in optimizers:
            steered = [p for group in optimizer.param_groups for p in group["params"]]
            if known.isdisjoint(map(id, steered)):
                raise ConfigError(
                    f"bind() got a {type(optimizer).__name__} whose {len(steered)} parameters all "
                    "belong to other models. Make the optimizer after the model, from "
                    "model.parameters(), and bind every model that it trains."
                )
        return session.bind(self, models, optimizers)

    def num_local_processes(self) -> int:
        """How many processes this host contributes."""
        raise NotImplementedError

    def device_names(self) -> tuple[str, ...]:
        """The devices of this host by name, where the user named them."""
        return ()

    def check(self, place: Place) -> None:
        """Refuse a place that contradicts this strategy."""
        if not place.in_world:
            raise ConfigError(
                f"{type(self).__name__} has no work for the task type {place.task_type!r}. "
                f"{place.why} Start the script on chief and worker tasks only."
            )
        if self.one_host and place.num_nodes > 1:
            raise ConfigError(
                f"{type(self).__name__} uses one host, but the job has {place.num_nodes}. "
                f"{place.why} Use parti.MultiWorkerMirroredStrategy()."
            )

    def __str__(self) -> str:
        shown = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != _default(each)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _default(each: object) -> object:
    factory = getattr(each, "default_factory", None)
    return factory() if callable(factory) else getattr(each, "default", None)


@dataclass(frozen=True, slots=True)
class OneDeviceStrategy(DataParallel):
    """One process on one device: the twin to compare with, and the place to debug."""

    device: str | None = None

    def num_local_processes(self) -> int:
        return 1

    def device_names(self) -> tuple[str, ...]:
        return () if self.device is None else (self.device,)

    def check(self, place: Place) -> None:
        DataParallel.check(self, place)
        if place.level is Level.RANK and place.world_size != 1:
            raise ConfigError(
                f"OneDeviceStrategy uses one process, but {place.world_size} were started. "
                f"{place.why} Start one, or use parti.MirroredStrategy()."
            )


@dataclass(frozen=True, slots=True)
class MirroredStrategy(DataParallel):
    """A replica on every device of this host.

    `devices` is a number, or names such as ("cuda:0", "cuda:1"); by default all GPUs, or where
    there are none, a process for every core. `parti run -n` overrides it.
    """

    devices: int | Sequence[str] | None = None

    def __post_init__(self) -> None:
        DataParallel.__post_init__(self)
        _check_devices(self)

    def num_local_processes(self) -> int:
        return _count(self.devices)

    def device_names(self) -> tuple[str, ...]:
        return _names(self.devices)


@dataclass(frozen=True, slots=True)
class MultiWorkerMirroredStrategy(DataParallel):
    """A replica on every device of every host of the cluster that the environment describes."""

    devices: int | Sequence[str] | None = None

    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        DataParallel.__post_init__(self)
        _check_devices(self)

    def num_local_processes(self) -> int:
        return _count(self.devices)

    def device_names(self) -> tuple[str, ...]:
        return _names(self.devices)


def _check_devices(strategy: MirroredStrategy | MultiWorkerMirroredStrategy) -> None:
    devices = strategy.devices
    if isinstance(devices, (bool, str)):
        raise ConfigError(
            f"devices={devices!r}; expected a number of processes, or a sequence of names such as "
            '("cuda:0", "cuda:1").'
        )
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigError(f"devices={devices}; expected at least 1.")
    elif devices is not None:
        if not devices or len(set(devices)) != len(devices):
            raise ConfigError(f"devices={list(devices)!r}; expected distinct names, at least one.")
        object.__setattr__(strategy, "devices", tuple(devices))


def _names(devices: int | Sequence[str] | None) -> tuple[str, ...]:
    return () if devices is None or isinstance(devices, int) else tuple(devices)


def _count(devices: int | Sequence[str] | None) -> int:
    if devices is None:
        return num_local_devices()
    return devices if isinstance(devices, int) else len(devices)


__all__ = ["DataParallel", "MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy"]
