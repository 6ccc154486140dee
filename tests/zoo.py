"""Models that are hard to keep exact, and the plain training loop they are put through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from parti.comm.world import World
from parti.engine.replica import Replica
from parti.engine.report import StepReport
from parti.testing import fingerprint

NUM_WORDS = 20


class Zoo(nn.Module):
    """Dropout, BatchNorm, an embedding tied to the output, a frozen parameter, a parameter that is
    never used, and a layer that is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 16)
        self.convolution = nn.Conv1d(16, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(8 * 4, 16)
        self.hidden.bias.requires_grad_(False)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(3, 3)
        self.output = nn.Linear(16, NUM_WORDS)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor, step: int) -> Tensor:
        x = self.embedding(words).transpose(1, 2)
        x = F.relu(self.norm(self.convolution(x)))
        x = F.relu(self.hidden(self.dropout(x).flatten(1)))
        if step % 2:
            x = self.sometimes(x)
        return self.output(x)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-4),
    "plain sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),  # not element by element
}

_generator = torch.Generator().manual_seed(1)
WORDS = torch.randint(0, NUM_WORDS, (77, 6), generator=_generator)
NEXT = torch.randint(0, NUM_WORDS, (77,), generator=_generator)


@dataclass(frozen=True, slots=True)
class Outcome:
    fingerprint: str
    losses: tuple[float, ...]
    norms: tuple[float | None, ...]


def make(optimizer: str, dtype: torch.dtype = torch.float32) -> tuple[Zoo, Optimizer]:
    torch.manual_seed(0)
    model = Zoo().to(dtype)
    return model, OPTIMIZERS[optimizer](model.parameters())


def bind(world: World, *objects: nn.Module | Optimizer, exact: bool = True) -> Replica:
    return Replica(
        strategy=None,
        world=world,
        device=torch.device("cpu"),
        models=[each for each in objects if isinstance(each, nn.Module)],
        optimizers=[each for each in objects if isinstance(each, Optimizer)],
        seed=3,
        exact=exact,
        precision=nullcontext,
    )


def train(
    replica: Replica,
    model: Zoo,
    optimizer: Optimizer,
    micro_batches: int,
    clip_norm: float | None = None,
) -> Outcome:
    """Two epochs of 77 samples in batches of 16: the last batch of each holds 13."""
    torch.set_num_threads(1)
    reports: list[StepReport] = []
    for batch in replica.batches(
        (WORDS, NEXT), batch_size=16, micro_batches=micro_batches, epochs=2
    ):
        step = replica.step_number
        reports.append(
            replica.step(
                lambda words, following, step=step: F.cross_entropy(model(words, step), following),
                batch,
                clip_norm=clip_norm,
            )
        )
    return Outcome(
        fingerprint(model, optimizer),
        tuple(report.loss for report in reports),
        tuple(report.grad_norm for report in reports),
    )
