"""The classic tutorial's network on MNIST, on one device: the twin of ../mnist_cnn.py."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch over small digits, for a test")
short = parser.parse_args().short
epochs = 1 if short else 6


def enlarged_digits():
    """The small digits that come with Parti, as images of MNIST's size."""
    digits = parti.datasets.digits()
    return parti.datasets.Pictures(
        train=(F.interpolate(digits.train[0], (28, 28), mode="bilinear"), digits.train[1]),
        test=(F.interpolate(digits.test[0], (28, 28), mode="bilinear"), digits.test[1]),
    )


try:
    mnist = enlarged_digits() if short else parti.datasets.mnist()
except parti.DataError as error:
    print(f"{error}\nGoing on with the small digits that come with Parti, enlarged.")
    mnist = enlarged_digits()

net = nn.Sequential(
    nn.Conv2d(1, 32, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 5 * 5, 10),
)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
loss = nn.CrossEntropyLoss()
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

train, test = (TensorDataset(*each) for each in (mnist.train, mnist.test))
for _ in range(epochs):
    net.train()
    for images, labels in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss(net(images), labels).backward()
        optimizer.step()
    decay.step()
    net.eval()
    with torch.no_grad():
        right = [net(x).argmax(1) == y for x, y in DataLoader(test, batch_size=128)]
    print(f"accuracy {torch.cat(right).float().mean():.4f}")
