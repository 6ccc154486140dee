"""The description of a cluster: named jobs, each a list of task addresses. A pure value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from parti.errors import ConfigError

Tasks: TypeAlias = Sequence[str] | Mapping[int, str] | Mapping[str, str]
"""The addresses of one job: in order, or by task index (0, 1, 2, … without a gap)."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/,]+):([0-9]{1,5})")


def is_address(text: str) -> bool:
    """Whether `text` is host:port, with an IPv6 host in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[1]) <= 65535


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ClusterSpec:
    """Jobs and the addresses of their tasks, as tf.distribute users write them.

    >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> spec.task_address("worker", 1)
    'c:2222'
    """

    _jobs: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(self, jobs: Mapping[str, Tasks]) -> None:
        if not isinstance(jobs, Mapping):
            raise ConfigError(
                f"ClusterSpec got {type(jobs).__name__}: expected a mapping of job names to lists "
                'of addresses. Write it like {"worker": ["host0:2222", "host1:2222"]}.'
            )
        # Sorted, so that two spellings of one cluster are one value with one hash.
        ordered = tuple(sorted((_job_name(job), _addresses(job, jobs[job])) for job in jobs))
        _forbid_duplicates(ordered)
        object.__setattr__(self, "_jobs", ordered)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """Read the form `as_dict` has in JSON."""
        try:
            jobs = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"The cluster description is not JSON: {error}. Expected an object like "
                '{"worker": ["host0:2222", "host1:2222"]}.'
            ) from None
        return cls(jobs)

    @property
    def jobs(self) -> Mapping[str, tuple[str, ...]]:
        """Job names to task addresses, in the order of names."""
        return MappingProxyType(dict(self._jobs))

    def num_tasks(self, job: str) -> int:
        """How many tasks `job` has."""
        return len(self._tasks(job))

    def task_address(self, job: str, index: int) -> str:
        """The host:port of one task."""
        tasks = self._tasks(job)
        if not 0 <= index < len(tasks):
            raise ConfigError(
                f"Job {job!r} has no task {index}: expected an index from 0 to {len(tasks) - 1}."
            )
        return tasks[index]

    def as_dict(self) -> dict[str, list[str]]:
        """A fresh dictionary of lists, fit for JSON and for `ClusterSpec(...)`."""
        return {job: list(tasks) for job, tasks in self._jobs}

    def _tasks(self, job: str) -> tuple[str, ...]:
        for name, tasks in self._jobs:
            if name == job:
                return tasks
        names = ", ".join(name for name, _ in self._jobs) or "none at all"
        raise ConfigError(f"The cluster has no job {job!r}: its jobs are {names}.")

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _job_name(job: object) -> str:
    if not isinstance(job, str) or not _NAME.fullmatch(job):
        raise ConfigError(
            f"Job name {job!r}: expected letters, digits, '_', '-' or '.', like 'worker'."
        )
    return job


def _addresses(job: str, tasks: object) -> tuple[str, ...]:
    if isinstance(tasks, Mapping):
        listed = _in_index_order(job, tasks)
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        listed = list(tasks)
    else:
        raise ConfigError(
            f"Job {job!r} is {tasks!r}: expected a list of addresses. "
            f'Write it like ["host0:2222", "host1:2222"].'
        )
    addresses: list[str] = []
    for index, address in enumerate(listed):
        if not isinstance(address, str) or not is_address(address):
            raise ConfigError(
                f"Task {index} of job {job!r} is {address!r}: expected host:port with a port "
                "from 1 to 65535, like 'host0:2222' or '[2001:db8::1]:2222'."
            )
        addresses.append(address)
    return tuple(addresses)


def _in_index_order(job: str, tasks: Mapping[object, object]) -> list[object]:
    # JSON has string keys only, so "0" is as good as 0.
    by_index = {str(key): address for key, address in tasks.items()}
    expected = [str(index) for index in range(len(tasks))]
    if sorted(by_index) != sorted(expected):
        raise ConfigError(
            f"Job {job!r} has tasks {', '.join(sorted(by_index))}: expected the indices 0 to "
            f"{len(tasks) - 1} without a gap. Name the address of every task."
        )
    return [by_index[index] for index in expected]


def _forbid_duplicates(jobs: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    seen: dict[str, str] = {}
    for job, tasks in jobs:
        for index, address in enumerate(tasks):
            task = f"task {index} of job {job!r}"
            if address in seen:
                raise ConfigError(
                    f"{address} is the address of both {seen[address]} and {task}: "
                    "expected one task at each address. Give each its own host or port."
                )
            seen[address] = task
