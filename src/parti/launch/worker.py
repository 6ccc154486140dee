"""What runs inside a worker on the launcher's behalf: telling the supervisor why it ends.

`install()` is called by the strategy on first use. A worker that never calls it is judged by its
output and its exit code.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from parti.launch.directories import write_json
from parti.launch.failure import CONSEQUENCES

_MAX_SUMMARY_LENGTH = 200


class _Hook:
    """A `sys.excepthook` that reports, and leaves printing to the supervisor.

    The supervisor prints the first failure only, and files every traceback in its rank's log:
    eight ranks that miss the ninth would otherwise print eight tracebacks. A hook that the user
    has set still runs, and so does Python's own where the report cannot be written.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        self._rank = rank
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
            write_json(self._directory / f"{self._rank}.json", content)
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
        sys.excepthook = _Hook(int(rank), Path(directory, "failures"))
