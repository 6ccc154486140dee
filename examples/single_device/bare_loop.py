"""A training loop on one device: the twin of ../bare_loop.py."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch, for a test")
epochs = 1 if parser.parse_args().short else 20

digits = parti.datasets.digits()

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(images, labels):
    return F.cross_entropy(model(images), labels)


for _ in range(epochs):
    for images, labels in DataLoader(TensorDataset(*digits.train), batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss_of(images, labels).backward()
        optimizer.step()

# Every process holds the same weights to the last bit, so each may look at them as it likes.
images, labels = (part.to(next(model.parameters()).device) for part in digits.test)
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.4f}")
