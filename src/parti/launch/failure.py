"""Which failure of a job was the first, and how it is told. Pure: no files, processes or clocks.

A worker that raises reports it with a time stamp before it exits (`parti.launch.worker`); of one
that could not (killed, crashed, `sys.exit`, an import error) the order of exits and the end of its
output have to do. Errors that only say that another rank is gone or late are consequences wherever
another rank failed with anything else.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONSEQUENCES = frozenset({"CommError", "PeerLost", "CommTimeout"})
"""Names of the errors in `parti.errors` that blame another rank."""

_NUM_TAIL_LINES = 20
_MAX_SUMMARY_LENGTH = 200
_LAST_WORDS = re.compile(r"^(Traceback \(most recent call last\)|Fatal Python error: )", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker wrote about the exception that ends it."""

    rank: int
    at_s: float
    """`time.monotonic()`, which the processes of one host share."""
    summary: str
    traceback: str
    is_consequence: bool
    is_printed: bool
    """The worker (a hook of the user's) has written the traceback to its own output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one worker ended."""

    rank: int
    exit_code: int
    """As `subprocess` has it: negative for a signal."""
    at_s: float
    host: str = ""
    """Where it ran; empty on this host."""
    report: Report | None = None
    tail: str = ""
    """The end of its output."""
    is_on_console: bool = False
    """Its output has been shown as it came."""
    is_ended_by_us: bool = False
    num_oom_kills: int | None = None
    """How many processes the kernel ended for want of memory on that host during the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    first: Ending
    alike: tuple[Ending, ...]
    """Ranks that failed with the same last words: one defect in the script met by several."""
    consequences: tuple[Ending, ...]


def judge(endings: Sequence[Ending]) -> Verdict | None:
    """The first failure among `endings`, or None if there is none."""
    failed = sorted((e for e in endings if is_failure(e)), key=lambda e: (moment(e), e.rank))
    if not failed:
        return None
    return fold(failed[0], failed[1:])


def fold(first: Ending, others: Sequence[Ending]) -> Verdict:
    """Put the other failures under the first, unless the first was only a consequence of one."""
    if is_consequence(first):
        cause = next((e for e in others if not is_consequence(e)), None)
        if cause is not None:
            others = [first, *(e for e in others if e is not cause)]
            first = cause
    words = summary(first)
    alike = tuple(e for e in others if summary(e) == words)
    rest = tuple(e for e in others if summary(e) != words)
    return Verdict(first=first, alike=alike, consequences=rest)


def is_failure(ending: Ending) -> bool:
    return ending.exit_code != 0 and not ending.is_ended_by_us


def moment(ending: Ending) -> float:
    return ending.at_s if ending.report is None else ending.report.at_s


def is_consequence(ending: Ending) -> bool:
    if ending.report is not None:
        return ending.report.is_consequence
    if ending.exit_code < 0:
        return False
    words = re.match(r"(?:parti\.errors\.)?(\w+)(?::|$)", _last_line(ending.tail))
    return words is not None and words[1] in CONSEQUENCES


def shell_code(exit_code: int) -> int:
    """The exit code as a shell reports it."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def summary(ending: Ending) -> str:
    """One line: the exception, the signal or the exit code."""
    if ending.exit_code < 0:
        return f"killed by {signal_name(-ending.exit_code)}"
    if ending.report is not None:
        return ending.report.summary
    last = _last_line(ending.tail)
    if last and _LAST_WORDS.search(ending.tail):
        return last[:_MAX_SUMMARY_LENGTH]
    return f"exit code {ending.exit_code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(verdict: Verdict, *, log_of: Callable[[Ending], str]) -> str:
    """The text for a person: the first failure in full, its consequences in a line each."""
    first = verdict.first
    lines = [_headline(verdict)]
    lines += [f"  {line}" for line in _hints(first)]
    details = _details(first)
    if details:
        lines += [details]
    if verdict.consequences:
        lines += ["after it, and most likely because of it:"]
        lines += [f"  {_name(e)}: {summary(e)}" for e in verdict.consequences]
    lines += [f"log: {log_of(first)}"]
    return "\n".join(lines)


def _headline(verdict: Verdict) -> str:
    first = verdict.first
    if first.exit_code < 0:
        fact = f"was killed by {signal_name(-first.exit_code)}"
    else:
        fact = f"failed with exit code {first.exit_code}"
    if not verdict.alike:
        return f"{_name(first)} {fact}"
    others = ", ".join(str(rank) for rank in sorted(e.rank for e in verdict.alike))
    noun = "rank" if len(verdict.alike) == 1 else "ranks"
    return f"{_name(first)} {fact}, and {noun} {others} alike"


def _name(ending: Ending) -> str:
    return f"rank {ending.rank}" + (f" on {ending.host}" if ending.host else "")


def _hints(ending: Ending) -> list[str]:
    match -ending.exit_code:
        case signal.SIGKILL if ending.num_oom_kills:
            return [
                "the kernel ended a process for want of memory meanwhile, likely this one: "
                "use smaller micro-batches, fewer processes or --no-allocator-tuning"
            ]
        case signal.SIGKILL if ending.num_oom_kills == 0:
            return ["not by the kernel's out-of-memory killer: by a person or a scheduler"]
        case signal.SIGBUS:
            return ["often a full /dev/shm: see `df -h /dev/shm` (docker: --shm-size)"]
        case _:
            return []


def _details(ending: Ending) -> str:
    if ending.report is not None:
        shown = ending.report.is_printed and ending.is_on_console
        return "" if shown else ending.report.traceback.rstrip()
    if ending.is_on_console:
        return ""
    return excerpt(ending.tail)


def excerpt(tail: str) -> str:
    """The last traceback or crash report in `tail`, or else its last lines."""
    starts = [found.start() for found in _LAST_WORDS.finditer(tail)]
    if starts:
        return tail[starts[-1] :].rstrip()
    return "\n".join(tail.rstrip().splitlines()[-_NUM_TAIL_LINES:])


def _last_line(text: str) -> str:
    lines = text.rstrip().splitlines()
    return lines[-1].strip() if lines else ""
