"""Two networks, two optimizers, one bind: a GAN that draws digits. `python examples/gan.py`.

Its single-device twin is single_device/gan.py; what opens the scope and what takes a step differ,
and nothing else.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import parti

parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true", help="one epoch, for a test")
epochs = 1 if parser.parse_args().short else 150

digits = parti.datasets.digits()

strategy = parti.MirroredStrategy()
with strategy.scope():
    generator = nn.Sequential(
        nn.Linear(32, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 64),
        nn.Sigmoid(),
    )
    critic = nn.Sequential(
        nn.Linear(64, 256),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(256, 1),
    )
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.999))
replica = strategy.bind(generator, critic, g_optimizer, c_optimizer)


def drawn(count):
    return generator(torch.randn(count, 32, device=next(generator.parameters()).device))


def critic_loss(images, labels):
    real = critic(images.flatten(1))
    fake = critic(drawn(len(images)).detach())
    return (F.softplus(-real) + F.softplus(fake)).mean()


def generator_loss(images, labels):
    return F.softplus(-critic(drawn(len(images)))).mean()


for batch in replica.batches(digits.train, batch_size=64, epochs=epochs):
    replica.step(critic_loss, batch, optimizer=c_optimizer)
    replica.step(generator_loss, batch, optimizer=g_optimizer)

shades = " .:-=+*#%@"
torch.manual_seed(0)
with torch.no_grad():
    for row in drawn(8).view(8, 8, 8).transpose(0, 1):
        print("  ".join("".join(shades[int(9.99 * p)] * 2 for p in line) for line in row))
