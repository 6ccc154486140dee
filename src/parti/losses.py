"""What any loss means for a global batch: a sum and a count. Knows nothing of ranks or steps.

A batch is computed in slices, and the mean of means over slices of unequal weight is not the mean
over the batch. So a loss is turned into a pair (sum, count): sums and counts are added over the
whole batch, on all ranks, and divided once. The count is what the loss itself divides by:

    loss                                      what is counted
    ----------------------------------------  ----------------------------------------------
    CrossEntropyLoss, NLLLoss                 targets that are not ignored, each weighing what
                                              its class weighs
    MSELoss, L1Loss, BCELoss and the like     elements
    KLDivLoss("batchmean"), margin losses     samples
    reduction="none", or any tensor           elements of the tensor: a plain mean over them
    reduction="sum"                           nothing: the gradient is that of the sum over the
                                              global batch, as one process would have it
    anything else that returns a scalar       samples: the scalar is taken as a mean over them
    a pair (sum, count)                       as given

Functions of `torch.nn.functional` and `functools.partial` of them are known like their classes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parti.errors import ConfigError

Loss: TypeAlias = Callable[..., object]
"""loss(output, target), as a module or a function."""


class Scale(Enum):
    """How the global batch's loss comes from the values of its slices."""

    MEAN = "mean"
    """Sums over sums of counts."""
    SUM = "sum"
    """The values added up, undivided."""


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """A loss that gives (sum, count), a tensor to average over, or a mean over samples."""

    measure: Loss
    scale: Scale = Scale.MEAN


class _Counts(Enum):
    TARGETS = "targets"
    ELEMENTS = "elements"
    SAMPLES = "samples"
    LABEL_ROWS = "label rows"


_MODULES: Mapping[type[nn.Module], _Counts] = {
    nn.CrossEntropyLoss: _Counts.TARGETS,
    nn.NLLLoss: _Counts.TARGETS,
    nn.LinearCrossEntropyLoss: _Counts.TARGETS,
    nn.L1Loss: _Counts.ELEMENTS,
    nn.MSELoss: _Counts.ELEMENTS,
    nn.SmoothL1Loss: _Counts.ELEMENTS,
    nn.HuberLoss: _Counts.ELEMENTS,
    nn.BCELoss: _Counts.ELEMENTS,
    nn.BCEWithLogitsLoss: _Counts.ELEMENTS,
    nn.KLDivLoss: _Counts.ELEMENTS,
    nn.PoissonNLLLoss: _Counts.ELEMENTS,
    nn.SoftMarginLoss: _Counts.ELEMENTS,
    nn.HingeEmbeddingLoss: _Counts.ELEMENTS,
    nn.MultiMarginLoss: _Counts.SAMPLES,
    nn.MultiLabelMarginLoss: _Counts.SAMPLES,
    nn.MultiLabelSoftMarginLoss: _Counts.LABEL_ROWS,
}
_FUNCTIONS: Mapping[object, _Counts] = {
    F.cross_entropy: _Counts.TARGETS,
    F.nll_loss: _Counts.TARGETS,
    F.l1_loss: _Counts.ELEMENTS,
    F.mse_loss: _Counts.ELEMENTS,
    F.smooth_l1_loss: _Counts.ELEMENTS,
    F.huber_loss: _Counts.ELEMENTS,
    F.binary_cross_entropy: _Counts.ELEMENTS,
    F.binary_cross_entropy_with_logits: _Counts.ELEMENTS,
    F.kl_div: _Counts.ELEMENTS,
    F.poisson_nll_loss: _Counts.ELEMENTS,
    F.soft_margin_loss: _Counts.ELEMENTS,
    F.hinge_embedding_loss: _Counts.ELEMENTS,
    F.multi_margin_loss: _Counts.SAMPLES,
    F.multilabel_margin_loss: _Counts.SAMPLES,
    F.multilabel_soft_margin_loss: _Counts.LABEL_ROWS,
}
_DEFAULT_IGNORE_INDEX = -100


