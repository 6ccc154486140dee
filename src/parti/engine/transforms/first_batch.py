"""The check that a changed model still computes what it did, on the first micro-batch it sees.

A listener on each model takes the first training call's inputs and runs the model three more times
without gradients: as it is, with only the changes that must keep every value, and as the user wrote
it. The first and the last may differ by rounding, the other two not at all. Each run gets a copy of
the inputs, random states and buffers are put back, so the call itself goes on as if nothing had
happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from parti.engine.transforms.change import Change, Effect

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest norm of a difference, relative to the norm of the output. Rounding alone gave 3e-7 (fp32,
a CNN) to 5e-6 (fp32, ResNet-18 with BatchNorm); a wrong order of elements gives about 1."""


class FirstBatchCheck:
    """Listens until each model has been called once in training."""

    def __init__(self, models: Sequence[nn.Module], changes: Sequence[Change]) -> None:
        self._models = tuple(models)
        self._changes = tuple(changes)
        self._handles: dict[int, RemovableHandle] = {}
        self.complaint: str | None = None
        """What differed, in words; None as long as nothing did."""

    @property
    def listening(self) -> bool:
        return bool(self._handles)

    def listen(self) -> None:
        for model in self._models:
            # Behind the user's own hooks, which may prepare the inputs.
            self._handles[id(model)] = model.register_forward_pre_hook(
                self._on_call, with_kwargs=True
            )

    def stop(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _on_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self._handles.pop(id(model)).remove()
        rewind = _Rewind(model)

        def forward() -> Any:
            inputs, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return model.forward(*inputs, **named)

        with torch.no_grad(), _WithoutDropout():
            complaint = self._compare(model, forward, rewind)
        rewind()
        self.complaint = self.complaint or complaint

    def _compare(
        self, model: nn.Module, forward: Callable[[], Any], rewind: Callable[[], None]
    ) -> str | None:
        """Leaves the changes on, or if something differs, off."""
        try:
            changed = _outputs(forward)
            self._off(Effect.ROUNDING)
            rewind()
            equal = _outputs(forward)
        except Exception as error:  # whatever a model may raise; unchanged it may work
            self._off(*Effect)
            return f"the model raised {type(error).__name__}: {error}"
        self._off(*Effect)
        rewind()
        original = _outputs(forward)
        complaint = _difference(changed, equal, original, _tolerance(model, original))
        if complaint is None:
            for change in self._changes:
                change.on()
        return complaint

    def _off(self, *effects: Effect) -> None:
        for change in self._changes:
            if change.effect in effects:
                change.off()


def _difference(
    changed: Sequence[torch.Tensor],
    equal: Sequence[torch.Tensor],
    original: Sequence[torch.Tensor],
    tolerance: float,
) -> str | None:
    if not _same_shapes(changed, original) or not _same_shapes(equal, original):
        return "the outputs have other shapes or types"
    if not all(_equal(a, b) for a, b in zip(equal, original, strict=True)):
        return "exchanged operations gave other values"
    worst = max((_distance(a, b) for a, b in zip(changed, original, strict=True)), default=0.0)
    if worst <= tolerance:
        return None
    return f"the outputs differ {worst / tolerance:.3g} times as much as allowed"


def _tolerance(model: nn.Module, outputs: Sequence[torch.Tensor]) -> float:
    """By the coarsest type that the model computes in, whatever it converts its outputs to."""
    kinds = {each.dtype for each in (*model.parameters(), *outputs)}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            kinds.add(torch.get_autocast_dtype(device))
    return max((TOLERANCE[kind] for kind in kinds if kind in TOLERANCE), default=1e-3)


class _Rewind:
    """Puts a model's buffers and torch's random state back to where they were."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (module._buffers, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._random = torch.get_rng_state()
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._random_cuda = torch.cuda.get_rng_state_all() if on_cuda else None

    def __call__(self) -> None:
        for buffers, name, buffer, value in self._slots:
            buffers[name] = buffer
            # Only what was written to: writing counts as a change to whoever watches the buffer.
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        torch.set_rng_state(self._random)
        if self._random_cuda is not None:
            torch.cuda.set_rng_state_all(self._random_cuda)


_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
)


class _WithoutDropout(TorchFunctionMode):
    """Which elements are dropped follows their order in memory, and would hide what is compared."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def _outputs(forward: Callable[[], Any]) -> list[torch.Tensor]:
    leaves = tree_leaves(forward())
    # What is no tree may be an object that holds tensors, such as a distribution.
    leaves += [leaf for each in leaves for leaf in tree_leaves(getattr(each, "__dict__", None))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _same_shapes(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return [(a.shape, a.dtype) for a in some] == [(b.shape, b.dtype) for b in others]


def _equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    if not some.is_floating_point():
        return torch.equal(some, other)
    return bool(((some == other) | (some.isnan() & other.isnan())).all())


def _distance(some: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm of what it should be."""
    if not some.is_floating_point():
        return 0.0 if torch.equal(some, other) else float("inf")
    finite = some.isfinite() & other.isfinite()
    if not torch.equal(some.isfinite(), other.isfinite()):
        return float("inf")
    a, b = some[finite].double(), other[finite].double()
    return float((a - b).norm()) / max(float(b.norm()), 1e-30)
