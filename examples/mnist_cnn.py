"""The classic tutorial's network on MNIST, 99 % in six epochs: `python examples/mnist_cnn.py`.

Its single-device twin is single_device/mnist_cnn.py; four lines differ.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import parti
from parti import Accuracy, Trainer

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

strategy = parti.MirroredStrategy()
with strategy.scope():
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

trainer = Trainer(strategy, net, optimizer, loss, scheduler=decay, metrics={"accuracy": Accuracy()})
trainer.fit(mnist.train, batch_size=64, epochs=epochs, validation=mnist.test)
