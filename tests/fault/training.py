"""A training that is hard to keep exact, as a script that a test runs under `parti run`.

    training.py EPOCHS OUT [trainer|loop]

Each process that is there at the end writes OUT.<its number>: a fingerprint of weights and
optimizer state, the metrics, and a digest of the history.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import parti
from parti.callbacks import StepEnd
from parti.testing import fingerprint

BATCH_SIZE = 48


def make(strategy: parti.MultiWorkerMirroredStrategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        return model, torch.optim.AdamW(model.parameters(), 1e-3)


def kept() -> parti.Checkpoint | None:
    directory = os.environ.get("CHECKPOINTS")
    return None if directory is None else parti.Checkpoint(directory, every=25)


class StopWhenTold:
    """Ends the training after the epoch in which a file is there. EPOCHS is the most then."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_epoch_end(self, event: object) -> parti.Stop | None:
        return parti.Stop("told to") if self._file.exists() else None


class Paced:
    """Rests after each step until a file is there: time for what is to happen meanwhile."""

    def __init__(self, file: str, rest_s: float) -> None:
        self._file = Path(file)
        self._rest_s = rest_s

    def on_step_end(self, event: object) -> None:
        if self._rest_s and not self._file.exists():
            time.sleep(self._rest_s)


class Breaks:
    """Raises in process 1 after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, event: StepEnd) -> None:
        if event.report.step == self._step and os.environ["PARTI_MEMBER"] == "1":
            raise KeyError("typo")


def by_trainer(strategy: parti.MultiWorkerMirroredStrategy, epochs: int) -> list[str]:
    model, optimizer = make(strategy)
    trainer = parti.Trainer(
        strategy, model, optimizer, nn.CrossEntropyLoss(),
        metrics={"accuracy": parti.Accuracy()},
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        average=parti.EMA(0.99), clip_norm=1.0,
        callbacks=[
            StopWhenTold(os.environ.get("STOP_FILE", "/nowhere")),
            Paced(os.environ.get("HURRY_FILE", "/nowhere"), float(os.environ.get("REST_S", "0"))),
            Breaks(int(os.environ.get("BREAK_AT", "-1"))),
        ],
    )  # fmt: skip
    train, test = parti.datasets.digits()
    before = trainer.evaluate(test)
    history = trainer.fit(
        train, batch_size=BATCH_SIZE, micro_batches=6, epochs=epochs, validation=test,
        checkpoint=kept(),
    )  # fmt: skip
    after = trainer.evaluate(test)
    steps = hashlib.sha256(history.step_losses.tobytes()).hexdigest()
    columns = [
        history[name] for name in ("loss", "accuracy", "val_loss", "val_accuracy", "lr", "samples")
    ]
    rows = hashlib.sha256(repr(columns).encode()).hexdigest()
    epochs_done = str(len(history))
    return [epochs_done, fingerprint(model, optimizer), repr(before), repr(after), rows, steps]


def by_loop(strategy: parti.MultiWorkerMirroredStrategy, epochs: int) -> list[str]:
    model, optimizer = make(strategy)
    replica = strategy.bind(model, optimizer)
    train, test = parti.datasets.digits()
    right = torch.zeros(())
    for _ in range(2):
        for batch in replica.batches(
            train, batch_size=BATCH_SIZE, micro_batches=6, epochs=-(-epochs // 2),
            checkpoint=kept(),
        ):  # fmt: skip
            replica.step(lambda x, y: F.cross_entropy(model(x), y), batch)
        model.eval()
        right = torch.zeros(())
        for batch in replica.batches(test, batch_size=180, micro_batches=6, shuffle=False):
            parts = replica.run(lambda x, y: (model(x).argmax(1) == y).sum(), batch)
            right += replica.reduce(parts, "sum")
        model.train()
    return [fingerprint(model, optimizer), str(right.item())]


def main(epochs: str, out: str, how: str = "trainer") -> None:
    patience_s = float(os.environ.get("PATIENCE", "20"))
    if os.environ.get("CANNOT_START"):
        raise ImportError("this host lacks something")
    # It trains on one host just as well.
    strategy = parti.MultiWorkerMirroredStrategy(threads=1, patience_s=patience_s)
    found = {"trainer": by_trainer, "loop": by_loop}[how](strategy, int(epochs))
    Path(f"{out}.{os.environ['PARTI_MEMBER']}").write_text("\n".join(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
