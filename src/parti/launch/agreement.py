"""What hosts agree through: keys and values, leases that end with their owner, and news of both.

Two stores do it: Parti's own (`store`, `tcp://`) and an etcd cluster (`etcd`, `etcd://`). Keys are
strings, values bytes. Every call ends within a deadline, so a link that was cut is an error and
not a hang. A request whose answer did not come may still be carried out, once, by a server that
was only held up. No torch.
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from parti.errors import CommError, ConfigError

TIMEOUT_S = 60.0
"""How long `connect` looks for the store."""
PATIENCE_S = 15.0
"""How long the store may take for an answer, beyond what it was asked to wait."""


class LeaseLost(CommError):
    """A lease was not renewed in time: its key is gone."""


class Lease(Protocol):
    """A key that exists for as long as its owner renews it.

    Whoever sets the key takes it out of the lease: it stays then. Whoever deletes it removes it for
    good. The lease notices neither.
    """

    @property
    def ttl_s(self) -> float:
        """How long the key outlives the last renewal; a store may grant more than was asked for."""
        ...

    def renew(self) -> None:
        """To be called about every third of `ttl_s`.

        LeaseLost where it comes too late; another CommError where the store cannot be reached, and
        then the next renewal may still be in time.
        """
        ...

    def end(self) -> None:
        """Remove the key now. That the lease had expired is no error."""
        ...


class Changes(Protocol):
    """What happens to the keys with one prefix, beginning with those that are there.

    A fast series of changes of one key may be merged to the last one.
    """

    def fileno(self) -> int:
        """Readable when `poll()` has something to say."""
        ...

    def poll(self) -> list[tuple[str, bytes | None]]:
        """What is new, in order; None for a key that was removed.

        The first call, at any time, has everything that was there. PeerLost where the store is
        gone: subscribe again then.
        """
        ...

    def close(self) -> None: ...


class Values(Protocol):
    """Keys and values."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, deadline_s: float) -> bytes:
        """The value, waiting up to `deadline_s` seconds for it to be set; then a TimeoutError."""
        ...

    def look(self, key: str) -> bytes | None:
        """The value now."""
        ...

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set the key if its value is `expected` (None: it has none); the value it has then."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; its new value."""
        ...

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        ...


class Agreement(Values, Protocol):
    """A client of a store. One thread at a time may use it, its leases included."""

    def keys(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        ...

    def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """Set a key that is gone `ttl_s` after its owner was last heard of."""
        ...

    def changes(self, prefix: str) -> Changes:
        """Has a connection of its own, and may be used from another thread."""
        ...

    def close(self) -> None:
        """Leases and changes are not ended with it."""
        ...

    def abandon(self) -> None:
        """Go without a word: what was to happen at this client's end, does."""
        ...


def connect(url: str, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S) -> Agreement:
    """A client of the store at `tcp://host:port` or `etcd://host:port[,host:port...]/prefix`."""
    match urlsplit(url).scheme:
        case "tcp":
            from parti.launch.store import connect as connect_store

            return connect_store(url, timeout_s=timeout_s, patience_s=patience_s)
        case "etcd":
            from parti.launch.etcd import connect as connect_etcd

            return connect_etcd(url, timeout_s=timeout_s, patience_s=patience_s)
        case scheme:
            raise ConfigError(
                f"{scheme or 'nothing'!r} is no kind of store; expected tcp://host:port for "
                "Parti's own, or etcd://host:port[,host:port...]/prefix"
            )


def check_ttl(ttl_s: float) -> None:
    if not ttl_s > 0:
        raise ConfigError(f"ttl_s={ttl_s:g}: a lease lasts for more than 0 s")
