"""From a batch to its loss: what the Trainer hands to the step. Knows nothing of ranks.

Batches are tuples whose last part is the target, unless the user gives a forward function of their
own or a model that returns its loss (`.loss` or `["loss"]`, as Hugging Face models do).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parti.engine.forward import Forward
from parti.errors import ConfigError
from parti.losses import Loss, Scale, counted

ForwardFunction: TypeAlias = Callable[[nn.Module, Any], object]
"""forward(model, batch) -> loss, (sum, count), something with `.loss`, or parti.Forward."""


class Objective:
    """A loss as a function of a micro-batch; with (output, target) beside it where wanted."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        forward: ForwardFunction | None,
        wants_outputs: bool,
    ) -> None:
        if loss is not None and forward is not None:
            raise ConfigError(
                "both loss= and forward= are given, and forward computes the loss itself; "
                "give one of them."
            )
        self._model = model
        self._forward = forward
        self._wants_outputs = wants_outputs
        _check_callable(loss, "loss", "nn.CrossEntropyLoss()")
        _check_callable(forward, "forward", "lambda model, batch: loss(model(batch[0]), batch[1])")
        counted_loss = None if loss is None else counted(loss)
        self._measure = None if counted_loss is None else counted_loss.measure
        self._is_sum = counted_loss is not None and counted_loss.scale is Scale.SUM
        self._share = 1.0

    def begin(self, num_micro_batches: int) -> None:
        """A global batch begins, cut into so many micro-batches."""
        # Each counts an equal share of one, so sums are added up and divided by one.
        self._share = 1.0 / num_micro_batches

    def __call__(self, *parts: Any, **named: Any) -> object:
        if self._measure is not None:
            return self._from_loss(parts, named)
        if self._forward is not None:
            batch = named or (parts if len(parts) != 1 else parts[0])
            return self._with_outputs(self._forward(self._model, batch), named)
        return self._from_model(parts, named)

    def _from_loss(self, parts: Sequence[Any], named: Mapping[str, Any]) -> object:
        assert self._measure is not None
        if named or len(parts) < 2:
            raise ConfigError(
                f"a loss needs an output and a target, and batches hold {_describe(parts, named)}. "
                f"Yield (input, target), or give the Trainer forward=lambda model, batch: "
                f"loss(model(...), ...) in place of loss=."
            )
        *inputs, target = parts
        try:
            output = self._model(*inputs)
        except Exception as error:
            _explain(error, self._model, inputs, {}, " and the target, which goes to the loss")
            raise
        try:
            value = self._measure(output, target)
        except Exception as error:
            error.add_note(
                f"loss= was called with the model's output, {_kind(output)}, and the target, "
                f"{_kind(target)}. Give data whose targets fit the loss, or the Trainer "
                f"forward=lambda model, batch: loss(...) if they are to be brought together "
                f"differently."
            )
            raise
        if self._is_sum:
            value = (value, self._share)
        if not self._wants_outputs:
            return value
        return Forward(value, (_detached(output), target))

    def _from_model(self, parts: Sequence[Any], named: Mapping[str, Any]) -> object:
        try:
            result = self._model(*parts, **named)
        except Exception as error:
            _explain(
                error, self._model, parts, named, "; without loss= all of it goes to the model"
            )
            raise
        loss = loss_of(result)
        if loss is None or (loss is result and isinstance(result, Tensor) and result.dim() > 0):
            raise ConfigError(
                f"there is no loss to minimise: the model returned {_kind(result)}"
                f"{' whose loss is None' if _has_loss(result) else ''} for a batch of "
                f"{_describe(parts, named)}. Give the Trainer loss= or forward=, or batches from "
                f"which the model computes its `.loss` (Hugging Face models need 'labels')."
            )
        return self._with_outputs(result, named)

    def _with_outputs(self, result: object, named: Mapping[str, Any]) -> object:
        """Find the (output, target) that metrics need in what a model with a loss gives."""
        if not self._wants_outputs:
            return result
        if isinstance(result, Forward):
            if isinstance(result.aux, (tuple, list)) and len(result.aux) == 2:
                return Forward(result.loss, _detached(tuple(result.aux)))
        else:
            output = getattr(result, "logits", None)
            if output is not None and "labels" in named:
                return Forward(loss_of(result), (output.detach(), named["labels"]))
        raise ConfigError(
            f"metrics need an output and a target, and the forward function returned "
            f"{_kind(result)}. Return parti.Forward(loss, aux=(output, target)), or leave out "
            f"metrics=."
        )


def _check_callable(given: object, name: str, example: str) -> None:
    if given is None or (callable(given) and not isinstance(given, type)):
        return
    what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
    raise ConfigError(f"{name} is {what}; expected a function or a module, such as {example}.")


def loss_of(result: object) -> object:
    """The loss in what a model returned; None if there is none."""
    if isinstance(result, Forward | Tensor):
        return result
    if isinstance(result, Mapping):
        return result.get("loss")
    if isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "loss"):
        return result
    return getattr(result, "loss", None)


def _has_loss(result: object) -> bool:
    return hasattr(result, "loss") or (isinstance(result, Mapping) and "loss" in result)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map_only(Tensor, Tensor.detach, value)


def _explain(
    error: Exception,
    model: nn.Module,
    parts: Sequence[Any],
    named: Mapping[str, Any],
    rest: str,
) -> None:
    """Say what the model was called with, and where that did not fit its signature."""
    try:
        inspect.signature(model.forward).bind(*parts, **named)
        error.add_note(f"{type(model).__name__} was called with {_describe(parts, named)}.")
    except TypeError:
        error.add_note(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} was called with "
            f"{_describe(parts, named)}: batches hold that{rest}. Give the Trainer "
            f"forward=lambda model, batch: ... if the batch is to be taken apart differently."
        )


def _describe(parts: Sequence[Any], named: Mapping[str, Any]) -> str:
    if named:
        return "the keys " + ", ".join(named)
    kinds = ", ".join(_kind(part) for part in parts)
    return f"{len(parts)} part{'' if len(parts) == 1 else 's'} ({kinds})"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)} and type {dtype}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_kind, value))})"
    return f"a {type(value).__name__}"


class Prediction:
    """The model's output for a micro-batch, without the target if the batch has one."""

    def __init__(self, model: nn.Module, forward: ForwardFunction | None) -> None:
        self._model = model
        self._forward = forward
        self._needed = _num_needed(model)

    def __call__(self, *parts: Any, **named: Any) -> object:
        if self._forward is not None:
            batch = named or (parts if len(parts) != 1 else parts[0])
            return self._forward(self._model, batch)
        # Samples look as they do in fit: the last part is the target, unless the model needs it.
        if len(parts) > 1 and len(parts) > self._needed:
            parts = parts[:-1]
        return _without_loss(self._model(*parts, **named))


def _num_needed(model: nn.Module) -> int:
    """How many inputs the model cannot do without."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _without_loss(output: object) -> object:
    """Of an output that is more than one tensor, what has a row for each sample."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, Mapping):
        return {
            name: value
            for name, value in output.items()
            if not (isinstance(value, Tensor) and value.dim() == 0)
        }
    return output
