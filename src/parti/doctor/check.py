"""Did every step count once, on every process that took part, and every sample of it?

Reads what each process has written of its own course and holds the books against one another. The
rules are spelled out in docs/records.md; the numbers here are theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from parti.doctor.book import BEGAN, COMMITTED, JOINED, Book, Record
from parti.doctor.run import Run, State, World

_MOST = 100

Row = Sequence[tuple[int, Record]]
"""Who has committed one step, with their records."""


def check(run: Run) -> list[str]:
    """What is wrong with the history of a run, in words; empty if nothing is."""
    found = _Findings()
    if run.books and run.began is None:
        found.add("events.jsonl is missing or damaged: who was to commit what is not known")
        return found.words
    absent = [member for world in run.worlds.values() for member in world.members]
    absent = sorted({member for member in absent if member not in run.books})
    if run.books and absent and run.num_hosts > 1:
        found.add(
            f"the commits of {_processes(absent)} are not in this directory, which other hosts do "
            "not share: nothing was checked. Bring their commits-*.bin here"
        )
        return found.words
    for book in run.books.values():
        for problem in book.problems:
            found.add(problem)
    for replica in sorted({record.replica for book in run.books.values() for record in book}):
        chains = {
            member: _follow(book, replica, found, _name(member, replica))
            for member, book in run.books.items()
        }
        for generation in sorted({g for chain in chains.values() for g in chain.stretches}):
            _Generation(run, replica, generation, chains, found).check()
        _check_generations(chains, found)
        for chain in chains.values():
            for record in chain.joins:
                _check_join(run, record, chain, chains, found)
    return found.words


class _Findings:
    """The words, and no more of them than anybody reads."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def add(self, words: str) -> None:
        if len(self.words) < _MOST:
            self.words.append(words)
        elif len(self.words) == _MOST:
            self.words.append(f"and more than these {_MOST}")


@dataclass(slots=True)
class _Stretch:
    """What one process has written in one generation."""

    begin: int
    end: int
    """Numbers of records."""
    num_commits: int = 0
    following: int | None = None
    """The step that is next after it."""


@dataclass(slots=True)
class _Chain:
    """The course of one replica in one process."""

    book: Book
    replica: int
    name: str
    stretches: dict[int, _Stretch] = field(default_factory=dict)
    joins: list[Record] = field(default_factory=list)
    returns: list[Record] = field(default_factory=list)
    """Where a loop was begun at a step that had been taken before."""

    def commits(self, generation: int) -> Iterator[Record]:
        stretch = self.stretches.get(generation)
        records = self.book.between(stretch.begin, stretch.end) if stretch else iter(())
        return (r for r in records if r.kind == COMMITTED and r.replica == self.replica)

    def following(self, generation: int) -> int | None:
        """Which step was next when that generation began."""
        before = [g for g in self.stretches if g < generation]
        return self.stretches[max(before)].following if before else None


def _name(member: int, replica: int) -> str:
    return f"process {member}" + (f", replica {replica}" if replica else "")


def _follow(book: Book, replica: int, found: _Findings, name: str) -> _Chain:
    """Rules 1 and 2: within one process steps follow one another, in generations that grow, and
    each takes the batch that is next in a loop that was begun."""
    chain = _Chain(book, replica, name)
    generation, following, previous = 0, None, None
    starts: set[int] = set()
    places: Counter[tuple[int, int]] = Counter()  # where each loop is, that was begun
    for number, record in enumerate(book, book.begin):
        if record.replica != replica:
            continue
        if record.generation < generation:
            found.add(
                f"{name}: step {record.step} is of generation {record.generation}, behind one of "
                f"generation {generation}"
            )
        generation = max(generation, record.generation)
        if record.generation not in chain.stretches:
            chain.stretches[record.generation] = _Stretch(number, number)
        stretch = chain.stretches[record.generation]
        stretch.end = number + 1
        if record.kind == BEGAN:
            starts.add(record.step)
            places[record.place] += 1
            if following is not None and record.step < following:
                chain.returns.append(record)
            following = record.step if following is None else following
        elif record.kind == JOINED:
            chain.joins.append(record)
            starts.clear()
            following, previous = record.step, None
        elif record.kind == COMMITTED:
            if record.step != following and record.step not in starts:
                found.add(_out_of_order(name, record, following, previous))
            if places.get(record.place):
                places[record.place] -= 1
            else:
                found.add(_out_of_place(name, record, previous))
            starts.clear()
            places[_place_after(record)] += 1
            stretch.num_commits += 1
            following, previous = record.step + 1, record
        stretch.following = following
    return chain


def _place_after(record: Record) -> tuple[int, int]:
    if record.is_last_of_epoch:
        return record.epoch + 1, 0
    return record.epoch, record.step_in_epoch + 1


