"""ResNet-18 on CIFAR-10: `python examples/cifar_resnet18.py --data cifar-10-batches-bin`.

`--data` is the unpacked binary version of https://www.cs.toronto.edu/~kriz/cifar.html (the Python
version holds pickles, which may run code when they are read). Without it, made-up images of the
same shape stand in. Its single-device twin is single_device/cifar_resnet18.py; four lines differ.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("cifar-10-batches-bin"))
parser.add_argument("--short", action="store_true", help="a few steps, for a test")
args = parser.parse_args()
epochs = 1 if args.short else 15


def read(*names):
    """Each record is a byte for the class and 3,072 for the image."""
    files = [np.fromfile(args.data / name, dtype=np.uint8).reshape(-1, 3073) for name in names]
    records = torch.from_numpy(np.concatenate(files))
    return TensorDataset(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


def made_up(count, seed):
    """Ten smooth patterns, one a class, under heavy noise."""
    patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = F.interpolate(patterns, (32, 32), mode="bilinear")[labels]
    noisy = images + 0.5 * torch.randn(images.shape, generator=generator)
    return TensorDataset((noisy.clamp(0, 1) * 255).to(torch.uint8), labels)


if args.data.is_dir():
    train_set = read(*(f"data_batch_{i}.bin" for i in range(1, 6)))
    test_set = read("test_batch.bin")
else:
    print(f"{args.data} is not there: made-up images stand in for CIFAR-10")
    train_set = made_up(32 if args.short else 5_000, seed=1)
    test_set = made_up(32 if args.short else 1_000, seed=2)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [[Block(i, o, s), Block(o, o, 1)] for i, o, s in sizes]
        self.blocks = nn.Sequential(*(block for pair in blocks for block in pair))
        self.head = nn.Linear(512, 10)

    def forward(self, images):
        x = (images.float() - 120.0) / 64.0
        if self.training:
            # Shift by up to 4 pixels and mirror half of the time, the batch as a whole.
            top, left = torch.randint(9, (2,)).tolist()
            x = F.pad(x, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
            x = torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


strategy = parti.MirroredStrategy()
with strategy.scope():
    model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
loss = nn.CrossEntropyLoss()

trainer = parti.Trainer(strategy, model, optimizer, loss, metrics={"accuracy": parti.Accuracy()})
trainer.fit(train_set, batch_size=128, epochs=epochs, validation=test_set)
