"""Which process held up a run or ended it: where it was, since when, what the others waited for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from parti.doctor.run import Event, Run, State

_WIDTH = 100
_MOST_LINES = 40
_STALLED_S = 10.0
_DOING = {
    "start": "starting",
    "data": "waiting for data",
    "forward": "the model's forward pass",
    "backward": "the backward pass",
    "reduce": "adding up gradients with the others",
    "optimizer": "the update, with the others",
    "update": "changing its part of the weights",
    "hand_out": "handing out its part of the weights",
    "evaluate": "an evaluation",
    "user": "the script's own code",
    "save": "saving",
    "recover": "joining those who are left or have come",
    "wait": "waiting for a place",
}
"""The operation behind the name of a phase."""


def diagnose(run: Run) -> list[str]:
    """The lines of it; none for a run that ended well or was asked to stop, or goes on."""
    if run.state is State.ENDED and (run.exit_code == 0 or run.was_stopped):
        return []
    loss = _fatal(run)
    if loss is not None:
        return _of_loss(run, loss)
    seen = _last_seen(run)
    if seen is None:
        return [] if run.state is State.RUNNING else _of_nothing(run)
    return _of_stall(run, seen)


def who(run: Run, event: Event) -> str:
    """A process, with its rank in the world it was in at that time."""
    member, rank = event.number("member"), event.number("rank")
    for called in run.of("called"):
        members = called.numbers("members")
        if called.at_s <= event.at_s and member in members:
            rank = members.index(member)
    started = next((e for e in run.of("started") if e.number("member") == member), event)
    pid = f", pid {started.number('pid')}" if started.number("pid") >= 0 else ""
    return f"process {member} (rank {rank}{pid})"


def _filled(lines: Sequence[str]) -> list[str]:
    return [wrapped(line, 4) for line in lines]


def wrapped(line: str, indent: int) -> str:
    """A long line as several."""
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def whereabouts(place: Event) -> str:
    """Where a process was by its own last word; empty if it had said nothing."""
    phase, step = place.text("phase"), place.number("step")
    if not phase:
        return ""
    return f"in {phase.replace('_', ' ')}" + (f" of step {step}" if step >= 0 else "")


def _doing(place: Event) -> str:
    phase = place.text("phase")
    return f" ({_DOING[phase]})" if phase in _DOING else ""


def _lasted(place: Event) -> str:
    for_s = place.seconds("for_s")
    return "" if for_s is None else f" for {for_s:.1f} s"


def _host(run: Run, event: Event) -> str:
    host = event.text("host") or ("" if run.began is None else run.began.text("host"))
    return f" on {host}" if host else ""


def _fatal(run: Run) -> Event | None:
    """The loss after which no world was called: the one that the run did not survive."""
    if run.state is State.RUNNING:
        return None
    last_call = max((n for n, event in enumerate(run.events) if event.kind == "called"), default=-1)
    losses = [event for event in run.events[last_call + 1 :] if event.kind == "lost"]
    causes = [event for event in losses if not event.is_true("is_consequence")]
    return next(iter(causes or losses), None)


def _of_loss(run: Run, loss: Event) -> list[str]:
    lines = [
        "diagnosis:",
        f"  {who(run, loss)}{_host(run, loss)} ended the run: {loss.text('how')}",
        f"  it {_standpoint(run, loss)}, {loss.at_s:.1f} s after the start",
    ]
    seen = [event for event in run.of("seen") if event.at_s >= loss.at_s - _STALLED_S]
    places = _others(seen[0], loss.number("member")) if seen else []
    lines += _standing(run, places)
    stack = loss.text("stack")
    told = _block("stack", stack) if stack else _block("what was told of it", _failure(run))
    return [*_filled(lines), *told]


def _standpoint(run: Run, loss: Event) -> str:
    if whereabouts(loss):
        return f"was {whereabouts(loss)}{_doing(loss)}{_lasted(loss)}"
    book = run.books.get(loss.number("member"))
    last = None if book is None else book.last
    return "had committed no step yet" if last is None else f"had committed step {last.step} last"


def _of_stall(run: Run, seen: Event) -> list[str]:
    places = seen.parts("places")
    culprit = _culprit(places)
    lines = ["diagnosis:", f"  at {seen.at_s:.1f} s: {seen.text('why')}"]
    if run.state is State.ENDED:
        lines[-1] += f" ({_failure(run).partition(chr(10))[0]})"
    if culprit is None:
        return _filled(lines)
    is_missed = any(place.is_true("is_waiting") for place in places)
    did = "held up the others" if is_missed else "was last"
    lines.append(
        f"  {who(run, culprit)}{_host(run, seen)} {did}: "
        f"{whereabouts(culprit)}{_doing(culprit)}{_lasted(culprit)}"
    )
    lines += _standing(run, _others(seen, culprit.number("member")))
    stuck = [e for e in run.of("lost") if e.number("member") == culprit.number("member")]
    return [*_filled(lines), *_block("stack", stuck[-1].text("stack") if stuck else "")]


def _of_nothing(run: Run) -> list[str]:
    """No process has said where it was: what the supervisor told is all there is."""
    failure = _failure(run)
    if not failure:
        return []
    return ["diagnosis:", *(f"  {line}" for line in failure.splitlines()[:_MOST_LINES])]


def _failure(run: Run) -> str:
    failure = run.facts.get("failure")
    if isinstance(failure, str):
        return failure
    ended = next(run.of("ended"), None)
    return "" if ended is None else ended.text("reason")


def _last_seen(run: Run) -> Event | None:
    """The last look at all processes, if no step was committed after it."""
    seen = [event for event in run.of("seen") if event.parts("places")]
    if not seen:
        return None
    commits = [record for book in run.timed_books if (record := book.last) is not None]
    last_s = max((run.since_start_s(record.at_s) for record in commits), default=0.0)
    is_over = run.state is not State.RUNNING
    return seen[-1] if is_over or seen[-1].at_s > last_s else None


def _culprit(places: Sequence[Event]) -> Event | None:
    """Who is behind: of those who wait for nobody the one at the earliest step, the longest."""
    free = [place for place in places if not place.is_true("is_waiting")]
    return min(
        free or places,
        key=lambda place: (place.number("step"), -(place.seconds("for_s") or 0.0)),
        default=None,
    )


def _others(seen: Event, member: int) -> list[Event]:
    return [place for place in seen.parts("places") if place.number("member") != member]


def _standing(run: Run, places: Sequence[Event]) -> list[str]:
    return [
        f"  {who(run, place)} {'waited for others' if place.is_true('is_waiting') else 'was'} "
        f"{whereabouts(place)}{_doing(place)}{_lasted(place)}"
        for place in places
    ]


def _block(name: str, text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], "…", *lines[-_MOST_LINES // 2 :]]
    return [f"  {name}:", *(f"    {line}" for line in lines)] if lines else []