def _out_of_order(name: str, record: Record, following: int | None, previous: Record | None) -> str:
    if following is None:
        return f"{name}: step {record.step} is committed before any loop was begun"
    if record.step >= following:
        missing = _steps(following, record.step - 1)
        return f"{name}: {missing} missing before step {record.step}"
    again = f"{name}: step {record.step} is committed again behind step {following - 1}"
    if previous is not None and previous.generation != record.generation:
        again += f", in generation {record.generation} after generation {previous.generation}"
    return again


def _steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _out_of_place(name: str, record: Record, previous: Record | None) -> str:
    took = f"{name}: step {record.step} took batch {record.step_in_epoch} of epoch {record.epoch}"
    if previous is None:
        return f"{took}, where no loop was begun"
    epoch, batch = _place_after(previous)
    return f"{took}; after step {previous.step} batch {batch} of epoch {epoch} was next"


class _Generation:
    """Rules 3 to 5: what the members of one world have committed together."""

    def __init__(
        self,
        run: Run,
        replica: int,
        generation: int,
        chains: Mapping[int, _Chain],
        found: _Findings,
    ) -> None:
        self._run = run
        self._replica = replica
        self._generation = generation
        self._chains = chains
        self._found = found
        self._writers = [
            member
            for member, chain in chains.items()
            if generation in chain.stretches and chain.stretches[generation].num_commits
        ]

    def check(self) -> None:
        if not self._writers:
            return
        world = self._run.worlds.get(self._generation)
        if world is None:
            self._found.add(
                f"generation {self._generation} was never called, and {_processes(self._writers)} "
                "committed steps in it"
            )
            world = World(members=tuple(self._writers))
        strangers = [member for member in self._writers if member not in world.members]
        if strangers:
            self._found.add(
                f"{_processes(strangers)} committed steps in generation {self._generation}, which "
                f"is that of {_processes(world.members)}"
            )
        self._check_ends(world)
        self._check_rows([member for member in world.members if member in self._writers], world)

    def _check_ends(self, world: World) -> None:
        """Rule 3: who is missing at the end of a generation was lost there."""
        most = max(
            self._chains[member].stretches[self._generation].num_commits for member in self._writers
        )
        for member in world.members:
            chain = self._chains.get(member)
            stretch = None if chain is None else chain.stretches.get(self._generation)
            short = most - (0 if stretch is None else stretch.num_commits)
            if short and not self._is_excused(member, short):
                self._found.add(self._missing(member, short, most))

    def _is_excused(self, member: int, short: int) -> bool:
        run, chain = self._run, self._chains.get(member)
        if chain is not None:
            later = [s for g, s in chain.stretches.items() if g > self._generation]
            if any(record.generation > self._generation for record in chain.joins):
                return short == 1  # it was left behind, and given the state again
            if any(stretch.num_commits for stretch in later):
                return False
            if chain.book.is_full:
                return True
        if member in run.lost:
            return short == 1
        if run.state is State.RUNNING:
            return True  # it was read before the others
        return run.exit_code != 0 and short == 1

    def _missing(self, member: int, short: int, most: int) -> str:
        """Words for a member with fewer commits than others."""
        richest = next(
            each
            for each in self._writers
            if self._chains[each].stretches[self._generation].num_commits == most
        )
        steps = [record.step for record in self._chains[richest].commits(self._generation)][-short:]
        words = (
            f"{_steps(steps[0], steps[-1])} committed in generation {self._generation}, and not by "
            f"process {member}, which is a member of it"
        )
        if member in self._run.lost:
            return f"{words}; of a lost process no more than its last record may be missing"
        chain = self._chains.get(member)
        again = None if chain is None else self._again(chain, steps[0])
        return words if again is None else f"{words}; it committed step {steps[0]} in {again}"

    def _again(self, chain: _Chain, step: int) -> str | None:
        for generation in sorted(g for g in chain.stretches if g > self._generation):
            if any(record.step == step for record in chain.commits(generation)):
                return f"generation {generation}"
        return None

    def _check_rows(self, members: Sequence[int], world: World) -> None:
        """The same step stands at the same place of every member's book."""
        streams = [self._chains[member].commits(self._generation) for member in members]
        for records in zip_longest(*streams):
            row = [(m, r) for m, r in zip(members, records, strict=True) if r is not None]
            if len({record.step for _, record in row}) > 1:
                told = ", ".join(f"process {m} step {r.step}" for m, r in row)
                self._found.add(
                    f"generation {self._generation}: members are at different steps: {told}"
                )
                return
            if len({record.shared for _, record in row}) > 1:
                self._tell_disagreement(row)
            num_missing = len(world.members) - len(row)
            self._check_runs(row, num_missing)
            self._check_samples(row)
            self._check_finishers(row, num_missing)

    def _tell_disagreement(self, row: Row) -> None:
        for words, values in (
            ("batches (epoch, number)", {record.place for _, record in row}),
            ("numbers of samples", {record.num_samples for _, record in row}),
            ("numbers of micro-batches", {record.num_micro_batches for _, record in row}),
            ("ends of the epoch", {record.is_last_of_epoch for _, record in row}),
        ):
            if len(values) > 1:
                told = ", ".join(map(str, sorted(values)))
                self._found.add(f"step {row[0][1].step}: members know different {words}: {told}")

    def _check_runs(self, row: Row, num_missing: int) -> None:
        """Rule 4: each micro-batch was somebody's, and nobody else's."""
        step, num = row[0][1].step, row[0][1].num_micro_batches
        gaps, at, last = 0, 0, -1
        for member, each in sorted(row, key=lambda pair: (pair[1].first, pair[1].end)):
            if each.first == each.end:
                continue  # a spare
            if each.first < at:
                self._found.add(
                    f"step {step}: {_micro_batches(each.first, min(at, each.end))} computed by "
                    f"process {last} and by process {member}"
                )
            gaps += each.first > at
            at, last = max(at, each.end), member
        gaps += at < num
        if at > num:
            self._found.add(f"step {step}: process {last} computed micro-batch {at - 1}, of {num}")
        # Each of those who are missing has computed one run of what is left.
        if gaps > num_missing:
            done = {number for _, each in row for number in range(each.first, each.end)}
            left = ", ".join(str(number) for number in range(num) if number not in done)
            self._found.add(f"step {step}: micro-batches {left} were computed by nobody")

    def _check_samples(self, row: Row) -> None:
        """Rule 5: a process counts the samples of its micro-batches, and the step all of them."""
        for member, each in row:
            held = _size(each)
            if each.num_samples_here != held:
                self._found.add(
                    f"step {each.step}: process {member} counted {each.num_samples_here} samples "
                    f"in micro-batches that hold {held} of the {each.num_samples}"
                )

    def _check_finishers(self, row: Row, num_missing: int) -> None:
        """Rule 3, too: what is done for a lost process is done once."""
        step = row[0][1].step
        finishers = [member for member, each in row if each.has_finished]
        if len(finishers) > 1:
            self._found.add(f"step {step}: {_processes(finishers)} have finished it for a lost one")
        elif finishers and not num_missing:
            self._found.add(
                f"step {step}: process {finishers[0]} has finished it for a lost one, and nobody "
                "is missing"
            )


