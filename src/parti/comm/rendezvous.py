"""How ranks that know nothing of one another hand around a few bytes, once, before any comm exists.

A *meeting* is a function: a topic and my bytes in, everybody's bytes out, in rank order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from parti.comm.wait import name_ranks
from parti.errors import CommError, CommTimeout, ConfigError

Meeting = Callable[[str, bytes], tuple[bytes, ...]]

_NAP_S = 0.002


class KeyValue(Protocol):
    """The part of a store that a meeting needs."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, deadline_s: float) -> bytes:
        """Wait for the key; raise TimeoutError when it does not come."""
        ...


def meeting_in(store: KeyValue, rank: int, size: int, patience_s: float) -> Meeting:
    def meet(topic: str, mine: bytes) -> tuple[bytes, ...]:
        store.set(f"{topic}/{rank}", mine)
        started = time.monotonic()
        found: list[bytes] = []
        for other in range(size):
            left = patience_s - (time.monotonic() - started)
            try:
                found.append(store.get(f"{topic}/{other}", max(left, 0.001)))
            except TimeoutError:
                raise CommTimeout(
                    f"rank {rank} waited {patience_s:.0f} s at the start for {name_ranks([other])} "
                    f"of {size}. It was not started, cannot reach the rendezvous, or is still "
                    "loading; raise `patience_s` in the last case."
                ) from None
        return tuple(found)

    return meet


class Shelf:
    """Keys of one kind in a store that holds others as well."""

    def __init__(self, store: KeyValue, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline_s: float) -> bytes:
        return self._store.get(self._prefix + key, deadline_s)


class Directory:
    """A store of one host: a file for each key, written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: bytes) -> None:
        name = key.replace("/", ".")
        draft = self._path / f".{name}.{os.getpid()}"
        draft.write_bytes(value)
        draft.rename(self._path / name)

    def get(self, key: str, deadline_s: float) -> bytes:
        path = self._path / key.replace("/", ".")
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                return path.read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(key) from None
                if not self._path.is_dir():
                    raise CommTimeout(
                        f"the rendezvous directory {self._path} is gone: the launcher has ended."
                    ) from None
                time.sleep(_NAP_S)


class TorchStore:
    """The store at the master address that torchrun, MPI and Slurm jobs agree on."""

    def __init__(self, host: str, port: int, job: str, *, is_host: bool, patience_s: float) -> None:
        """`job` keeps apart the attempts of a job that share one store."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(
                host,
                port,
                is_master=is_host,
                wait_for_workers=False,
                timeout=timedelta(seconds=patience_s),
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0].removesuffix(".")
            if is_host:
                fact = f"rank 0 cannot open the store at port {port}: {reason}."
                remedy = "Set MASTER_PORT to a free port, the same for every rank."
            else:
                fact = f"cannot reach rank 0's store at {host}:{port}: {reason}."
                remedy = (
                    "See that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are its "
                    "host and port; raise `patience_s` if it is still loading."
                )
            raise CommError(f"{fact} {remedy}") from error
        self._store = PrefixStore(f"parti/{job}", store)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value.hex())

    def get(self, key: str, deadline_s: float) -> bytes:
        from torch.distributed import DistStoreError

        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
        except (DistStoreError, RuntimeError) as error:
            raise TimeoutError(key) from error
        return bytes.fromhex(self._store.get(key).decode())


def split_address(rendezvous: str) -> tuple[str, int]:
    """`tcp://host:port` as host and port."""
    parts = urlsplit(rendezvous)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ConfigError(f"rendezvous {rendezvous!r}; expected tcp://host:port.")
    return parts.hostname, parts.port
