"""MNIST: found on this machine, or fetched once and kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from parti.data import mnist_fetch
from parti.data.mnist_files import FILES, Bytes, read_folder, read_keras
from parti.data.pictures import Pictures, check_dtype, labelled
from parti.errors import DataError

_WHITE = 255
_FOLDER = Path("MNIST", "raw")
"""torchvision's, so that it finds what is kept here, and the other way round."""

Arrays = tuple[Bytes, ...]


def mnist(
    root: str | Path | None = None, *, dtype: torch.dtype = torch.float32, fetch: bool = True
) -> Pictures:
    """Handwritten digits of 28×28 pixels: 60,000 to train with and 10,000 to test.

    `.train` and `.test` are (images [n, 1, 28, 28] from 0 to 1, labels [n]); with
    `dtype=torch.uint8` the images stay bytes, a quarter of the memory.

    `root` is a folder with a copy: the four files, torchvision's `MNIST/raw`, or Keras's
    `mnist.npz`. Without it, `~/.cache/parti`, `./data` and `~/.keras/datasets` are searched.
    What is not found is fetched, into `root` or `~/.cache/parti`, unless `fetch=False`. Contents
    are checked against the SHA-256 of the original files wherever they come from.
    """
    check_dtype(dtype)
    home = Path.home()
    keep = home / ".cache" / "parti" if root is None else Path(root)
    places = [keep] if root is not None else [keep, Path("data"), home / ".keras" / "datasets"]
    arrays, problems = _search(places)
    if arrays is None and fetch:
        with _one_at_a_time(keep):
            arrays, problems = _search(places)  # another process may have fetched it meanwhile
            if arrays is None:
                arrays = _fetch(keep, places, problems)
    if arrays is None:
        raise DataError(_not_found(places, problems, "fetching was turned off"))
    train_images, train_labels, test_images, test_labels = arrays
    return Pictures(
        train=labelled(train_images, train_labels, white=_WHITE, dtype=dtype),
        test=labelled(test_images, test_labels, white=_WHITE, dtype=dtype),
    )


def _search(places: list[Path]) -> tuple[Arrays | None, list[str]]:
    """The first good copy, or what is wrong with those that are not."""
    problems = []
    for place in places:
        readers: list[tuple[Callable[[Path], Arrays | None], Path]] = [
            (read_folder, place / _FOLDER),
            (read_folder, place),
            (read_keras, place / "mnist.npz"),
        ]
        for read, path in readers:
            try:
                arrays = read(path)
            except DataError as error:
                problems.append(str(error))
            else:
                if arrays is not None:
                    return arrays, problems
    return None, problems


def _fetch(keep: Path, places: list[Path], problems: list[str]) -> Arrays:
    try:
        arrays = mnist_fetch.fetch()
    except DataError as error:
        raise DataError(_not_found(places, problems, f"it could not be fetched: {error}")) from None
    try:
        _keep(keep / _FOLDER, arrays)
    except OSError as error:
        raise DataError(
            f"MNIST was fetched but cannot be kept in {keep}: {error}. Pass a folder that can be "
            "written to: mnist(root=…)."
        ) from error
    return arrays


def _keep(folder: Path, arrays: Arrays) -> None:
    """Write each file beside its place and move it there, so that none is ever half there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(FILES, arrays, strict=True):
        handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as target:
                target.write(file.header)
                target.write(array.tobytes())
            os.chmod(name, 0o644)
            os.replace(name, folder / file.name)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """All ranks of a host ask at once; one fetches, the others wait and find."""
    try:
        import fcntl
    except ImportError:  # Windows: each fetches for itself, and the last one's files stay
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".mnist.lock").open("w")
    except OSError as error:
        raise DataError(
            f"MNIST was not found, and cannot be fetched into {folder}: {error}. Pass a folder "
            "that can be written to: mnist(root=…)."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _not_found(places: list[Path], problems: list[str], why_not_fetched: str) -> str:
    searched = ", ".join(str(place) for place in places)
    wrong = "".join(f" {problem}" for problem in problems)
    return (
        f"MNIST was not found in {searched};{wrong} {why_not_fetched}. Put the files "
        f"{', '.join(file.name for file in FILES)} (or their .gz) into "
        f"{places[0] / _FOLDER}, or name a folder that holds them: mnist(root=…)."
    )
