"""Runs `parti run` in an empty directory, and meets its workers.

Workers report at a hub, a socket of the test's: that is how a test knows that they are up, keeps
them waiting, and sees that they are gone (a connection ends with its process, however that ends).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0
SOURCES = Path(__file__).parents[3] / "src"
PRELUDE = """
import os, signal, socket, sys, time
rank = int(os.environ["PARTI_RANK"])
def wait():
    global hub
    hub = socket.create_connection(("127.0.0.1", int(os.environ["HUB"])))
    hub.sendall(f"{rank} {os.getpid()}\\n".encode())
    hub.recv(1)
"""


class Hub:
    """Where the workers of a test report and wait."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self.port = self._listener.getsockname()[1]
        self._workers: dict[int, socket.socket] = {}

    def gather(self, count: int) -> dict[int, int]:
        """Wait for `count` workers to report; their process ids by rank."""
        pids = {}
        for _ in range(count):
            connection, _ = self._listener.accept()
            connection.settimeout(DEADLINE_S)
            rank, pid = map(int, connection.makefile().readline().split())
            self._workers[rank], pids[rank] = connection, pid
        return pids

    def release(self) -> None:
        for connection in self._workers.values():
            with contextlib.suppress(OSError):
                connection.sendall(b"x")

    def expect(self, rank: int, message: bytes) -> None:
        assert self._workers[rank].recv(len(message)) == message

    def await_end(self) -> None:
        """Wait until every worker that reported is gone."""
        for connection in self._workers.values():
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""

    def close(self) -> None:
        for connection in [self._listener, *self._workers.values()]:
            connection.close()


class Bench:
    """An empty directory to start things in, and what has been started there."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        self.directory = directory
        self._hub = hub
        self._started: list[subprocess.Popen[str]] = []
        (directory / "tmp").mkdir()

    def run(
        self, options: str, script: str, *arguments: str, **streams: object
    ) -> subprocess.Popen[str]:
        """Start `parti run` with these options on a script with the prelude."""
        self.write("script.py", PRELUDE + textwrap.dedent(script))
        command = ("-m", "parti", "run", *options.split(), "script.py", *arguments)
        return self.python(*command, **streams)

    def python(self, *arguments: str, **streams: object) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=self.environ,
            text=True,
            start_new_session=True,
            **{**pipes, **streams},  # type: ignore[call-overload]
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Exit code, output and errors of a process that ends, but for the remark that a machine
        with few cores gets."""
        out, err = process.communicate(timeout=DEADLINE_S)
        kept = [line for line in err.splitlines(keepends=True) if " processes share " not in line]
        return process.returncode, out, "".join(kept)

    @property
    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "TMPDIR": str(self.directory / "tmp"),
            "PWD": str(self.directory),
            "HUB": str(self._hub.port),
        }

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def read(self, name: str) -> str:
        """A file of the last run."""
        return (self.directory / "runs" / "latest" / name).read_text()

    def leftovers(self) -> list[str]:
        """Scratch directories that are still there."""
        return [path.name for path in (self.directory / "tmp").glob("parti-*/*")]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(DEADLINE_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    opened = Hub()
    yield opened
    opened.close()


@pytest.fixture
def bench(tmp_path: Path, hub: Hub) -> Iterator[Bench]:
    """Nothing that is started with it survives the test."""
    opened = Bench(tmp_path, hub)
    yield opened
    opened.close()
