"""Strategies are values: what they refuse, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import parti
from parti.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tuning": "none"}, r"tuning='none'; expected parti\.Tuning\(\.\.\.\), or"),
        ({"compile": "yes"}, "compile='yes'; expected True or False"),
        ({"exact": 0}, "exact=0; expected True or False"),
        ({"precision": "fp16"}, 'precision="fp16" is refused.*Use precision="bf16"'),
        ({"precision": "float7"}, "'float7' is not known; expected one of 'fp32', 'bf16'"),
        ({"seed": "a"}, "seed='a' is not a whole number"),
        ({"patience_s": 0}, "patience_s=0; expected a time above 0"),
        ({"threads": 0}, "threads=0; expected at least 1, or None"),
        ({"devices": 0}, "devices=0; expected at least 1"),
        ({"devices": "cuda:0"}, r'sequence of names such as \("cuda:0", "cuda:1"\)'),
        ({"devices": ["cpu", "cpu"]}, "expected distinct names"),
    ],
)
def test_a_strategy_refuses_what_it_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parti.MirroredStrategy(**arguments)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu:0", "device 'gpu:0' is not known: .*such as 'cpu' or 'cuda:0'"),
        ("cuda:99", r"device 'cuda:99' is not there: torch .* sees \d+ GPUs on this host"),
    ],
)
def test_a_device_that_is_not_there_is_named(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parti.OneDeviceStrategy(device=device).bind(nn.Linear(1, 1))


def test_bind_refuses_an_optimizer_of_another_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    strategy = parti.OneDeviceStrategy()
    with pytest.raises(ConfigError, match="SGD whose 2 parameters all belong to other models"):
        strategy.bind(model, torch.optim.SGD(other.parameters(), 0.1))


@pytest.mark.parametrize("given", [(), (nn.Linear,), (None,), (lambda x: x,)])
def test_bind_refuses_what_is_no_model(given: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"bind\(\) got .*; expected .*optimizer"):
        parti.OneDeviceStrategy().bind(*given)


def test_a_misspelt_name_of_the_package_is_guessed() -> None:
    with pytest.raises(AttributeError, match="'MirorredStrategy'; did you mean 'MirroredStrategy'"):
        _ = parti.MirorredStrategy  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'xyzzy'; it has Accuracy, "):
        _ = parti.xyzzy  # type: ignore[attr-defined]
