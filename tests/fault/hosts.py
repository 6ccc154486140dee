"""Hosts on one machine: network namespaces that are linked by a switch, another namespace.

A host is cut off by setting its link down, so that there is silence and no reset; it is lost by
killing all its processes at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NET = "10.78.0"


def can_make_hosts() -> bool:
    """Network namespaces need root and Debian's iproute2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"parti-probe-{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class Host:
    """One namespace, and the supervisor that runs there."""

    index: int
    name: str
    link: str
    directory: Path
    process: subprocess.Popen[str] | None = None
    log: Path = field(default=Path())

    @property
    def address(self) -> str:
        return f"{NET}.{self.index + 1}"

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def run(
        self, *options: str, script: Path, arguments: tuple[str, ...], environ: Mapping[str, str]
    ) -> None:
        """`parti run` with these options; its output goes to `log`."""
        self.directory.mkdir(exist_ok=True)
        self.log = self.directory / f"out-{uuid.uuid4().hex[:4]}.txt"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                self.command(
                    sys.executable, "-m", "parti", "run", *options, str(script), *arguments
                ),
                cwd=self.directory,
                stdout=out,
                stderr=out,
                text=True,
                env={**os.environ, **environ},
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> None:
        """To the supervisor."""
        assert self.process is not None
        self.process.send_signal(number)

    def processes(self) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(word) for word in found.stdout.split()]

    def lose(self) -> None:
        """All its processes at once, and those that they were just starting."""
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        _ip("-n", self.name, "link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.link, "up")

    def block(self, other: Host) -> None:
        """Nothing comes from the other host any more."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{other.address}/32")
        _ip("-n", self.name, "route", "flush", "cache")

    def unblock(self, other: Host) -> None:
        _ip("-n", self.name, "route", "del", "blackhole", f"{other.address}/32")

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.name else ""


@contextmanager
def hosts(count: int, directory: Path) -> Iterator[list[Host]]:
    tag = uuid.uuid4().hex[:5]
    switch = f"parti-{tag}-switch"
    made = [
        Host(i, f"parti-{tag}-{i}", f"ph{tag}{i}", directory / f"host{i}") for i in range(count)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            port = f"pp{tag}{host.index}"
            _ip("netns", "add", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", port)
            _ip("link", "set", host.link, "netns", host.name)
            _ip("link", "set", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge")
            _ip("-n", switch, "link", "set", port, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            _ip("-n", host.name, "link", "set", host.link, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            host.lose()
            if host.process is not None:
                host.process.wait(20)
        for name in (switch, *(host.name for host in made)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def until(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait for something that is looked at again and again. `what` tells what did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
