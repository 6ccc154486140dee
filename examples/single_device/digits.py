"""Handwritten digits on one device: the twin of ../digits.py."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch, for a test")
epochs = 1 if parser.parse_args().short else 20

digits = parti.datasets.digits()

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

train, test = (TensorDataset(*each) for each in (digits.train, digits.test))
for _ in range(epochs):
    model.train()
    for images, labels in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in DataLoader(test, batch_size=64)]
    print(f"accuracy {torch.cat(right).float().mean():.4f}")
