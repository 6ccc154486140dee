"""A real etcd for tests: the one on PATH, or Debian's, fetched once and not installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "parti-etcd"
FETCH_S = 60.0
START_S = 20.0


class NoEtcd(Exception):
    """Says why there is none here."""


@dataclass(frozen=True)
class Etcd:
    port: int
    pid: int


def find_etcd() -> Path:
    on_path = shutil.which("etcd")
    if on_path:
        return Path(on_path)
    program = CACHE / "usr/bin/etcd"
    if not program.exists():
        try:
            CACHE.mkdir(parents=True, exist_ok=True)
            _call("apt-get", "download", "etcd-server")
            package = max(CACHE.glob("etcd-server_*.deb"), key=lambda path: path.stat().st_mtime)
            _call("dpkg", "-x", package.name, "unpacked")
            program.parent.mkdir(parents=True, exist_ok=True)
            (CACHE / "unpacked/usr/bin/etcd").rename(program)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or ""
            raise NoEtcd(f"no etcd on PATH, and no Debian package of it: {error} {said}") from error
    return program


def _call(*command: str) -> None:
    subprocess.run(command, cwd=CACHE, check=True, capture_output=True, text=True, timeout=FETCH_S)


@contextlib.contextmanager
def serve_etcd(
    program: Path, directory: Path, *, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[Etcd]:
    """One member, killed at the end. `within` is put before its command, as to run it in a network
    of its own where `host` is its address."""
    for attempt in range(3):  # a port may be taken between its choice and its use
        port, peer_port = _free_ports(2)
        log = directory / f"etcd-{attempt}.log"
        data = directory / f"data-{attempt}"
        process = _start([*within, str(program)], data, log, host, port, peer_port)
        try:
            if _has_started(process, log):
                yield Etcd(port, process.pid)
                return
        finally:
            process.kill()
            process.wait()
    raise NoEtcd(f"{program} does not start: {log.read_text()[-1000:]}")


def _start(
    program: Sequence[str], data: Path, log: Path, host: str, port: int, peer_port: int
) -> subprocess.Popen[bytes]:
    client, peer = f"http://{host}:{port}", f"http://{host}:{peer_port}"
    options = {
        "name": "n",
        "data-dir": data,
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"n={peer}",
        "heartbeat-interval": 10,
        "election-timeout": 100,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [*program, *(f"--{name}={value}" for name, value in options.items())],
            stdout=output,
            stderr=output,
        )


def _has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if b"ready to serve" in log.read_bytes():
            return True
        time.sleep(0.02)
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as reserved:
        sockets = [reserved.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
