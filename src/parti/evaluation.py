"""Adding up losses and metrics over a pass through the data, so that every sample counts once.

What is added up is exact or whole (`metrics.py`), so the values are the same to the bit for any
number of processes. Metrics that cannot be merged are fed everything, in sample order, on every
rank.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from parti.engine.forward import weigh
from parti.engine.report import Part, Parts
from parti.errors import ConfigError
from parti.history import CLOCK_NAMES
from parti.metrics import ExactSum, MergeableMetric, Metric, is_mergeable

_RESERVED = CLOCK_NAMES | {"loss", "epoch", "step", "samples", "lr"}


class Ranks(Protocol):
    """The part of a Replica that bringing values together needs."""

    def exchange(self, payload: bytes) -> tuple[bytes, ...]: ...

    def gather(self, value: object, axis: int = 0) -> object: ...


class Tally:
    """The metrics of one pass, on copies of the user's; the user's own stay untouched."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._merged: dict[str, MergeableMetric] = {}
        self._fed: dict[str, Metric] = {}
        for name, metric in metrics.items():
            fresh = copy.deepcopy(metric)
            if is_mergeable(fresh):
                self._merged[name] = fresh
            else:
                self._fed[name] = _alone(fresh, device)
        self._metrics = dict(metrics)

    def update(self, pairs: Sequence[Part], ranks: Ranks) -> None:
        """Take in the (output, target) of the micro-batches computed here."""
        for metric in self._merged.values():
            for part in pairs:
                metric.update(*part.value)
        if self._fed:
            pair = ranks.gather(Parts(tuple(pairs)))
            assert isinstance(pair, (tuple, list))
            for fed in self._fed.values():
                fed.update(*pair)

    def so_far(self) -> dict[str, float]:
        """What this rank alone has seen, where that is cheap to ask."""
        found = {name: metric.compute() for name, metric in self._merged.items()}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, float) and not math.isnan(value)
        }

    def values(self, ranks: Ranks) -> dict[str, float]:
        """The values over all ranks; equal on all of them."""
        computed: dict[str, object] = {name: fed.compute() for name, fed in self._fed.items()}
        if self._merged:
            mine = pickle.dumps([metric.state() for metric in self._merged.values()])
            everyones: list[list[bytes]] = list(map(pickle.loads, ranks.exchange(mine)))
            for i, name in enumerate(self._merged):
                total = copy.deepcopy(self._metrics[name])
                assert is_mergeable(total)
                for states in everyones:
                    total.merge(states[i])
                computed[name] = total.compute()
        return {
            key: value
            for name in self._metrics
            for key, value in _numbers(name, computed[name]).items()
        }


class LossSum:
    """The mean loss of a pass, weighed by what each step counted."""

    def __init__(self) -> None:
        self._total = ExactSum()
        self._count = ExactSum()

    def add(self, total: float, count: float) -> None:
        if count:  # nothing counted, nothing lost: 0 / 0 is no NaN worth keeping
            self._total.add(total)
            self._count.add(count)

    def add_parts(self, parts: Parts) -> list[Part]:
        """Take in the losses of micro-batches; return the (output, target) beside them."""
        pairs = []
        for part in parts:
            weighed = weigh(part.value, part.num_samples)
            self.add(*weighed.tally())
            pairs.append(Part(part.number, part.num_samples, weighed.aux))
        return pairs

    def mean(self) -> float:
        return self._total.over(self._count)

    def mean_over(self, ranks: Ranks) -> float:
        """The mean over what all ranks have added."""
        mine = pickle.dumps((self._total.to_bytes(), self._count.to_bytes()))
        everywhere = LossSum()
        for data in ranks.exchange(mine):
            total, count = pickle.loads(data)
            everywhere._total.merge(ExactSum.from_bytes(total))
            everywhere._count.merge(ExactSum.from_bytes(count))
        return everywhere.mean()


def check_metrics(metrics: Mapping[str, object] | None) -> None:
    """Refuse names that mean something else in a history, and what is not a metric."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={metrics!r}; expected metrics by name, such as "
            '{"accuracy": parti.Accuracy()}.'
        )
    for name, metric in metrics.items():
        if name in _RESERVED or name.startswith("val_"):
            raise ConfigError(
                f"metric name {name!r} is taken: it means something else in a history. Taken are "
                f"{', '.join(sorted(_RESERVED))} and names that begin with val_."
            )
        if isinstance(metric, type) or not isinstance(metric, Metric):
            given = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            raise ConfigError(
                f"metrics[{name!r}] is {given}; expected an object with update(output, target) and "
                f"compute(), such as parti.Accuracy()."
            )


def _alone(metric: Metric, device: torch.device) -> Metric:
    """A metric that sees every sample here must not add up over processes by itself."""
    if not isinstance(metric, nn.Module):
        return metric
    for module in metric.modules():
        if hasattr(module, "distributed_available_fn"):
            module.distributed_available_fn = _never  # type: ignore[assignment]
    metric.to(device)
    return metric


def _never() -> bool:
    return False


def _numbers(name: str, value: object) -> dict[str, float]:
    """What a metric computed, as numbers for a history."""
    if isinstance(value, Mapping):
        return {
            key: number
            for inner, each in value.items()
            for key, number in _numbers(f"{name}/{inner}", each).items()
        }
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: float(value.item())}
    if isinstance(value, int | float):
        return {name: float(value)}
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ConfigError(
        f"metric {name!r} computed a {type(value).__name__}{shape}; a history holds single "
        f"numbers. Let the metric average it, or compute it from trainer.predict."
    )
