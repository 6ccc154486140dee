"""The checker finds every way in which a history can be wrong, and nothing in one that is right."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.doctor.check import check
from parti.doctor.run import State, read_run

RECORD = struct.Struct("<BBHIqq10I")
BEGAN, JOINED, COMMITTED = 2, 3, 4
STEPS_AN_EPOCH = 5
SAMPLES, MICRO_BATCHES = 50, 6


@dataclass(frozen=True)
class Entry:
    """One record, in the words of docs/records.md."""

    kind: int
    step: int
    generation: int = 1
    replica: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    is_last: bool = False
    num_samples: int = 0
    num_micro_batches: int = 0
    first: int = 0
    end: int = 0
    num_samples_here: int = 0
    has_finished: bool = False
    giver: int = 0

    def pack(self, mark: int) -> bytes:
        return RECORD.pack(
            self.kind, self.is_last + 2 * self.has_finished, self.replica, self.generation,
            1000 + mark, self.step, self.epoch, self.step_in_epoch, self.num_samples,
            self.num_micro_batches, self.first, self.end, self.num_samples_here, self.giver, 0,
            mark,
        )  # fmt: skip


def began(step: int, generation: int = 1, at: int | None = None, replica: int = 0) -> Entry:
    epoch, number = divmod(step if at is None else at, STEPS_AN_EPOCH)
    return Entry(BEGAN, step, generation, replica, epoch, number)


def sizes(num_samples: int) -> list[int]:
    """Of the micro-batches: they differ by one at most, the larger first."""
    return [len(range(n, num_samples, MICRO_BATCHES)) for n in range(MICRO_BATCHES)]


def commit(step: int, generation: int, rank: int, size: int, at: int | None = None) -> Entry:
    epoch, number = divmod(step if at is None else at, STEPS_AN_EPOCH)
    is_last = number == STEPS_AN_EPOCH - 1
    num_samples = 13 if is_last else SAMPLES
    first, end = MICRO_BATCHES * rank // size, MICRO_BATCHES * (rank + 1) // size
    return Entry(
        COMMITTED, step, generation, 0, epoch, number, is_last, num_samples, MICRO_BATCHES,
        first, end, sum(sizes(num_samples)[first:end]),
    )  # fmt: skip


@dataclass
class History:
    """A run as its files tell it, to be written down."""

    world_size: int
    books: dict[int, list[Entry]] = field(default_factory=dict)
    events: list[dict[str, object]] = field(default_factory=list)
    exit_code: int | None = 0
    ends: bool = True

    def call(self, generation: int, members: list[int], joining: tuple[int, ...] = ()) -> None:
        self.tell("called", generation=generation, members=members, joining=list(joining))

    def lose(self, member: int) -> None:
        self.tell("lost", member=member, rank=0, how="killed by SIGKILL")

    def tell(self, kind: str, **content: object) -> None:
        self.events.append({"kind": kind, "at_s": float(len(self.events)), **content})

    def step(self, step: int, generation: int, members: list[int]) -> None:
        for rank, member in enumerate(members):
            self.books[member].append(commit(step, generation, rank, len(members)))

    def write(self, directory: Path) -> Path:
        start = {"kind": "began", "at_s": 0.0, "job": "j", "host": "h", "clock_s": 0.0}
        events = [{**start, "world_size": self.world_size}, *self.events]
        if self.ends:
            events.append({"kind": "ended", "at_s": 99.0, "exit_code": self.exit_code})
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / "events.jsonl").write_text(lines)
        for member, entries in self.books.items():
            opened = struct.pack("<BBHIq8s24sqII", 1, 0, 0, member, 9, b"parti/1\n", b"j", 1, 0, 1)
            packed = [entry.pack(mark) for mark, entry in enumerate(entries, 2)]
            whole = opened + b"".join(packed) + bytes(640)
            (directory / f"commits-{member}.bin").write_bytes(whole)
        return directory

    def check(self) -> list[str]:
        with tempfile.TemporaryDirectory() as directory:
            return check(read_run(self.write(Path(directory))))


def usual() -> History:
    """Three processes; 1 is lost as it has done its part of step 6, for which 0 finishes it; 3
    takes its place at step 10. Fifteen steps, three epochs."""
    history = History(3, {member: [] for member in (0, 1, 2, 3)})
    history.call(1, [0, 1, 2])
    for member in (0, 1, 2):
        history.books[member].append(began(0))
    for step in range(7):
        history.step(step, 1, [0, 1, 2])
    history.books[1].pop()
    history.books[0][-1] = replace(history.books[0][-1], has_finished=True)
    history.lose(1)
    history.call(2, [0, 2])
    for step in range(7, 10):
        history.step(step, 2, [0, 2])
    history.call(3, [0, 2, 3], (3,))
    history.books[3] += [Entry(JOINED, 10, 3, giver=0), began(10, 3)]
    for step in range(10, 15):
        history.step(step, 3, [0, 2, 3])
    return history


def find(history: History, member: int, step: int) -> int:
    """Where a process has committed a step."""
    return next(
        number
        for number, entry in enumerate(history.books[member])
        if (entry.kind, entry.step) == (COMMITTED, step)
    )


def change(history: History, member: int, at_step: int, /, **values: object) -> None:
    number = find(history, member, at_step)
    entry = history.books[member][number]
    history.books[member][number] = replace(entry, **values)  # type: ignore[arg-type]


def drop(history: History, member: int, *steps: int) -> None:
    for step in steps:
        del history.books[member][find(history, member, step)]


# ---- what is right


def test_a_loss_and_a_join_are_right() -> None:
    assert usual().check() == []


def test_nothing_recorded_is_nothing_wrong() -> None:
    assert History(3).check() == []


def test_one_process_alone_is_its_own_world() -> None:
    history = History(1, {0: [began(0), *(commit(step, 1, 0, 1) for step in range(12))]})
    assert history.check() == []


def test_worlds_that_nobody_calls_are_the_first() -> None:
    """Several hosts, or `recovery=False`: no world follows, and none is called."""
    history = usual()
    history.events.clear()
    for book in history.books.values():
        book[:] = [entry for entry in book if entry.step < 5]
    del history.books[3]
    assert history.check() == []


def test_who_was_lost_may_have_written_all_it_did() -> None:
    history = usual()
    history.books[1].append(commit(6, 1, 1, 3))
    change(history, 0, 6, has_finished=False)
    assert history.check() == []


def test_a_newcomer_may_be_lost_before_its_first_step() -> None:
    history = usual()
    history.events = history.events[:4]
    history.lose(3)
    history.call(4, [0, 2])
    history.books[3] = history.books[3][:2]
    for member in (0, 2):
        drop(history, member, 11, 12, 13, 14)
    history.step(11, 4, [0, 2])
    assert history.check() == []


@pytest.mark.parametrize("exit_code", [1, 137, None])
def test_a_job_that_is_ended_ends_in_the_middle_of_a_step(exit_code: int | None) -> None:
    history = usual()
    history.exit_code = exit_code
    drop(history, 2, 14)
    assert history.check() == []


def test_a_supervisor_that_is_gone_ends_it_too(tmp_path: Path) -> None:
    history = usual()
    history.ends = False
    drop(history, 2, 14)
    run = read_run(history.write(tmp_path))
    assert (run.state, run.exit_code) == (State.GONE, None)
    assert check(run) == []


def test_books_of_a_run_that_goes_on_are_read_one_after_the_other(tmp_path: Path) -> None:
    import fcntl

    history = usual()
    history.ends = False
    drop(history, 0, 12, 13, 14)
    history.write(tmp_path)
    with (tmp_path / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        run = read_run(tmp_path)
        assert run.state is State.RUNNING
        assert check(run) == []


def test_a_training_may_go_back_and_begin_again() -> None:
    """`trainer.load` in the middle of a script: all say so, and a loop begins there."""
    history = usual()
    for rank, member in enumerate((0, 2, 3)):
        again = [commit(step, 3, rank, 3) for step in range(6, 9)]
        history.books[member] += [began(6, 3), *again]
    assert history.check() == []


def test_loops_may_take_turns() -> None:
    history = History(1, {0: [began(0), began(0, at=0)]})
    history.books[0] += [commit(step, 1, 0, 1, at=step // 2) for step in range(10)]
    assert history.check() == []


def test_each_replica_of_a_process_has_its_own_steps() -> None:
    history = usual()
    for book in history.books.values():
        book[:] = [each for entry in book for each in (entry, replace(entry, replica=1))]
    assert history.check() == []


def test_a_process_without_micro_batches_takes_part() -> None:
    history = usual()
    for member, first, end in ((0, 0, 3), (2, 3, 6), (3, 6, 6)):
        here = sum(sizes(SAMPLES)[first:end])
        change(history, member, 12, first=first, end=end, num_samples_here=here)
    assert history.check() == []


# ---- what is wrong

Wrong = Callable[[History], None]


def _again(history: History) -> None:
    number = find(history, 2, 8)
    history.books[2].insert(number, history.books[2][number])


def _redone_in_the_next_generation(history: History) -> None:
    """2 does not count step 6 with 0, and does it once more."""
    drop(history, 2, 6)
    history.books[2].insert(find(history, 2, 7), replace(commit(6, 2, 1, 2)))


def _done_twice(history: History) -> None:
    history.books[2].insert(find(history, 2, 7), commit(6, 2, 1, 2))


def _no_loop(history: History) -> None:
    del history.books[2][0]


def _torn(history: History) -> None:
    """The mark of a record in the middle: number 4 in place of 5."""
    book = history.books[2]
    write = history.write

    def torn(directory: Path) -> Path:
        write(directory)
        path = directory / "commits-2.bin"
        content = bytearray(path.read_bytes())
        content[4 * 64 + 60] = 4
        path.write_bytes(content)
        return directory

    assert len(book) > 5
    history.write = torn  # type: ignore[method-assign]


def _edit(member: int, at_step: int, /, **values: object) -> Wrong:
    return lambda history: change(history, member, at_step, **values)


def _joined(**values: object) -> Wrong:
    def wrong(history: History) -> None:
        history.books[3][0] = replace(history.books[3][0], **values)  # type: ignore[arg-type]

    return wrong


def _ahead(history: History) -> None:
    """The giver is given one more step before the newcomer comes, and nobody else is."""
    change(history, 0, 10, generation=2)


CASES: dict[str, tuple[Wrong, str]] = {
    # 1: steps follow one another in a process
    "a step is left out": (
        lambda history: drop(history, 2, 8),
        "process 2: step 8 is missing before step 9",
    ),
    "a step is there twice": (_again, "process 2: step 8 is committed again behind step 8"),
    "a step is in two generations": (
        _done_twice,
        "process 2: step 6 is committed again behind step 6, in generation 2 after generation 1",
    ),
    "a generation goes back": (
        _edit(2, 8, generation=1),
        "process 2: step 8 is of generation 1, behind one of generation 2",
    ),
    "steps without a loop": (
        _no_loop,
        "process 2: step 0 is committed before any loop was begun",
    ),
    # 2: batches follow one another
    "a batch is left out": (
        _edit(2, 8, step_in_epoch=4),
        "process 2: step 8 took batch 4 of epoch 1; after step 7 batch 3 of epoch 1 was next",
    ),
    "an epoch goes on behind its end": (
        _edit(2, 4, is_last=False),
        "process 2: step 5 took batch 0 of epoch 1; after step 4 batch 5 of epoch 0 was next",
    ),
    # 3: all members commit
    "one does not count a step with the others": (
        _redone_in_the_next_generation,
        "step 6 is committed in generation 1, and not by process 2, which is a member of it; it "
        "committed step 6 in generation 2",
    ),
    "the end is missing": (
        lambda history: drop(history, 2, 13, 14),
        "steps 13 to 14 are committed in generation 3, and not by process 2, which is a member",
    ),
    "a lost one lacks more than its last": (
        lambda history: drop(history, 1, 5),
        "not by process 1, which is a member of it; of a lost process no more than its last record",
    ),
    "a book is missing": (
        lambda history: history.books.pop(2) and None,
        "steps 0 to 6 are committed in generation 1, and not by process 2",
    ),
    "members are at different steps": (
        _edit(2, 8, step=9),
        "generation 2: members are at different steps: process 0 step 8, process 2 step 9",
    ),
    "a stranger": (
        lambda history: history.books[1].append(commit(7, 2, 1, 2)),
        "process 1 committed steps in generation 2, which is that of processes 0 and 2",
    ),
    "a world that nobody called": (
        lambda history: history.events.pop(2) and None,
        "generation 2 was never called, and processes 0 and 2 committed steps in it",
    ),
    "two have finished a step": (
        _edit(2, 6, has_finished=True),
        "step 6: processes 0 and 2 have finished it for a lost one",
    ),
    "a step is finished for nobody": (
        _edit(2, 8, has_finished=True),
        "step 8: process 2 has finished it for a lost one, and nobody is missing",
    ),
    "members know different sizes": (
        _edit(2, 8, num_samples=49, num_samples_here=24),
        "step 8: members know different numbers of samples: 49, 50",
    ),
    "members know different batches": (
        _edit(2, 8, epoch=2),
        "step 8: members know different batches (epoch, number): (1, 3), (2, 3)",
    ),
    "members know different ends": (
        _edit(2, 8, is_last=True),
        "step 8: members know different ends of the epoch: False, True",
    ),
    # 4: micro-batches
    "a micro-batch is computed twice": (
        _edit(2, 8, first=2, num_samples_here=33),
        "step 8: micro-batch 2 was computed by process 0 and by process 2",
    ),
    "a micro-batch is computed by nobody": (
        _edit(2, 8, first=4, num_samples_here=16),
        "step 8: micro-batches 3 were computed by nobody",
    ),
    "two runs are left for one lost process": (
        _edit(0, 6, first=1, num_samples_here=9),
        "step 6: micro-batches 0, 2, 3 were computed by nobody",
    ),
    "a micro-batch that is not there": (
        _edit(2, 8, end=7),
        "step 8: process 2 computed micro-batch 6, of 6",
    ),
    "members know different numbers of micro-batches": (
        _edit(2, 8, num_micro_batches=7),
        "step 8: members know different numbers of micro-batches: 6, 7",
    ),
    # 5: samples
    "a sample is left out": (
        _edit(2, 8, num_samples_here=23),
        "step 8: process 2 counted 23 samples in micro-batches that hold 24 of the 50",
    ),
    # 6: joining
    "a newcomer begins too early": (
        lambda history: drop(history, 3, 10),
        "process 3: step 10 is missing before step 11",
    ),
    "a newcomer is behind its giver": (
        _joined(step=9),
        "process 3 was given the state for step 9 in generation 3 by process 0, which was at step "
        "10",
    ),
    "the giver has no state": (
        _joined(giver=1),
        "process 3 was given the state for step 10 in generation 3 by process 1, which did not",
    ),
    "the giver is ahead": (_ahead, "by process 0, which was at step 11"),
    "nobody called it": (
        _joined(generation=2),
        "process 3 was given the state for step 10 in generation 2, which it was not called to",
    ),
    # files
    "a record is torn": (_torn, "commits-2.bin: record 4 is torn, and record 5 follows it"),
    "events are missing": (
        lambda history: setattr(history, "write", _without_events(history)),
        "events.jsonl is missing or damaged",
    ),
    "a book is another's": (
        lambda history: setattr(history, "write", _renamed(history)),
        "commits-7.bin was written by process 3",
    ),
}


def _without_events(history: History) -> Callable[[Path], Path]:
    write = history.write

    def without(directory: Path) -> Path:
        (write(directory) / "events.jsonl").unlink()
        return directory

    return without


def _renamed(history: History) -> Callable[[Path], Path]:
    write = history.write

    def renamed(directory: Path) -> Path:
        write(directory)
        (directory / "commits-3.bin").rename(directory / "commits-7.bin")
        return directory

    return renamed


@pytest.mark.parametrize("name", CASES)
def test_every_rule_is_held(name: str) -> None:
    wrong, words = CASES[name]
    history = usual()
    wrong(history)
    found = history.check()
    assert any(words in each for each in found), found


def test_a_wrecked_history_does_not_fill_the_screen() -> None:
    history = History(1, {0: [began(0), *(commit(2 * step, 1, 0, 1) for step in range(500))]})
    assert len(history.check()) == 101


# ---- any history, and any one thing wrong with it


@dataclass
class Play:
    """A training, played through with losses and joins as they are drawn."""

    history: History
    members: list[int]
    next_member: int
    generation: int = 1
    step: int = 0

    def advance(self, what: str, which: int) -> None:
        if what == "step":
            self.take(lost=None)
        elif what == "join":
            self.join(giver=self.members[0])
        elif len(self.members) > 1:
            self.lose(self.members[which % len(self.members)], what)

    def take(self, lost: int | None) -> None:
        self.history.step(self.step, self.generation, self.members)
        self.step += 1

    def lose(self, member: int, when: str) -> None:
        if when != "between":  # it has done its part of the step, and the others finish it
            self.take(lost=member)
            if when == "unwritten":
                self.history.books[member].pop()
        self.history.lose(member)
        self.members = [each for each in self.members if each != member]
        if when == "unwritten":
            book = self.history.books[self.members[0]]
            book[-1] = replace(book[-1], has_finished=True)
        self.call()

    def join(self, giver: int) -> None:
        member, self.next_member = self.next_member, self.next_member + 1
        self.members = [*self.members, member]
        self.call(member)
        self.history.books[member] = [
            Entry(JOINED, self.step, self.generation, giver=giver),
            began(self.step, self.generation),
        ]

    def call(self, *joining: int) -> None:
        self.generation += 1
        self.history.call(self.generation, self.members, joining)


@st.composite
def histories(draw: st.DrawFn) -> History:
    size = draw(st.integers(1, 4))
    history = History(size, {member: [began(0)] for member in range(size)})
    history.call(1, list(range(size)))
    play = Play(history, list(range(size)), size)
    deeds = st.sampled_from(["step"] * 6 + ["join", "between", "written", "unwritten"])
    for _ in range(draw(st.integers(0, 25))):
        play.advance(draw(deeds), draw(st.integers(0, 7)))
    return history


@given(histories())
def test_any_history_of_losses_and_joins_is_right(history: History) -> None:
    assert history.check() == []


CHANGED = {
    COMMITTED: (
        "step", "generation", "epoch", "step_in_epoch", "num_samples", "num_micro_batches",
        "first", "end", "num_samples_here",
    ),
    JOINED: ("step", "generation"),
}  # fmt: skip


def _mutations(history: History) -> Iterator[tuple[int, int, str, int]]:
    """Every small change of one record that nothing could explain."""
    for member, book in history.books.items():
        for number, entry in enumerate(book):
            for name in CHANGED.get(entry.kind, ()):
                for by in (-1, 1):
                    value = getattr(entry, name) + by
                    if value >= 0 and not _is_explained(history, entry, name, value):
                        yield member, number, name, by


def _is_explained(history: History, entry: Entry, name: str, value: int) -> bool:
    """By the one record of a lost process that may be missing: nobody else knows how large the
    step was; and it may have taken part in one more step, without micro-batches."""
    lost = {event["member"] for event in history.events if event["kind"] == "lost"}
    worlds = {e["generation"]: e["members"] for e in history.events if e["kind"] == "called"}
    if name == "generation":
        return bool(lost.intersection(worlds.get(value, ())))  # type: ignore[arg-type]
    if name in ("num_samples", "num_micro_batches"):
        key = (COMMITTED, entry.step, entry.generation)
        everyones = [
            (e.kind, e.step, e.generation) for book in history.books.values() for e in book
        ]
        return everyones.count(key) < len(worlds[entry.generation])  # type: ignore[arg-type]
    return False


@settings(max_examples=100)
@given(histories(), st.data())
def test_any_one_thing_wrong_is_found(history: History, data: st.DataObject) -> None:
    every = list(_mutations(history))
    if not every:
        return
    member, number, name, by = data.draw(st.sampled_from(every))
    wrong = copy.deepcopy(history)
    entry = wrong.books[member][number]
    value = getattr(entry, name) + by
    wrong.books[member][number] = replace(entry, **{name: value})
    assert wrong.check() != [], f"{name} {by:+} of record {number} of process {member}"
