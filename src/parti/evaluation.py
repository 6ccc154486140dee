"""Adding up losses and metrics over a pass through the data, so that every sample counts once.

What is added up is exact or whole (`metrics.py`), so the values are the same to the bit for any
number of processes. Metrics that cannot be merged are fed everything, in sample order, on every
rank. Knows nothing of ranks: bytes go out and come in.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parti.engine.collect import join
from parti.engine.forward import weigh
from parti.engine.report import Part, Parts
from parti.errors import ConfigError
from parti.history import CLOCK_NAMES
from parti.metrics import ExactSum, MergeableMetric, Metric, is_mergeable

_RESERVED = CLOCK_NAMES | {"loss", "epoch", "step", "samples", "lr"}


class Tally:
    """The loss and the metrics of one pass, on copies of the user's; the user's own stay untouched.

    Each rank measures what it has computed, as bytes; when everybody has everyone's, all take them
    in. So all hold the same at every moment, and a rank that is lost takes nothing with it.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = dict(metrics)
        self._device = device
        self._merged: dict[str, MergeableMetric] = {}
        self._fed: dict[str, Metric] = {}
        for name, metric in metrics.items():
            fresh = copy.deepcopy(metric)
            if is_mergeable(fresh):
                self._merged[name] = fresh
            else:
                self._fed[name] = _alone(fresh, device)
        self.loss = LossSum()

    def measure(self, pairs: Sequence[Part]) -> bytes:
        """What the (output, target) of the micro-batches computed here come to."""
        if not self._metrics:
            return b""
        states = []
        for name in self._merged:
            metric = copy.deepcopy(self._metrics[name])
            assert is_mergeable(metric)
            for part in pairs:
                metric.update(*part.value)
            states.append(metric.state())
        outputs = []
        if self._fed:
            outputs = [(part.number, tree_map_only(Tensor, _plain, part.value)) for part in pairs]
        return pickle.dumps((states, outputs))

    def take(self, measured: Sequence[bytes]) -> None:
        """Take in what all ranks have measured."""
        if not self._metrics:
            return
        # Pickled by this job's own processes, for each other.
        everyones = [pickle.loads(data) for data in measured]
        for states, _ in everyones:
            for metric, state in zip(self._merged.values(), states, strict=True):
                metric.merge(state)
        if self._fed:
            outputs = sorted(
                (each for _, own in everyones for each in own), key=lambda each: each[0]
            )
            pair = join([value for _, value in outputs])
            pair = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), pair)
            for fed in self._fed.values():
                fed.update(*pair)

    def measure_parts(self, parts: Parts) -> tuple[bytes, bytes]:
        """The same of a batch that was run, its losses too."""
        loss = LossSum()
        pairs = loss.add_parts(parts)
        return loss.to_bytes(), self.measure(pairs)

    def take_all(self, everyones: Sequence[bytes]) -> None:
        """Take in what `measure_parts` gave on all ranks, for one batch after the other."""
        for batch in zip(*map(pickle.loads, everyones), strict=True):
            for loss, _ in batch:
                self.loss.merge(LossSum.from_bytes(loss))
            self.take([measured for _, measured in batch])

    def so_far(self) -> dict[str, float]:
        """The values where they are cheap to ask for."""
        found = {name: metric.compute() for name, metric in self._merged.items()}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, float) and not math.isnan(value)
        }

    def values(self) -> dict[str, float]:
        """The values over all ranks; equal on all of them."""
        computed: dict[str, object] = {
            name: metric.compute() for name, metric in (self._merged | self._fed).items()
        }
        return {
            key: value
            for name in self._metrics
            for key, value in _numbers(name, computed[name]).items()
        }

    def state_dict(self) -> dict[str, object]:
        """What was taken in so far, as plain values and tensors."""
        return {
            "loss": self.loss.to_bytes(),
            "merged": [metric.state() for metric in self._merged.values()],
            "fed": [_state_of(metric) for metric in self._fed.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss = LossSum.from_bytes(state["loss"])
        for metric, held in zip(self._merged.values(), state["merged"], strict=True):
            metric.merge(held)
        for (name, fed), held in zip(self._fed.items(), state["fed"], strict=True):
            _put_state(name, fed, held)


_COUNT = "_update_count"


def _state_of(metric: Metric) -> dict[str, Any] | None:
    """What a metric that is fed everything holds; None where it can't be told. torchmetrics' keep
    their states as attributes that `_defaults` names."""
    names = getattr(metric, "_defaults", None)
    if names is not None:
        return {name: getattr(metric, name) for name in (*names, _COUNT)}
    if hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict"):
        return dict(metric.state_dict())
    return None


def _put_state(name: str, metric: Metric, held: dict[str, Any] | None) -> None:
    if held is None:
        warnings.warn(
            f"metric {name!r} has no state_dict: of the epoch that is gone on with in the middle "
            "it sees the rest only.",
            RuntimeWarning,
            stacklevel=2,
        )
    elif hasattr(metric, "_defaults"):
        for key, value in held.items():
            setattr(metric, key, value)
    else:
        metric.load_state_dict(held)  # type: ignore[attr-defined]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


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

    def merge(self, other: LossSum) -> None:
        self._total.merge(other._total)
        self._count.merge(other._count)

    def to_bytes(self) -> bytes:
        return pickle.dumps((self._total.to_bytes(), self._count.to_bytes()))

    @classmethod
    def from_bytes(cls, data: bytes) -> LossSum:
        made = cls()
        total, count = pickle.loads(data)
        made._total, made._count = ExactSum.from_bytes(total), ExactSum.from_bytes(count)
        return made


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
