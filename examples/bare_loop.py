"""Your own training loop on every core of this machine: `python examples/bare_loop.py`.

Its single-device twin is single_device/bare_loop.py; what opens the scope and what takes a step
differ, and nothing else.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch, for a test")
epochs = 1 if parser.parse_args().short else 20

digits = parti.datasets.digits()

strategy = parti.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
replica = strategy.bind(model, optimizer)


def loss_of(images, labels):
    return F.cross_entropy(model(images), labels)


for batch in replica.batches(digits.train, batch_size=64, epochs=epochs):
    replica.step(loss_of, batch)

# Every process holds the same weights to the last bit, so each may look at them as it likes.
images, labels = (part.to(next(model.parameters()).device) for part in digits.test)
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.4f}")