def _micro_batches(first: int, end: int) -> str:
    if end - first == 1:
        return f"micro-batch {first} was"
    return f"micro-batches {first} to {end - 1} were"


def _size(record: Record) -> int:
    """How many samples the micro-batches of a record hold: the sizes of a step's differ by one at
    most, and the larger come first."""
    size, num_larger = divmod(record.num_samples, max(1, record.num_micro_batches))
    larger = min(record.end, num_larger) - min(record.first, num_larger)
    return (record.end - record.first) * size + larger


def _check_generations(chains: Mapping[int, _Chain], found: _Findings) -> None:
    """Over all books: a step is committed in one generation, unless the training has gone back."""
    returns = [record for chain in chains.values() for record in chain.returns]
    first: dict[int, tuple[int, int]] = {}
    told: set[tuple[int, int]] = set()
    for member, chain in chains.items():
        for generation in chain.stretches:
            for record in chain.commits(generation):
                before, other = first.setdefault(record.step, (generation, member))
                low, high = min(before, generation), max(before, generation)
                has_returned = any(
                    each.step <= record.step and low <= each.generation <= high for each in returns
                )
                if low < high and not has_returned and (before, generation) not in told:
                    told.add((before, generation))
                    found.add(
                        f"step {record.step} was committed in generation {before} by process "
                        f"{other}, and in generation {generation} by process {member}"
                    )


def _check_join(
    run: Run, record: Record, chain: _Chain, chains: Mapping[int, _Chain], found: _Findings
) -> None:
    """Rule 6: a process that comes begins where its giver is, and where all others are."""
    generation, giver = record.generation, record.giver
    words = f"{chain.name} was given the state for step {record.step} in generation {generation}"
    world = run.worlds.get(generation)
    if world is None or chain.book.member not in world.joining:
        found.add(f"{words}, which it was not called to join")
        return
    if giver not in world.members or giver in world.joining:
        found.add(f"{words} by process {giver}, which did not hold it")
        return
    there = chains.get(giver)
    following = None if there is None else there.following(generation)
    if following is not None and following != record.step:
        found.add(f"{words} by process {giver}, which was at step {following}")
    for member in world.members:
        other = chains.get(member)
        if other is None or member in world.joining or member == giver:
            continue
        ahead = other.following(generation)
        if ahead is not None and ahead > record.step:
            found.add(f"{words}, when process {member} was at step {ahead}")


def _processes(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"process {members[0]}"
    return f"processes {', '.join(map(str, members[:-1]))} and {members[-1]}"
