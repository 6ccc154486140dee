"""What the supervisor reads to learn why a worker ended."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from parti.launch.failure import Report

_LOOK_EVERY_S = 0.2


class Reports:
    """The reports of uncaught exceptions in a directory (see `parti.launch.worker`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[int, Report] = {}
        self._looked_s = 0.0

    def look(self, *, now: bool) -> None:
        """Read what is new; at once, or if it has not been looked for some time."""
        if not now and time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        for name in os.listdir(self._directory):
            member = name.removesuffix(".json")
            if member.isdigit() and int(member) not in self._found:
                report = _read_report(self._directory / name)
                if report is not None:
                    self._found[int(member)] = report

    def of(self, member: int) -> Report | None:
        """What the process with this number has reported."""
        return self._found.get(member)


def _read_report(path: Path) -> Report | None:
    """None for a file that does not hold a report: it was written by a worker, not by us."""
    try:
        content = json.loads(path.read_text())
        return Report(
            rank=int(content["rank"]),
            at_s=float(content["at_s"]),
            summary=str(content["summary"]),
            traceback=str(content["traceback"]),
            is_consequence=bool(content["is_consequence"]),
            is_printed=bool(content["is_printed"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def num_oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory, a container's limit included."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1])
