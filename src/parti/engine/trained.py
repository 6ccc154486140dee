"""One bound optimizer with its parameters: their layout, their gradients, their update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from parti.comm.world import World
from parti.engine.across import AcrossGradients
from parti.engine.gradients import Gradients, HeldGradients, Made, SharedGradients
from parti.engine.layout import Layout, difference, lay_out
from parti.engine.update import ELEMENTWISE, DividedUpdate, Update, WholeUpdate
from parti.errors import ConfigError, RankMismatch


class Trained:
    """What one optimizer trains. Built anew when the user freezes or thaws parameters."""

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module], world: World) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times in one step, which cannot be dealt to "
                "micro-batches. Use Adam, AdamW or SGD."
            )
        self.optimizer = optimizer
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._all = everything
        self._flags = [p.requires_grad for p in everything]
        trainable = [p for p in everything if p.requires_grad]
        named = [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(trainable)]
        self.layout: Layout = lay_out(named)
        self.parameters = trainable[::-1]
        _compare(self.layout, world)
        self.gradients = _gradients(self.layout, self.parameters, world)
        self.update: Update
        if type(optimizer) in ELEMENTWISE:
            self.update = DividedUpdate(
                optimizer,
                self.parameters,
                self.layout,
                self.gradients,
                world.neighbours,
                journaled=world.succession.recovers,
            )
        else:
            self.update = WholeUpdate(optimizer, self.parameters, self.gradients)
        self._wants_all_sums = self.update.wants_all_sums

    def is_current(self) -> bool:
        """Whether the same parameters are trainable, and are to be updated in the same way, as when
        this was built."""
        return (
            self.update.wants_all_sums == self._wants_all_sums
            and [p.requires_grad for p in self._all] == self._flags
        )

    def release(self) -> None:
        """Give the optimizer its whole state back, before this is built anew."""
        self.gradients.release()
        self.update.release()

    def collect(self) -> Made:
        """Take the gradients that backward left; the parameters are left without."""
        made: list[torch.Tensor | None] = []
        for parameter in self.parameters:
            gradient = parameter.grad
            made.append(
                gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            )
            parameter.grad = None
        return made

    def drop(self) -> None:
        """Forget gradients that somebody else's backward left here."""
        for parameter in self._all:
            parameter.grad = None


def _gradients(layout: Layout, parameters: Sequence[torch.Tensor], world: World) -> Gradients:
    if world.across is not None:
        return AcrossGradients(layout, parameters, world.neighbours, world.across, world.patience_s)
    if world.size == 1:
        device = parameters[0].device if parameters else torch.device("cpu")
        return HeldGradients(layout, device)
    return SharedGradients(layout, parameters, world.neighbours)


def _compare(layout: Layout, world: World) -> None:
    """All ranks must train the same parameters: the first difference is named, with its ranks."""
    prints = world.exchange(layout.fingerprint())
    if len(set(prints)) == 1:
        return
    texts = [
        text.decode().split("\n")
        for text in world.exchange("\n".join(map(str, layout.entries)).encode())
    ]
    odd = next(rank for rank, text in enumerate(texts) if prints[rank] != prints[0])
    where = difference(texts[0][::-1], texts[odd][::-1])
    raise RankMismatch(
        f"ranks 0 and {odd} train different parameters; the first difference, rank 0 'here', rank "
        f"{odd} 'there': {where}. Build the same model on every process: nothing in the model may "
        "depend on the rank, and random choices belong inside `strategy.scope()`."
    )
