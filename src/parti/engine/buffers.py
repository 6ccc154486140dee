"""Buffers such as BatchNorm's statistics: each micro-batch starts from the step's start, and the
step ends with their mean over the micro-batches.

Sums are kept in float64: a value that no micro-batch changed comes out of the mean to the bit.
Steps in which nothing is written to a buffer cost a look at version counters, and no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from parti.engine.placement import Deal
from parti.engine.tree import Node, Share, children, combine

Vector = npt.NDArray[np.float64]


class Buffers:
    """The buffers of the bound models, and their values at the start of the step."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._slots: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for model in models:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if id(buffer) not in seen and not buffer.is_complex():
                        seen.add(id(buffer))
                        self._slots.append((module, name))
        self._tensors = [module._buffers[name] for module, name in self._slots]
        self._start: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._sums: list[Vector | None] = []
        self._leaves: list[int] = []
        self._is_mean_of_one = False

    def __len__(self) -> int:
        return len(self._slots)

    def begin(self, num_slots: int, *, is_only: bool = False) -> None:
        """Remember the values of the step's start. `is_only`: one rank computes one micro-batch, so
        that what it leaves behind is the mean already."""
        self._is_mean_of_one = is_only
        if not self._slots:
            return
        self._tensors = [module._buffers[name] for module, name in self._slots]
        if self._start:
            torch._foreach_copy_(self._start, self._live())
        else:
            self._start = [tensor.clone() for tensor in self._live()]
        self._versions = [tensor._version for tensor in self._live()]
        self._sums = [None] * num_slots
        self._leaves = [0] * num_slots

    def rewind(self) -> None:
        """Back to the step's start, if anything was written since."""
        if self._slots and self._touched():
            self._put_back()

    def leave(self, slot: int, onto: bool) -> None:
        """Take the values a micro-batch left behind into the sum of a slot."""
        if not self._slots or self._is_mean_of_one:
            return
        before = self._sums[slot] if onto else None
        held = self._leaves[slot] if onto else 0
        self._leaves[slot] = held + 1
        self._sums[slot] = None
        if self._touched() or before is not None:
            values = self._vector(self._now())
            self._sums[slot] = self._filled(before, held) + values if held else values

    def merge(self, into: int, source: int) -> None:
        if not self._slots:
            return
        left, right = self._sums[into], self._sums[source]
        if left is not None or right is not None:
            self._sums[into] = self._filled(left, self._leaves[into]) + self._filled(
                right, self._leaves[source]
            )
        self._leaves[into] += self._leaves[source]

    def _filled(self, vector: Vector | None, num_leaves: int) -> Vector:
        """A sum, or what it would be where no micro-batch wrote to a buffer."""
        if vector is not None:
            return vector
        return _repeat(self._vector(self._start), (0, num_leaves))

    def letter(self, work: Share) -> bytes:
        """What the others need to know: nothing, or one vector for each node held."""
        held = [self._sums[slot] for slot in range(len(work.nodes))] if self._slots else []
        if not any(vector is not None for vector in held):
            return b""
        start = self._vector(self._start)
        return b"".join(
            (_repeat(start, node) if vector is None else vector).tobytes()
            for node, vector in zip(work.nodes, held, strict=True)
        )

    def settle(self, letters: Sequence[bytes], deal: Deal) -> None:
        """End the step with the mean over all micro-batches."""
        if not any(letters):
            return
        start = self._vector(self._start)
        pieces: list[Node] = []
        vectors: list[Vector] = []
        for letter, held in zip(letters, deal.nodes, strict=True):
            pieces += held
            if letter:
                vectors += np.split(np.frombuffer(letter, dtype=np.float64), len(held))
            else:
                vectors += [_repeat(start, node) for node in held]
        temporaries: dict[int, Vector] = {}

        def operand(number: int) -> Vector:
            return vectors[number] if number >= 0 else temporaries[~number]

        total = vectors[0]
        for add in combine(tuple(pieces), (0, deal.num_leaves)):
            total = operand(add.left) + operand(add.right)
            if add.into is not None:
                temporaries[add.into] = total
        self._put_back()
        self._write(total / deal.num_micro_batches)

    def _live(self) -> list[torch.Tensor]:
        return [tensor for tensor in self._tensors if tensor is not None]

    def _now(self) -> list[torch.Tensor]:
        return [b for module, name in self._slots if (b := module._buffers[name]) is not None]

    def _touched(self) -> bool:
        for (module, name), tensor in zip(self._slots, self._tensors, strict=True):
            if module._buffers[name] is not tensor:
                return True
        return [tensor._version for tensor in self._live()] != self._versions

    def _put_back(self) -> None:
        for (module, name), tensor in zip(self._slots, self._tensors, strict=True):
            module._buffers[name] = tensor
        live = self._live()
        torch._foreach_copy_(live, self._start)
        self._versions = [tensor._version for tensor in live]

    @staticmethod
    def _vector(tensors: Sequence[torch.Tensor]) -> Vector:
        """All values in a row. What is of one type is put together first: on an accelerator every
        call costs more than the numbers do."""
        flats = [tensor.detach().reshape(-1) for tensor in tensors]
        vector = np.empty(sum(flat.numel() for flat in flats), dtype=np.float64)
        ends = np.cumsum([flat.numel() for flat in flats])
        for dtype in {flat.dtype for flat in flats}:
            chosen = [i for i, flat in enumerate(flats) if flat.dtype is dtype]
            held = torch.cat([flats[i] for i in chosen]).to(torch.float64).cpu().numpy()
            start = 0
            for i in chosen:
                size = flats[i].numel()
                vector[ends[i] - size : ends[i]] = held[start : start + size]
                start += size
        return vector

    def _write(self, vector: Vector) -> None:
        live = self._live()
        flat = torch.from_numpy(vector).to(live[0].device)
        rounded = flat.round()
        offset = 0
        for tensor in live:
            source = flat if tensor.is_floating_point() else rounded
            tensor.copy_(source[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _repeat(vector: Vector, node: Node) -> Vector:
    """The tree sum of a node whose leaves all hold the same vector."""
    if node[1] - node[0] == 1:
        return vector
    left, right = children(node)
    return _repeat(vector, left) + _repeat(vector, right)
