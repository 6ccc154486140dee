"""What runs inside a worker on the launcher's behalf: telling the supervisor why it ends.

`install()` is called by the strategy on first use. A worker that never calls it is judged by its
output and its exit code.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from parti.launch.control import WorkersEnd, read_inherited
from parti.launch.directories import write_json
from parti.launch.failure import CONSEQUENCES

_MAX_SUMMARY_LENGTH = 200


class _Hook:
    """A `sys.excepthook` that reports, and leaves printing to the supervisor.

    The supervisor prints the first failure only, and files every traceback in its rank's log:
    eight ranks that miss the ninth would otherwise print eight tracebacks. A hook that the user
    has set still runs, and so does Python's own where the report cannot be written.
    """

    def __init__(self, rank: int, member: int, directory: Path) -> None:
        self._rank = rank
        self._member = member
        self._directory = directory
        self._process = os.getpid()
        self._previous = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        has_users_hook = self._previous is not sys.__excepthook__
        # A process forked from the worker inherits the hook, but does not speak for the rank.
        speaks = os.getpid() == self._process and not issubclass(kind, KeyboardInterrupt)
        is_told = speaks and self._report(kind, error, trace, is_printed=has_users_hook)
        if has_users_hook or not is_told:
            self._previous(kind, error, trace)

    def _report(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        *,
        is_printed: bool,
    ) -> bool:
        at_s = time.monotonic()
        lines = traceback.format_exception(kind, error, trace)
        bare = traceback.TracebackException(kind, error, None)
        bare.__notes__ = None
        last_words = list(bare.format_exception_only())[-1].strip()
        content = {
            "rank": self._rank,
            "at_s": at_s,
            "summary": _first_line(last_words).removeprefix("parti.errors."),
            "traceback": "".join(lines),
            "is_consequence": _blames_a_peer(error),
            "is_printed": is_printed,
        }
        try:
            write_json(self._directory / f"{self._member}.json", content)
        except OSError:
            return False
        return True


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:_MAX_SUMMARY_LENGTH]


def _blames_a_peer(error: BaseException) -> bool:
    """The error, or one that it came from, says only that another rank is gone or late."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if type(link).__module__ == "parti.errors" and type(link).__name__ in CONSEQUENCES:
            return True
        link = link.__cause__ or link.__context__
    return False


def install() -> None:
    """Report uncaught exceptions of this process to its supervisor. Does nothing elsewhere.

    Safe to call again. A process that a worker started inherits the worker's environment, but not
    its session: it installs nothing.
    """
    rank = os.environ.get("PARTI_RANK")
    directory = os.environ.get("PARTI_HOST_DIR")
    if rank is None or directory is None or os.getsid(0) != os.getpid():
        return
    if not isinstance(sys.excepthook, _Hook):
        member = int(os.environ.get("PARTI_MEMBER", rank))
        sys.excepthook = _Hook(int(rank), member, Path(directory, "failures"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a worker has from its supervisor besides its place."""

    member: int
    """The number of this process, which no other of the job gets."""
    end: WorkersEnd
    joins: bool
    """It takes the place of a lost one."""
    is_spare: bool
    """It stands by until it is needed."""
    has_hosts: bool
    """Processes of other hosts may take part, and hosts come and go."""
    faults: str
    """What a test wants to happen to it, as `FaultScript` writes it."""


@functools.lru_cache(maxsize=1)
def line() -> Line | None:
    """None in a process that no supervisor of ours has started."""
    inherited = os.environ.get("PARTI_CONTROL")
    if inherited is None or os.getsid(0) != os.getpid():
        return None
    return Line(
        member=int(os.environ["PARTI_MEMBER"]),
        end=read_inherited(inherited),
        joins=os.environ.get("PARTI_JOINS") in ("1", "spare"),
        is_spare=os.environ.get("PARTI_JOINS") == "spare",
        has_hosts=os.environ.get("PARTI_ELASTIC") == "1",
        faults=os.environ.get("PARTI_FAULTS", ""),
    )


@functools.lru_cache(maxsize=1)
def stand_by(warm_up: Callable[[], None]) -> None:
    """In a spare: wait here, with everything imported, until it is needed."""
    inherited = line()
    if inherited is not None and inherited.is_spare:
        warm_up()
        inherited.end.wait_for_call()
