"""Train digits on one process and on every core of this machine: the same bits, sooner."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import nn

import parti
from parti.testing import fingerprint

EPOCHS = 12
BATCH_SIZE = 64


@dataclass(frozen=True)
class Result:
    accuracy: float
    samples_per_s: float
    fingerprint: str


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(96 * 16, 10),
    )  # fmt: skip


def train() -> Result:
    digits = parti.datasets.digits()
    strategy = parti.MirroredStrategy(threads=1)
    with strategy.scope():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = parti.Trainer(
        strategy, model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": parti.Accuracy()}
    )
    trainer.fit(digits.train, batch_size=BATCH_SIZE, epochs=1)  # warms up
    start = time.perf_counter()
    trainer.fit(digits.train, batch_size=BATCH_SIZE, epochs=1 + EPOCHS)
    seconds = time.perf_counter() - start
    accuracy = trainer.evaluate(digits.test, batch_size=256)["accuracy"]
    return Result(accuracy, EPOCHS * len(digits.train[1]) / seconds, fingerprint(model, optimizer))


def main() -> None:
    num_cores = len(os.sched_getaffinity(0))
    print("digits on one process, one thread:")
    one = parti.launch(train, 1)
    print(f"\ndigits on {num_cores} processes, one for each core:")
    every = parti.launch(train, num_cores)
    print(f"\naccuracy   {every.accuracy:.1%}")
    print(
        f"speed-up   {every.samples_per_s / one.samples_per_s:.2f}x on {num_cores} cores "
        f"({one.samples_per_s:,.0f} -> {every.samples_per_s:,.0f} samples/s)"
    )
    same = one.fingerprint == every.fingerprint
    print(
        f"weights    {'equal to the last bit' if same else 'DIFFERENT'}: {every.fingerprint[:16]}"
    )


if __name__ == "__main__":
    main()
