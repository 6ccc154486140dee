"""Handwritten digits on every core of this machine: `python examples/digits.py`.

Its single-device twin is single_device/digits.py; four lines differ.
"""

import argparse

import torch
from torch import nn

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch, for a test")
epochs = 1 if parser.parse_args().short else 20

digits = parti.datasets.digits()

strategy = parti.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss = nn.CrossEntropyLoss()

trainer = parti.Trainer(strategy, model, optimizer, loss, metrics={"accuracy": parti.Accuracy()})
trainer.fit(digits.train, batch_size=64, epochs=epochs, validation=digits.test)
