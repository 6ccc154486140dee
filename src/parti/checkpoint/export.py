"""A checkpoint as one file for others: a branch of it as safetensors, or all as torch.save's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parti.checkpoint.disk import RealDisk, explain, sync_directory
from parti.checkpoint.read import load
from parti.errors import CheckpointError, ConfigError

_MODEL = "model"
_WEIGHTS = ".safetensors"
_PICKLED = (".pt", ".pth")


def check_target(target: Path) -> None:
    """Before anything is read: a name that says what to write, in a directory that is there."""
    if target.suffix not in (_WEIGHTS, *_PICKLED):
        raise ConfigError(
            f"{target.name!r} does not say what to write; expected a name that ends in {_WEIGHTS} "
            f"(weights) or {_PICKLED[0]} (the whole state)."
        )
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory; make it, or choose another.")


def export(path: Path, target: Path, only: str | None) -> None:
    """Write one file.

    As safetensors: a branch of the state, the model if none is named, each tensor under its name in
    that branch. As `.pt`: the whole state, or the branch.
    """
    check_target(target)
    if target.suffix == _WEIGHTS:
        branch = only or _MODEL
        # Tied weights are written under each of their names: `load_state_dict` expects them all.
        tensors = {name: value.clone() for name, value in _named(_take(path, branch), branch)}
        _write(target, lambda file: _save_weights(tensors, file))
    else:
        state = load(path) if only is None else _take(path, only)
        _write(target, lambda file: torch.save(state, file))


def _take(path: Path, branch: str) -> Any:
    """One branch of the state; only its tensors are read."""
    state = load(path, names=lambda name: name.startswith(f"{branch}.") or name == branch)
    if not isinstance(state, dict) or branch not in state:
        branches = ", ".join(map(repr, state)) if isinstance(state, dict) else "none"
        raise ConfigError(f"{path} has no branch {branch!r}; it has {branches}.")
    return state[branch]


def _named(value: object, branch: str, where: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a branch under their dotted names in it."""
    if isinstance(value, Tensor):
        yield ".".join(where) or branch, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _named(inner, branch, (*where, str(key)))
    else:
        raise CheckpointError(
            f"{'.'.join((branch, *where))} is a {type(value).__name__}, and safetensors holds "
            f"tensors only. Export to a name that ends in {_PICKLED[0]}."
        )


def _save_weights(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """Beside its name, to the disk, and renamed: never half a file."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(target)
        sync_directory(RealDisk(), target.parent)
    except OSError as error:
        words = explain(error, target.parent, f"writing {target.name}")
        raise CheckpointError(words) from error
    finally:
        beside.unlink(missing_ok=True)
