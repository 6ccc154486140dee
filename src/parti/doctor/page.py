"""What is told of a run: one page of plain text."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from parti.doctor.book import Record
from parti.doctor.diagnosis import diagnose, whereabouts, who, wrapped
from parti.doctor.run import Event, Run, State

_MOST_EVENTS = 24
_MOST_PROBLEMS = 12
_INDENT = 14
"""Behind the times."""


def page(run: Run, problems: Sequence[str]) -> str:
    """How the run ended, what happened to its processes, what is wrong with it, and whether its
    history is as it should be (`problems` are what `check` has found)."""
    parts = [
        [_headline(run), *_facts(run)],
        _timeline(run),
        diagnose(run),
        _verdict(run, problems),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _headline(run: Run) -> str:
    name = run.directory.resolve().name
    match run.state:
        case State.RUNNING:
            now_s = run.now_s
            return f"run {name}: running" + ("" if now_s is None else f", for {now_s:.1f} s")
        case State.GONE if run.began is None:
            return f"run {name}: no supervisor has left a record of its end"
        case State.GONE:
            return (
                f"run {name}: its supervisor ended without a word (it was killed, or its host went "
                f"down); the last sign of life is {_last_sign_s(run):.1f} s after its start"
            )
        case State.ENDED:
            ended = next(run.of("ended"), None)
            after = "" if ended is None else f", {ended.at_s:.1f} s after its start"
            if run.exit_code == 0:
                return f"run {name}: ended well{after}"
            if run.was_stopped:
                return f"run {name}: stopped when it was asked to{after}"
            return f"run {name}: ended with exit code {run.exit_code}{after}"


def _last_sign_s(run: Run) -> float:
    ends = [run.since_start_s(record.at_s) for record in _last_commits(run)]
    return max([0.0, *ends, *(event.at_s for event in run.events)])


def _last_commits(run: Run) -> list[Record]:
    return [record for book in run.timed_books if (record := book.last) is not None]


def _facts(run: Run) -> Iterator[str]:
    command = run.facts.get("command")
    if isinstance(command, list):
        yield f"  command: {shlex.join(map(str, command))}"
    hosts, size = run.facts.get("hosts"), run.facts.get("world_size")
    if isinstance(hosts, list):
        yield f"  hosts:   {', '.join(map(str, hosts))}; {size} processes"
    if "started" in run.facts:
        ended = run.facts.get("ended")
        yield f"  started: {run.facts['started']}" + (f"; ended: {ended}" if ended else "")
    commits = _last_commits(run)
    if commits:
        last = max(commits, key=lambda record: record.at_ns)
        at_s = run.since_start_s(last.at_s)
        words = f"step {last.step}, batch {last.step_in_epoch} of epoch {last.epoch}"
        now_s = run.now_s if run.state is State.RUNNING else None
        ago = "" if now_s is None else f", {now_s - at_s:.1f} s ago"
        yield f"  last committed: {words}, in generation {last.generation}, at {at_s:.3f} s{ago}"


# ---- what happened


def _timeline(run: Run) -> list[str]:
    told = [(event.at_s, words) for event in run.events if (words := _told(run, event))]
    if not told:
        return []
    lines = [wrapped(f"{at_s:10.3f} s  {words}", _INDENT) for at_s, words in told]
    if len(lines) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        left_out = f"{'':{_INDENT}}… {len(lines) - 2 * half} more, in events.jsonl …"
        lines = [*lines[:half], left_out, *lines[-half:]]
    return ["what happened:", *lines]


def _told(run: Run, event: Event) -> str:
    """One event in words; empty for those that say nothing by themselves."""
    match event.kind:
        case "called":
            return _called(run, event)
        case "lost":
            return _lost(run, event)
        case "activated":
            return f"process {event.number('member')} stood by and is to take a place"
        case "asked":
            return f"{event.text('why')}: the run was to save its state and end"
        case "stopped":
            told = event.text("problem")
            saved = (
                f"could not be saved: {told}" if told else f"was saved in {event.text('directory')}"
            )
            return f"after {event.number('step')} steps the state {saved}"
        case "ended":
            return event.text("reason")
        case _:
            return ""


def _called(run: Run, event: Event) -> str:
    members, joining = event.numbers("members"), event.numbers("joining")
    generation = event.number("generation")
    if generation == 1:
        return f"{len(members)} processes are the first world"
    if not joining:
        return ""  # the loss is told
    if not any(e.number("generation") == generation for e in run.of("settled")):
        return f"{_processes(joining)} was called (generation {generation}); it came to nothing"
    words = f"{_processes(joining)} joined (generation {generation}, {len(members)} processes)"
    record = next(
        (
            record
            for member in joining
            if member in run.books
            for record in run.books[member].joins
            if record.generation == generation
        ),
        None,
    )
    if record is not None:
        words += f" at step {record.step}, with the state of process {record.giver}"
    return words + _pause(run, lambda record: record.generation >= generation, None)


def _lost(run: Run, event: Event) -> str:
    if event.is_true("is_consequence"):
        return f"{who(run, event)} ended because of it: {event.text('how')}"
    how = event.text("how")
    where = "" if how.startswith("stood still") else whereabouts(event)
    start_s = 0.0 if run.began is None else run.began.seconds("clock_s") or 0.0
    lost_s = start_s + event.at_s
    pause = _pause(run, lambda record: record.at_s > lost_s, lost_s)
    return f"{who(run, event)} was lost{where and ' '}{where}: {how}{pause}"


def _pause(run: Run, is_after: Callable[[Record], bool], at_s: float | None) -> str:
    """How long it took from one committed step to the next, around a point in the run; and from a
    moment."""
    pairs = [book.around(is_after) for book in run.timed_books]
    firsts = [first for _, first in pairs if first is not None]
    if not firsts:
        return ""
    first = min(firsts, key=lambda record: record.at_ns)
    befores = [record for record, _ in pairs if record is not None and record.at_ns < first.at_ns]
    words = f"; step {first.step} was committed"
    if at_s is not None:
        words += f" {first.at_s - at_s:.3f} s later"
    if befores:
        before = max(befores, key=lambda record: record.at_ns)
        comma = "," if at_s is not None else ""
        words += f"{comma} {first.at_s - before.at_s:.3f} s after step {before.step}"
    return words


def _processes(members: Sequence[int]) -> str:
    word = "process" if len(members) == 1 else "processes"
    return f"{word} {', '.join(map(str, members))}"


# ---- whether it is right


def _verdict(run: Run, problems: Sequence[str]) -> list[str]:
    if problems:
        shown = [wrapped(f"  {words}", 4) for words in problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            shown.append(f"  … and {len(problems) - _MOST_PROBLEMS} more")
        count = "one thing is" if len(problems) == 1 else f"{len(problems)} things are"
        return [f"history of commits: {count} wrong", *shown]
    if not _last_commits(run):
        return ["history of commits: no step was recorded"]
    return [
        "history of commits: every step was committed once, by all members of its world, and\n"
        "every sample of it counted once"
    ]
