"""What makes one process faster, in which order, and how much of it a user wants.

`Tuning` is part of a strategy's value. `apply` puts everything on when a strategy binds, and
returns an `Applied`, which has a line on each for the run's header, checks the outcome on the first
micro-batch, and takes it all off again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from parti.engine.allocator import keep_freed_blocks
from parti.engine.transforms.change import Change
from parti.engine.transforms.channels_last import lay_out_channels_last
from parti.engine.transforms.compiled import compile_models
from parti.engine.transforms.first_batch import FirstBatchCheck
from parti.engine.transforms.fp32_products import route_products
from parti.engine.transforms.fused_optimizer import FusedOptimizers, fuse_optimizers
from parti.engine.transforms.order import reorder_calls

_Result = TypeVar("_Result")
_FINE, _WRONG, _NOT_SEEN = b"\0", b"\1", b"\2"
_STEPS_TO_WAIT = 8
"""After that many steps a model that was never called in training is left unchecked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is done to make one process faster. Each part can be turned off."""

    fused_optimizer: bool = True
    """Switch SGD, Adam, AdamW and Adagrad to torch's fused form."""
    allocator: bool = True
    """Keep large freed blocks in the process instead of returning them at every step."""
    layout: bool = True
    """Images in channels-last order, and ReLU behind max-pooling."""
    fast_matmul: bool = True
    """fp32 products of large layers by the faster of two libraries."""

    @classmethod
    def none(cls) -> Tuning:
        """Everything off: torch as it is."""
        return cls(**{each.name: False for each in fields(cls)})


@dataclass(slots=True)
class Applied:
    """What was done to the models and optimizers of one bind."""

    notes: tuple[str, ...]
    """A few words on each part, for the run's header."""
    changes: tuple[Change, ...] = ()
    fused: FusedOptimizers | None = None
    check: FirstBatchCheck | None = field(default=None, repr=False)
    complaint: str | None = None
    """Why the changes to the models were taken off again, if they were."""
    _steps_waited: int = 0

    def checked(
        self,
        compute: Callable[[], _Result],
        *,
        decides: bool,
        exchange: Callable[[bytes], Sequence[bytes]],
        rewind: Callable[[], None],
    ) -> _Result:
        """Compute a step's gradients; in the first steps, find out whether they can be trusted.

        One rank decides for all: the one that computes micro-batch 0, so that the decision is the
        same for any number of ranks. If it says no, every rank takes its changes off, puts the
        buffers back (`rewind`) and computes again. So they do if any rank's step raises, perhaps in
        code around the models; an error of the user's comes again without the changes. `exchange`
        gives everyone's bytes to everyone.
        """
        check = self.check
        if check is None:
            return compute()
        if decides and not check.listening:
            check.listen()
        failed = False
        try:
            result = compute()
        except Exception as error:
            failed = True
            check.complaint = check.complaint or f"the step raised {type(error).__name__}: {error}"
        verdict = _WRONG if check.complaint else _NOT_SEEN if check.listening else _FINE
        mine = _pack(decides or failed, verdict, check.complaint)
        said = sorted(filter(None, exchange(mine)), key=lambda each: each[:1] != _WRONG)
        verdict, complaint = (said[0][:1], said[0][1:].decode()) if said else (_NOT_SEEN, "")
        self._steps_waited += 1
        if verdict != _NOT_SEEN or self._steps_waited == _STEPS_TO_WAIT:
            check.stop()
            self.check = None
        if verdict == _WRONG:
            self._take_off(complaint)
            rewind()
            return compute()
        return result

    def _take_off(self, complaint: str) -> None:
        self.complaint = complaint
        for change in self.changes:
            change.off()
        undone = {change.note for change in self.changes}
        self.notes = (
            *(note for note in self.notes if note not in undone),
            f"layout and products left as they were: {complaint}",
        )
        self.changes = ()

    def standing(self) -> tuple[bool, int, str | None]:
        """How far the check is, for a rank that comes later."""
        return self.check is None, self._steps_waited, self.complaint

    def adopt(self, standing: tuple[bool, int, str | None]) -> None:
        """Be where the other ranks are."""
        is_checked, self._steps_waited, complaint = standing
        if complaint is not None:
            self._take_off(complaint)
        if is_checked and self.check is not None:
            self.check.stop()
            self.check = None

    def undo(self) -> None:
        """Leave models and optimizers as they came. The allocator stays as it is."""
        if self.check is not None:
            self.check.stop()
            self.check = None
        for change in self.changes:
            change.off()
        if self.fused is not None:
            self.fused.off()
        self.changes, self.fused, self.notes = (), None, ()


def apply(
    tuning: Tuning,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    device: torch.device,
    precision: str = "fp32",
    compile: bool = False,
) -> Applied:
    """Put on what the tuning asks for, as far as it applies here.

    Decides by the models, the optimizers and the kind of processor only, never by measuring, so
    that all ranks of a job do the same.
    """
    notes = []
    if tuning.allocator and device.type == "cpu" and keep_freed_blocks():
        # First: from here on every large block that is freed can be used again.
        notes.append("allocator keeps freed blocks")
    fused = fuse_optimizers(optimizers, models) if tuning.fused_optimizer else None
    if fused is not None:
        # Before anything looks at the optimizer to learn what state it keeps.
        notes.append(fused.note)
    changes: tuple[Change, ...] = ()
    if device.type == "cpu" and not compile:
        # A compiler chooses layouts and orders itself, and would stumble over ours.
        changes = change_models(tuning, models, precision)
    notes += [change.note for change in changes if change.note]
    if compile:
        # Last: what is compiled is the model as it stands.
        notes.append(compile_models(models, device))
    check = FirstBatchCheck(models, changes) if changes else None
    return Applied(tuple(notes), changes, fused, check)


def change_models(
    tuning: Tuning, models: Sequence[nn.Module], precision: str = "fp32"
) -> tuple[Change, ...]:
    """Put on what changes how the models compute; the caller keeps what takes it off."""
    changes: list[Change] = []
    if tuning.layout:
        # Calls before layout: reading them tells whether a model minds the order of its images.
        images = lay_out_channels_last(models)
        reordered = reorder_calls(models, images=images is not None)
        if images is not None and not reordered.views_are_safe:
            images = None
            reordered = reorder_calls(models, images=False)
        changes += [change for change in (reordered.change, images) if change is not None]
    if tuning.fast_matmul and precision == "fp32":
        # Touches no module that the layout touches, so it may stand anywhere.
        products = route_products(models)
        if products is not None:
            changes.append(products)
    for change in changes:
        change.on()
    return tuple(changes)


def _pack(speaks: bool, verdict: bytes, complaint: str | None) -> bytes:
    return verdict + (complaint or "").encode() if speaks else b""
