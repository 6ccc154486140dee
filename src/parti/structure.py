"""What a Trainer is given and what comes out: checked before a run, joined after one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parti.data.kinds import is_stream
from parti.errors import ConfigError


def check_strategy(strategy: object) -> None:
    """Refuse what cannot be bound to: a name, or a class in place of a value."""
    if isinstance(strategy, type):
        raise ConfigError(
            f"strategy is the class {strategy.__name__}; make one of it: {strategy.__name__}()."
        )
    if not callable(getattr(strategy, "bind", None)):
        raise ConfigError(
            f"strategy is {strategy!r}; expected a strategy such as parti.MirroredStrategy(): "
            "Trainer(strategy, model, optimizer, loss)."
        )


def trained_modules(model: nn.Module, loss: object) -> list[nn.Module]:
    """The modules that hold what is trained: the model, and a loss that has parameters."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"{model!r}"
        raise ConfigError(
            f"model is {what}; expected a torch.nn.Module: Trainer(strategy, model, optimizer, "
            "loss)."
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        return [model, loss]
    return [model]


def check_optimizer(optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> None:
    """Refuse an optimizer made for another model: training would change nothing."""
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer: "
            f"Trainer(strategy, model, optimizer, loss)."
        )
    known = {id(p) for module in modules for p in module.parameters()}
    steered = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in steered if id(p) not in known]
    if strange:
        raise ConfigError(
            f"{len(strange)} of the optimizer's {len(steered)} parameters are not the model's (the "
            f"first has shape {tuple(strange[0].shape)}). Make the optimizer after the model, from "
            f"model.parameters()."
        )


def check_device(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose weights lie elsewhere than where batches will be."""
    strange = [(name, p) for name, p in model.named_parameters() if p.device != device]
    if strange:
        name, parameter = strange[0]
        raise ConfigError(
            f"{len(strange)} of the model's parameters are not on {device}, where this rank "
            f"computes ({name} is on {parameter.device}). Call model.to({str(device)!r}) before "
            f"making the optimizer."
        )


def check_same_structure(train: object, validation: object) -> None:
    """Refuse, before training, a validation set that could not be evaluated after the epoch."""
    ours, theirs = _sample_kind(train), _sample_kind(validation)
    if ours is None or theirs is None or ours == theirs:
        return
    raise ConfigError(
        f"validation holds {theirs} a sample and the training data {ours}: both go through the "
        f"same model and loss. Give validation data of the same structure."
    )


def _sample_kind(data: Any) -> str | None:
    """What a sample consists of, in words; None where looking would use data up."""
    if is_stream(data):
        return None
    if isinstance(data, torch.utils.data.DataLoader):
        data = data.dataset
    if isinstance(data, (Tensor, tuple, Mapping)):
        return _kind(data)
    try:
        return _kind(data[0])
    except Exception:  # whoever reads the data says better what is wrong with it
        return None


def _kind(sample: object) -> str:
    if isinstance(sample, Mapping):
        return "the keys " + ", ".join(sorted(map(str, sample)))
    if isinstance(sample, (tuple, list)):
        return f"{len(sample)} part{'' if len(sample) == 1 else 's'}"
    return "one value"


def on_cpu(value: object) -> object:
    """The tensors of a structure, on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)


def joined(outputs: Sequence[object]) -> Any:
    """Outputs of batches, one after the other, part by part."""
    if not outputs:
        raise ConfigError("there is nothing to predict: the data set is empty.")
    if len(outputs) == 1:
        return outputs[0]
    flattened = [tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    leaves = [
        torch.cat(column) if isinstance(column[0], Tensor) else [x for part in column for x in part]
        for column in map(list, columns)
    ]
    return tree_unflatten(leaves, flattened[0][1])
