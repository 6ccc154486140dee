"""The models that are measured, with their optimizers and made-up data of the right shapes.

Owns what is computed; must not know who computes it or how it is timed. Every model is written as a
user would write it; `tuned` puts on what Parti's own tuning puts on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BATCHES = 8
"""Distinct batches that a run goes round in: enough that no step sees the last one's cache."""

NUM_SAMPLES = 16_384
"""Samples of an in-memory data set, where feeding the model is part of what is measured."""


class MnistCNN(nn.Sequential):
    """The classic tutorial's network, 28×28 images in, ten classes out."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 5 * 5, 10),
        )  # fmt: skip


class Block(nn.Module):
    """One transformer block, normalised before each half."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.norm1(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.down(F.gelu(self.up(self.norm2(hidden))))
        return hidden + widened


class CharGPT(nn.Module):
    """A character model of 4.8 million parameters: 6 layers, 256 wide, context 128."""

    def __init__(
        self, *, num_symbols: int = 96, context: int = 128, width: int = 256, depth: int = 6
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(num_symbols, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_symbols)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.symbols(text) + self.places[: text.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores


class MLP(nn.Sequential):
    """21 million parameters in three dense layers: little arithmetic, much to exchange."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        )


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet18(nn.Sequential):
    """ResNet-18 as it is used on 32×32 images: a 3×3 stem, no pooling behind it."""

    def __init__(self, num_classes: int = 10) -> None:
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
            inputs = outputs
        super().__init__(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes),
        )  # fmt: skip


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row of the tables."""

    name: str
    title: str
    batch_size: int
    """Samples a process and step."""
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, bool | None], torch.optim.Optimizer]
    """Called with the model and torch's `fused` argument."""
    make_samples: Callable[[int, torch.Generator], Batch]

    def model(self) -> nn.Module:
        """The model with the same initial weights on every process."""
        torch.manual_seed(0)
        return self.make_model()

    def samples(self, count: int, *, rank: int = 0) -> Batch:
        """Made-up samples; each rank draws its own."""
        return self.make_samples(count, torch.Generator().manual_seed(1000 + rank))

    def batches(self, *, batch_size: int, rank: int = 0) -> list[Batch]:
        """`NUM_BATCHES` batches, made once."""
        inputs, targets = self.samples(NUM_BATCHES * batch_size, rank=rank)
        return list(
            zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True)
        )


def tuned(model: nn.Module) -> nn.Module:
    """The model with the layout, the order of operations and the products that Parti gives it."""
    from parti.engine.transforms.channels_last import lay_out_channels_last
    from parti.engine.transforms.fp32_products import route_products
    from parti.engine.transforms.order import reorder_calls

    reordered = reorder_calls([model])
    changes = [reordered.change, route_products([model])]
    if reordered.views_are_safe:
        changes.append(lay_out_channels_last([model]))
    for change in changes:
        if change is not None:
            change.on()
    return model


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, over tokens too."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _images(shape: tuple[int, int, int]) -> Callable[[int, torch.Generator], Batch]:
    def make(count: int, generator: torch.Generator) -> Batch:
        images = torch.randn(count, *shape, generator=generator)
        return images, torch.randint(10, (count,), generator=generator)

    return make


def _vectors(count: int, generator: torch.Generator) -> Batch:
    vectors = torch.randn(count, 1024, generator=generator)
    return vectors, torch.randint(10, (count,), generator=generator)


def _text(count: int, generator: torch.Generator) -> Batch:
    text = torch.randint(96, (count, 129), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _adam(model: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)


def _adamw(model: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)


def _sgd(model: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=fused
    )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="mnist_cnn", title="MNIST CNN", batch_size=64,
            make_model=MnistCNN,
            make_optimizer=_adam, make_samples=_images((1, 28, 28)),
        ),
        Workload(
            name="gpt", title="GPT, 4.8 M", batch_size=8,
            make_model=CharGPT,
            make_optimizer=_adamw, make_samples=_text,
        ),
        Workload(
            name="mlp", title="MLP, 21 M", batch_size=64,
            make_model=MLP,
            make_optimizer=_adamw, make_samples=_vectors,
        ),
        Workload(
            name="resnet18", title="ResNet-18, 32×32", batch_size=16,
            make_model=ResNet18,
            make_optimizer=_sgd, make_samples=_images((3, 32, 32)),
        ),
    )
}  # fmt: skip


TINY = Workload(
    name="tiny", title="tiny", batch_size=8,
    make_model=lambda: nn.Linear(8, 8),
    make_optimizer=_adam,
    make_samples=lambda count, generator: (
        torch.randn(count, 8, generator=generator),
        torch.randint(8, (count,), generator=generator),
    ),
)  # fmt: skip
"""Nearly no arithmetic: what a step takes is what the library takes. In no table of models."""


def workload(name: str) -> Workload:
    """The model of that name."""
    return TINY if name == TINY.name else WORKLOADS[name]


def num_parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