def counted(loss: Loss) -> CountedLoss:
    """The loss as a sum and a count, in the way its own `reduction` means it."""
    if isinstance(loss, nn.Module):
        return _from_module(loss)
    function: Loss = loss
    keywords: dict[str, object] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        function, keywords = loss.func, loss.keywords
    counts = _FUNCTIONS.get(function)
    if counts is None or "reduce" in keywords or "size_average" in keywords:
        return _from_stranger(loss)
    summed = functools.partial(function, **{**keywords, "reduction": "sum"})
    reduction = str(keywords.get("reduction", "mean"))
    return _by_reduction(reduction, loss, _Rule(summed, counts, keywords.get))


def _from_module(loss: nn.Module) -> CountedLoss:
    # A subclass with a forward of its own may divide by anything: then it is a stranger.
    known = (
        counts
        for kind, counts in _MODULES.items()
        if isinstance(loss, kind) and type(loss).forward is kind.forward
    )
    counts = next(known, None)
    if counts is None:
        return _from_stranger(loss)
    # The copy shares parameters and buffers with the user's module; only `reduction` is its own.
    summed = copy.copy(loss)
    summed.reduction = "sum"  # type: ignore[assignment]
    setting = functools.partial(_attribute, loss)
    return _by_reduction(str(loss.reduction), loss, _Rule(summed, counts, setting))


def _attribute(loss: nn.Module, name: str) -> object:
    return getattr(loss, name, None)


def _from_stranger(loss: Loss) -> CountedLoss:
    if getattr(loss, "reduction", None) == "sum":
        return CountedLoss(loss, Scale.SUM)
    return CountedLoss(loss)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A loss in its summed form, what it divides by, and its settings by name."""

    summed: Loss
    counts: _Counts
    setting: Callable[[str], object]


def _by_reduction(reduction: str, loss: Loss, rule: _Rule) -> CountedLoss:
    match reduction:
        case "none":
            return CountedLoss(loss)
        case "sum":
            return CountedLoss(loss, Scale.SUM)
        case "mean":
            return CountedLoss(_measure(rule))
        case "batchmean":
            return CountedLoss(_measure(replace(rule, counts=_Counts.SAMPLES)))
        case _:
            raise ConfigError(
                f"loss {loss!r} has reduction={reduction!r}; expected 'mean', 'sum' or 'none'."
            )


def _measure(rule: _Rule) -> Loss:
    summed = rule.summed
    match rule.counts:
        case _Counts.TARGETS:
            setting = rule.setting
            given = setting("ignore_index")
            ignored = given if isinstance(given, int) else _DEFAULT_IGNORE_INDEX

            def measure(output: Tensor, target: Tensor) -> object:
                # The weight is looked up anew: a module's buffer may have moved to the device.
                weight = setting("weight")
                return summed(output, target), _num_targets(target, ignored, weight)

        case _Counts.ELEMENTS:

            def measure(output: Tensor, target: Tensor) -> object:
                return summed(output, target), _num_elements(output, target)

        case _Counts.SAMPLES:

            def measure(output: Tensor, target: Tensor) -> object:
                return summed(output, target), output.shape[0] if output.dim() > 1 else 1

        case _Counts.LABEL_ROWS:

            def measure(output: Tensor, target: Tensor) -> object:
                return summed(output, target), output.numel() // max(output.shape[-1], 1)

        case _:
            assert_never(rule.counts)
    return measure


def _num_targets(target: Tensor, ignored: int, weight: object) -> Tensor | int:
    if target.is_floating_point():  # class probabilities: a plain mean over positions
        return target.numel() // target.shape[1 if target.dim() > 1 else 0]
    kept = target != ignored
    if not isinstance(weight, Tensor):
        return torch.count_nonzero(kept)
    # Added in float64, so that the count does not round for many targets.
    return weight.double()[torch.where(kept, target, 0)].mul_(kept).sum()


def _num_elements(output: Tensor, target: Tensor) -> int:
    if output.shape == target.shape:
        return output.numel()
    shape: torch.Size = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
    return shape.numel()
