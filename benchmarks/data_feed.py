"""How fast data in memory reaches the model: Parti's feed beside torch's DataLoader.

    python benchmarks/data_feed.py [--rounds 7] [--output FILE]

Every contender hands out the same 60,000 images (1×28×28, fp32, with labels) in shuffled batches
of 128, in one thread, to a loop that does nothing else. Turns are interleaved; a ratio is taken
within a round, and the median over rounds is shown. Two rows have a data set that computes each
sample in Python instead, where the feed has no short cut and pays for seeding every sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from results import ROOT, machine, markdown, median, save, times
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(ROOT / "src"))

from parti.data.batches import Feed

NUM_SAMPLES = 60_000
BATCH_SIZE = 128
GOAL = 3.0

Make = Callable[[], Iterable[Any]]


class Augmented(Dataset[Any]):
    """Reads samples one by one and draws from the generators, as image data sets do."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self._images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self._labels[index]


def feed(data: Any, *, micro_batches: int = 4, shuffle: bool = True) -> Make:
    return lambda: Feed(
        data,
        batch_size=BATCH_SIZE,
        micro_batches=micro_batches,
        shuffle=shuffle,
        owned=range,
        epochs=1,
    )


def bare(images: torch.Tensor, labels: torch.Tensor) -> Iterator[Any]:
    """The least that can be done: a permutation of the whole epoch, and one gather a tensor."""
    order = torch.randperm(len(images))
    for rows in order.split(BATCH_SIZE):
        yield images.index_select(0, rows), labels.index_select(0, rows)


def contenders() -> dict[str, tuple[Make, int]]:
    """What is measured, with the number of batches in a turn."""
    images = torch.randn(NUM_SAMPLES, 1, 28, 28)
    labels = torch.randint(0, 10, (NUM_SAMPLES,))
    in_memory = TensorDataset(images, labels)
    augmented = Augmented(images, labels)
    bytes_only = (images.mul(32).clamp_(0, 255).to(torch.uint8), labels)

    def loader(data: Dataset[Any], **options: Any) -> Make:
        return lambda: DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, **options)

    return {
        "DataLoader": (loader(in_memory), 120),
        "DataLoader, 2 workers": (loader(in_memory, num_workers=2), 468),
        "bare loop": (lambda: bare(images, labels), 468),
        "Feed": (feed(in_memory), 468),
        "Feed, 1 micro-batch": (feed(in_memory, micro_batches=1), 468),
        "Feed, 8 micro-batches": (feed(in_memory, micro_batches=8), 468),
        "Feed, in order": (feed(in_memory, shuffle=False), 468),
        "Feed, bytes": (feed(bytes_only), 468),
        "DataLoader, augmented": (loader(augmented), 60),
        "Feed, augmented": (feed(augmented), 60),
    }


def turn(make: Make, count: int) -> float:
    """Seconds a batch, from the start of an epoch."""
    batches = make()
    start = time.perf_counter()
    got = sum(1 for _ in islice(batches, count))
    seconds = time.perf_counter() - start
    assert got == count
    return seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(arguments.rounds + 1):
        for name, (make, count) in every.items():
            taken = turn(make, count)
            if number:  # the first round warms up
                seconds[name].append(taken)
    print(machine())
    print(_table(seconds))
    print(save("data_feed", _as_data(seconds), arguments.output))


def _rival(name: str) -> str:
    return "DataLoader, augmented" if name.endswith("augmented") else "DataLoader"


def _ratio(seconds: dict[str, list[float]], name: str) -> float | None:
    pairs = zip(seconds[_rival(name)], seconds[name], strict=True)
    return median(rival / own for rival, own in pairs)


def _table(seconds: dict[str, list[float]]) -> str:
    rows = []
    for name, taken in seconds.items():
        goal = GOAL if name == "Feed" else None
        rows.append(
            (
                name,
                f"{(median(taken) or 0) * 1e6:.0f}",
                f"{min(taken) * 1e6:.0f}",
                times(_ratio(seconds, name), goal),
            )
        )
    return markdown(("", "µs a batch", "least", "× its DataLoader"), rows)


def _as_data(seconds: dict[str, list[float]]) -> dict[str, object]:
    return {
        "batch_size": BATCH_SIZE,
        "num_samples": NUM_SAMPLES,
        "threads": 1,
        "contenders": {
            name: {
                "seconds_a_batch": taken,
                "median_s": median(taken),
                "times_its_data_loader": _ratio(seconds, name),
            }
            for name, taken in seconds.items()
        },
    }


if __name__ == "__main__":
    main()
