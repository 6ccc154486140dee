"""A training state as a plain structure that refers to tensors by name, and back.

Names are the dotted way to a tensor, such as `model.conv1.weight` or `optimizer.state.0.exp_avg`.
A tensor that appears under several names (tied weights) is held once and comes back as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parti.checkpoint import plain
from parti.checkpoint.plain import LEFT_OUT, Json, Where
from parti.errors import CheckpointError

_RESERVED = "__metadata__"
"""safetensors has this key in its header for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A state taken apart. The structure shares no mutable value with it; the tensors are its own.

    `ties`: every further name of a tensor, with the name that it is held under.
    """

    structure: Json
    tensors: Mapping[str, Tensor]
    ties: Mapping[str, str]


def split(tree: object) -> Split:
    """Take a state apart; refuses what cannot be stored, naming it."""
    found = _Found()
    structure = plain.encode(tree, found.form)
    return Split(structure=structure, tensors=found.tensors, ties=found.ties)


def join(structure: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The state again. Entries of dictionaries whose tensor is not given are left out."""
    value = plain.decode(structure, lambda tag, content: _value(tag, content, tensors))
    return None if value is LEFT_OUT else value


class _Found:
    """The tensors met on the way through a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ties: dict[str, str] = {}
        self._places: dict[object, str] = {}

    def form(self, value: object, where: Where) -> Json:
        """For `plain.encode`: the forms of torch's own values."""
        if isinstance(value, Tensor):
            return {"$tensor": self._put(value, where)}
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        return plain.refuse(value, where)

    def _put(self, tensor: Tensor, where: Where) -> str:
        _check(tensor, where)
        name = self._free_name(where)
        place = (
            tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(),
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        held = self._places.get(place)
        if held is not None and tensor.numel():
            self.ties[name] = held
            return held
        self._places[place] = name
        self.tensors[name] = tensor.detach()
        return name

    def _free_name(self, where: Where) -> str:
        name = ".".join(map(str, where)) or "tensor"
        name = name.encode("utf-8", "backslashreplace").decode()
        number, free = 1, name
        while free in self.tensors or free in self.ties or free == _RESERVED:
            number += 1
            free = f"{name}#{number}"
        return free


def _check(tensor: Tensor, where: Where) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        plain.refuse(tensor, where)
    problem = (
        f"of layout {tensor.layout}" if tensor.layout != torch.strided
        else "quantized" if tensor.is_quantized
        else "nested" if tensor.is_nested
        else "on the meta device and has no values" if tensor.is_meta
        else None
    )  # fmt: skip
    if problem is not None:
        raise CheckpointError(
            f"{plain.show(where)} is a tensor {problem}; a checkpoint holds dense tensors. Store "
            f"what it is made of."
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this version of torch ({torch.__version__}) has no dtype {name!r}.")
    return dtype


def _value(tag: str, content: Json, tensors: Mapping[str, Tensor]) -> object:
    match tag:
        case "$tensor":
            return tensors.get(content, LEFT_OUT)
        case "$dtype":
            return dtype_of(content)
        case "$device":
            return torch.device(content)
        case "$size":
            return torch.Size(content)
    return plain.refuse_form(tag, content)
