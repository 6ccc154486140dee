"""`torch.compile` for the bound models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parti.errors import ConfigError


def compile_models(models: Sequence[nn.Module], device: torch.device) -> str:
    """Compile each model's forward in place, at its first call; returns a note for the header."""
    if device.type == "cpu":
        _require_compiler()
    for model in models:
        model.compile()
    return f"torch.compile ({len(models)} model{'s' * (len(models) != 1)})"


def _require_compiler() -> None:
    """Find out now, on every rank, rather than in the first step."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=True needs a C++ compiler on CPU and found none. Install g++, or leave "
            "compile out: on CPU it makes small models slower."
        ) from error
