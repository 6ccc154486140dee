"""Files of weights and of whole training states: written by rank 0 alone, read by every rank.

A file is written beside its name, brought to the disk, and renamed: whoever looks sees the old
file or the new one, never a part. If writing fails on rank 0, or reading on any rank, all ranks
raise the same error.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from parti.errors import CheckpointError, ConfigError

STATE_FORMAT = "parti.trainer/1"
WEIGHTS_SUFFIX = ".safetensors"
STATE_SUFFIXES = (".pt", ".pth")

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.device)
_FAILED = b"failed: "


class Ranks(Protocol):
    """The part of a Replica that agreeing on a file needs."""

    @property
    def rank(self) -> int: ...

    def exchange(self, payload: bytes) -> tuple[bytes, ...]: ...

    def attempt(self, unit: Callable[[], T]) -> T: ...


def is_weights(path: Path) -> bool:
    """Whether the name says weights alone (True) or a whole training state (False)."""
    if path.suffix == WEIGHTS_SUFFIX:
        return True
    if path.suffix in STATE_SUFFIXES:
        return False
    raise ConfigError(
        f"{path.name!r} does not say what it holds; expected a name that ends in "
        f"{WEIGHTS_SUFFIX} (the model's weights) or {STATE_SUFFIXES[0]} (everything needed to "
        f"train on)."
    )


def write_once(ranks: Ranks, path: Path, write: Callable[[Path], None]) -> None:
    """Let rank 0 write the file; every rank returns when it is there, or raises. If rank 0 is lost
    meanwhile, the next one writes it."""
    problem, told = ranks.attempt(lambda: _try_to_write(ranks, path, write))
    if told:
        raise CheckpointError(f"rank 0 could not write {path}: {told.decode()}") from problem


def _try_to_write(
    ranks: Ranks, path: Path, write: Callable[[Path], None]
) -> tuple[Exception | None, bytes]:
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            _write_atomically(path, write)
        except Exception as error:
            problem = error
    return problem, ranks.exchange(b"" if problem is None else _reason(problem).encode())[0]


def read_everywhere(ranks: Ranks, path: Path, read: Callable[[Path], T]) -> T:
    """Let every rank read the file, and make sure that it was the same one."""
    problem: Exception | None = None
    try:
        with path.open("rb") as file:
            told = hashlib.file_digest(file, "sha256").digest()
        found = read(path)
    except Exception as error:
        problem = error
        told = _FAILED + _reason(error).encode()
    everyones = ranks.exchange(told)
    for rank, answer in enumerate(everyones):
        if answer.startswith(_FAILED):
            reason = answer.removeprefix(_FAILED).decode()
            raise CheckpointError(f"rank {rank} could not read {path}: {reason}") from problem
        if answer != everyones[0]:
            raise CheckpointError(
                f"ranks 0 and {rank} read different files at {path}; put it where every host sees "
                f"the same one."
            )
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch reports a failed write as an error of its own
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}."
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        _bring_to_disk(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _bring_to_disk(path.parent)


def _bring_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_weights(path: Path, model: nn.Module) -> None:
    """The model's state as safetensors; of tied weights one copy, the other names as metadata."""
    from safetensors.torch import save_file

    state = model.state_dict()
    ties = _ties(state)
    tensors = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state is a {type(value).__name__}, and safetensors holds "
                f"tensors only. Save to a name that ends in {STATE_SUFFIXES[0]}."
            )
        if name not in ties:
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    save_file(tensors, path, {"format": "pt", **ties})


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, under all the names they had."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"it is damaged or no safetensors file ({error}). Expected a file that trainer.save "
            "wrote."
        ) from error
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    for name, kept in metadata.items():
        if name not in tensors and kept in tensors:
            tensors[name] = tensors[kept]
    return tensors


def load_into(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy saved values into the model's own tensors; names and shapes must agree."""
    state = dict(tensors)
    for name, kept in _ties(model.state_dict()).items():  # files of others name one of them
        if name not in state and kept in state:
            state[name] = state[kept]
        elif kept not in state and name in state:
            state[kept] = state[name]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"the saved weights do not fit this model: {error}") from error


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """For each name that is another name for a tensor before it: that name."""
    first: dict[object, str] = {}
    ties = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.numel():
            continue
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place in first:
            ties[name] = first[place]
        else:
            first[place] = name
    return ties


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """A training state, in a form that loads without running any code."""
    for key, value in state.items():
        _check_plain(value, key)
    # A file of Python's: torch's own says of a full disk "unexpected pos 64 vs 0".
    with path.open("wb") as file:
        torch.save({"format": STATE_FORMAT, **state}, file)


def read_state(path: Path) -> dict[str, Any]:
    """A training state; or, where the file holds nothing but tensors by name, a model's."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"it is not a file of tensors and plain values, which is all that is loaded: "
            f"{_first_sentence(error)} Expected a file that trainer.save wrote."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"it is damaged or no file of torch.save ({type(error).__name__}: "
            f"{_first_sentence(error)[:-1]}). Expected a file that trainer.save wrote."
        ) from error
    if isinstance(state, dict) and state.get("format") == STATE_FORMAT:
        return state
    if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()):
        return {"model": state}
    raise CheckpointError(
        f"it holds a {type(state).__name__} that is neither a training state of this version "
        f"({STATE_FORMAT}) nor a model's state_dict."
    )


def _first_sentence(error: Exception) -> str:
    """What torch says, without the advice that follows."""
    return str(error).split("\n")[0].split(". ")[0].removesuffix(".") + "."


def _check_plain(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(key, where)
            _check_plain(inner, f"{where}.{key}")
    elif type(value) in (list, tuple, torch.Size):
        for i, inner in enumerate(value):  # type: ignore[arg-type]
            _check_plain(inner, f"{where}[{i}]")
    elif not isinstance(value, _PLAIN) or type(value).__module__.startswith("numpy"):
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a training state "
            f"holds numbers, texts, tensors, lists and dictionaries, so that loading it runs no "
            f"code."
        )
