"""One training on hosts that come and go, and what its records say while it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from parti.doctor.book import COMMITTED, Book, read_book
from parti.testing import NO_FAULTS, FaultScript

from .hosts import Host, until

TRAINING = Path(__file__).with_name("training.py")
EPOCHS = 12
DEADLINE_S = 100.0
PORT = 29500


class Fleet:
    def __init__(
        self,
        hosts: Sequence[Host],
        directory: Path,
        *,
        store: str = "",
        nodes: str = "1:4",
        rest_s: float = 0.1,
        patience_s: float = 10.0,
        faults: FaultScript = NO_FAULTS,
        shares_runs: bool = False,
        epochs: int = EPOCHS,
        **variables: str,
    ) -> None:
        """`store`: an etcd's address; without one the first host serves the store. `rest_s`: after
        each step, until `finish`."""
        self.hosts = hosts
        self._directory = directory
        self._store = store
        self._nodes = nodes
        self._epochs = epochs
        self._runs = directory / "runs" if shares_runs else None
        self._hurry = directory / "hurry"
        self._environ = {
            "PATIENCE": str(patience_s),
            "PARTI_FAULTS": str(faults),
            "REST_S": str(rest_s),
            "HURRY_FILE": str(self._hurry),
            **variables,
        }

    def begin(self, index: int, processes: int = 1, **variables: str) -> None:
        address = self._store or f"{self.hosts[index].address}:{PORT}"
        self._run(index, processes, ("--nodes", self._nodes, "--address", address), variables)

    def join(self, index: int, processes: int = 1, **variables: str) -> None:
        address = self._store or f"{self.hosts[0].address}:{PORT}"
        self._run(index, processes, ("--join", address), variables)

    def _run(
        self, index: int, processes: int, options: tuple[str, ...], variables: dict[str, str]
    ) -> None:
        runs = () if self._runs is None else ("--runs-dir", str(self._runs))
        before = self._num_records(index)
        self.hosts[index].run(
            "-n", str(processes), "--name", "fleet", *runs, *options,
            script=TRAINING,
            arguments=(str(self._epochs), str(self._directory / "out")),
            environ={**self._environ, **variables},
        )  # fmt: skip
        # Hosts have the numbers in which they come.
        until(
            lambda: self._num_records(index) > before,
            DEADLINE_S,
            lambda: f"host {index} did not come\n{self.hosts[index].said}",
        )

    def finish(self, *indices: int) -> str:
        """Let it come to its end there; what all who are there then have found."""
        self._hurry.touch()
        for index in indices:
            code = self.hosts[index].wait(DEADLINE_S)
            assert code == 0, f"host {index}: {code}\n{self.hosts[index].said}"
        assert len(set(self.found.values())) == 1, self.found
        return next(iter(self.found.values()))

    @property
    def found(self) -> dict[int, str]:
        return {int(path.suffix[1:]): path.read_text() for path in self._directory.glob("out.*")}

    # ---- records

    def _run_directory(self, index: int) -> Path:
        runs = self.hosts[index].directory / "runs" if self._runs is None else self._runs
        return runs / "fleet"

    def _num_records(self, index: int) -> int:
        return len(list(self._run_directory(index).glob("events*.jsonl")))

    def events(self, index: int) -> Iterator[dict[str, object]]:
        """Of all supervisors that this host has had."""
        for path in sorted(self._run_directory(index).glob("events*.jsonl")):
            for line in path.read_text().splitlines():
                yield json.loads(line)

    def generation(self, index: int) -> int:
        """Of the world that has settled last, as this host knows."""
        kinds = [e["generation"] for e in self.events(index) if e["kind"] == "settled"]
        return max((each for each in kinds if isinstance(each, int)), default=0)

    def world(self, index: int) -> set[int]:
        """Its members."""
        newest = self.generation(index)
        for event in self.events(index):
            if event["kind"] == "called" and event["generation"] == newest:
                members = event["members"]
                assert isinstance(members, list)
                return set(members)
        return set()

    def await_world(self, index: int, members: set[int], within_s: float = DEADLINE_S) -> None:
        def is_there() -> bool:
            process = self.hosts[index].process
            assert process is None or process.poll() is None, self.hosts[index].said
            return self.world(index) == members

        until(
            is_there,
            within_s,
            lambda: f"no world of {members}, but {self.world(index)}\n{self.hosts[index].said}",
        )

    def await_steps(self, index: int, count: int = 3) -> int:
        """Until that many more have been committed there; the last."""
        before = self.last_step(index)
        until(
            lambda: self.last_step(index) >= before + count,
            DEADLINE_S,
            lambda: f"it stands at step {before}\n{self.hosts[index].said}",
        )
        return self.last_step(index)

    def await_words(self, index: int, words: str) -> None:
        host = self.hosts[index]
        until(lambda: words in host.said, DEADLINE_S, lambda: f"not said: {words}\n{host.said}")

    def workers(self, index: int) -> dict[int, int]:
        """Process ids, by member, of all that were started there."""
        found = {}
        for event in self.events(index):
            if event["kind"] == "started":
                member, pid = event["member"], event["pid"]
                assert isinstance(member, int) and isinstance(pid, int)
                found[member] = pid
        return found

    def _books(self, index: int) -> Iterator[Book]:
        for path in self._run_directory(index).glob("commits-*.bin"):
            number = re.fullmatch(r"commits-(\d+)\.bin", path.name)
            assert number is not None
            book = read_book(path, int(number[1]), None)
            if book is not None:
                yield book

    def last_step(self, index: int) -> int:
        """That was committed there."""
        return max((book.last.step for book in self._books(index) if book.last), default=-1)

    def commits(self, index: int) -> dict[int, int]:
        """In which generation each step was committed there."""
        return {
            record.step: record.generation
            for book in self._books(index)
            for record in book
            if record.kind == COMMITTED
        }

    def gathered(self) -> Path:
        """The records of all hosts in one directory."""
        if self._runs is not None:
            return self._runs / "fleet"
        into = self._directory / "gathered"
        into.mkdir(exist_ok=True)
        for index in range(len(self.hosts)):
            for path in self._run_directory(index).glob("*"):
                if path.suffix in (".jsonl", ".bin", ".json"):
                    (into / path.name).write_bytes(path.read_bytes())
        return into
