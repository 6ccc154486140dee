"""The agreement of `parti.launch.agreement` on an etcd cluster: version 3.4 or later, no TLS.

What the hosts say to one another survives the loss of any of them, and of a minority of etcd's
members. Keys lie under the prefix of the address. How etcd is reached is `etcd_gateway`'s business.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from types import TracebackType

import msgspec

from parti.errors import CommError, CommTimeout, PeerLost
from parti.launch.agreement import PATIENCE_S, TIMEOUT_S, LeaseLost, check_ttl
from parti.launch.etcd_gateway import Code, Gateway, Refused, Stream, parse_url

_NAP_S = 0.05

# etcd's messages. Bytes are base64 and large integers strings in its JSON; msgspec sees to both.


class _Range(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    range_end: bytes = b""
    keys_only: bool = False
    limit: int = 0


class _Put(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    value: bytes
    lease: int = 0


class _Compare(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    target: str
    value: bytes | msgspec.UnsetType = msgspec.UNSET
    create_revision: int | msgspec.UnsetType = msgspec.UNSET
    mod_revision: int | msgspec.UnsetType = msgspec.UNSET


class _Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    request_put: _Put | None = None
    request_range: _Range | None = None


class _Transaction(msgspec.Struct, frozen=True):
    compare: tuple[_Compare, ...]
    success: tuple[_Operation, ...]
    failure: tuple[_Operation, ...] = ()


class _Grant(msgspec.Struct, frozen=True):
    TTL: int


class _Renew(msgspec.Struct, frozen=True):
    ID: int


class _CreateWatch(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    start_revision: int
    range_end: bytes = b""


class _Watch(msgspec.Struct, frozen=True):
    create_request: _CreateWatch


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0


class _KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class _Done(msgspec.Struct, frozen=True):
    """The answer to what has none of interest."""


class _Found(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    kvs: tuple[_KeyValue, ...] = ()


class _Deleted(msgspec.Struct, frozen=True):
    deleted: int = 0


class _Answer(msgspec.Struct, frozen=True):
    response_range: _Found = _Found()


class _Decided(msgspec.Struct, frozen=True):
    succeeded: bool = False
    responses: tuple[_Answer, ...] = ()


class _Granted(msgspec.Struct, frozen=True):
    ID: int
    TTL: int


class _Life(msgspec.Struct, frozen=True):
    TTL: int = 0


class _Renewed(msgspec.Struct, frozen=True):
    result: _Life


class _Event(msgspec.Struct, frozen=True):
    kv: _KeyValue
    type: str = "PUT"


class _News(msgspec.Struct, frozen=True):
    events: tuple[_Event, ...] = ()
    canceled: bool = False


class _Watched(msgspec.Struct, frozen=True):
    result: _News = _News()
    error: msgspec.Raw = msgspec.Raw()


_decode_watched = msgspec.json.Decoder(_Watched, strict=False).decode


def _end_of(prefix: bytes) -> bytes:
    """The first key after those that begin with it. A prefix ends in UTF-8, never in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _news(stream: Stream) -> list[_Event]:
    """What there is. PeerLost where the stream is over."""
    events: list[_Event] = []
    for line in stream.lines():
        try:
            watched = _decode_watched(line)
        except msgspec.DecodeError as error:
            raise PeerLost(f"a watch of etcd ended with {line!r}") from error
        if watched.result.canceled or watched.error:
            raise PeerLost(f"etcd ended a watch: {line.decode(errors='replace')}")
        events += watched.result.events
    return events


class EtcdStore:
    """A client of the cluster. One thread at a time may use it; let each thread connect its own.

    A request whose answer was lost is sent to the next endpoint, all but `add`, which might count
    twice. So a `delete` that was repeated may find nothing to delete.
    """

    def __init__(self, url: str, timeout_s: float, patience_s: float = PATIENCE_S) -> None:
        self._address = parse_url(url)
        self._prefix = self._address.prefix.encode()
        self._patience_s = patience_s
        self._gateway = Gateway(self._address, patience_s)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._gateway.close)
            self._gateway.meet(timeout_s)
            self._range(b"", limit=1)  # whether it lets us
            on_failure.pop_all()

    def set(self, key: str, value: bytes) -> None:
        self._gateway.ask("/v3/kv/put", _Put(self._name(key), value), _Done)

    def get(self, key: str, deadline_s: float) -> bytes:
        """The value, waiting up to `deadline_s` seconds for it to be set; then a TimeoutError."""
        until_s = time.monotonic() + deadline_s
        name = self._name(key)
        while True:
            found = self._gateway.ask("/v3/kv/range", _Range(name), _Found)
            if found.kvs:
                return found.kvs[0].value
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"{key!r} was not set in etcd at {self._address.name} within {deadline_s:g} s"
                )
            watch = _Watch(_CreateWatch(name, found.header.revision + 1))
            # Not for longer than the patience: then another look shows whether etcd is still there.
            value = self._await(watch, min(left_s, self._patience_s))
            if value is not None:
                return value

    def look(self, key: str) -> bytes | None:
        """The value now."""
        found = self._gateway.ask("/v3/kv/range", _Range(self._name(key)), _Found)
        return found.kvs[0].value if found.kvs else None

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set the key if its value is `expected` (None: it has none); the value it has then."""
        name = self._name(key)
        if expected is None:
            compare = _Compare(name, "CREATE", create_revision=0)
        else:
            compare = _Compare(name, "VALUE", value=expected)
        transaction = _Transaction(
            compare=(compare,),
            success=(_Operation(request_put=_Put(name, desired)),),
            failure=(_Operation(request_range=_Range(name)),),
        )
        decided = self._gateway.ask("/v3/kv/txn", transaction, _Decided)
        if decided.succeeded:
            return desired
        found = decided.responses[0].response_range.kvs
        return found[0].value if found else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; its new value."""
        name = self._name(key)
        until_s = time.monotonic() + self._patience_s
        while time.monotonic() < until_s:
            found = self._gateway.ask("/v3/kv/range", _Range(name), _Found).kvs
            before = found[0] if found else _KeyValue(name, b"0")
            try:
                number = int(before.value) + amount
            except ValueError as error:
                raise CommError(
                    f"the value of {key!r} in etcd at {self._address.name} is not a number"
                ) from error
            transaction = _Transaction(
                compare=(_Compare(name, "MOD", mod_revision=before.mod_revision),),
                success=(_Operation(request_put=_Put(name, b"%d" % number)),),
            )
            if self._gateway.ask(
                "/v3/kv/txn", transaction, _Decided, is_repeatable=False
            ).succeeded:
                return number
        raise CommTimeout(
            f"others changed {key!r} in etcd at {self._address.name} all the time, "
            f"for {self._patience_s:g} s"
        )

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        range_ = _Range(self._name(key))
        return self._gateway.ask("/v3/kv/deleterange", range_, _Deleted).deleted == 1

    def keys(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        found = self._range(prefix.encode(), keys_only=True)
        return tuple(sorted(self._key(kv.key) for kv in found.kvs))

    def lease(self, key: str, value: bytes, ttl_s: float) -> EtcdLease:
        """Set a key that is gone after its owner was last heard of: after `ttl_s`, rounded up to
        whole seconds, or what etcd takes for the least."""
        check_ttl(ttl_s)
        granted = self._gateway.ask("/v3/lease/grant", _Grant(math.ceil(ttl_s)), _Granted)
        lease = EtcdLease(self._gateway, granted.ID, key, float(granted.TTL))
        self._gateway.ask("/v3/kv/put", _Put(self._name(key), value, granted.ID), _Done)
        return lease

    def changes(self, prefix: str) -> EtcdChanges:
        """What happens to the keys that begin with `prefix`, from what is there now on."""
        return EtcdChanges(self._address.prefix, prefix, self._gateway.another())

    def close(self) -> None:
        self._gateway.close()

    def abandon(self) -> None:
        self._gateway.close()

    def __enter__(self) -> EtcdStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _key(self, name: bytes) -> str:
        return name.removeprefix(self._prefix).decode()

    def _range(self, prefix: bytes, *, keys_only: bool = False, limit: int = 0) -> _Found:
        name = self._prefix + prefix
        return self._gateway.ask(
            "/v3/kv/range", _Range(name, _end_of(name), keys_only, limit), _Found
        )

    def _await(self, watch: _Watch, wait_s: float) -> bytes | None:
        """The value that is set next; None if there is none in time, or the watch has ended."""
        until_s = time.monotonic() + wait_s
        with (
            contextlib.closing(self._gateway.open_stream("/v3/watch", watch)) as stream,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(stream, selectors.EVENT_READ)
            while (left_s := until_s - time.monotonic()) > 0 and selector.select(left_s):
                try:
                    events = _news(stream)
                except PeerLost:
                    time.sleep(min(_NAP_S, left_s))
                    break
                for event in events:
                    if event.type == "PUT":
                        return event.kv.value
        return None


class EtcdLease:
    """A key that exists for as long as its owner renews it."""

    def __init__(self, gateway: Gateway, number: int, key: str, ttl_s: float) -> None:
        self._gateway = gateway
        self._number = number
        self._key = key
        self._ttl_s = ttl_s

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def renew(self) -> None:
        """LeaseLost where etcd has not heard of it for `ttl_s`."""
        renewed = self._gateway.ask("/v3/lease/keepalive", _Renew(self._number), _Renewed)
        if renewed.result.TTL <= 0:
            raise LeaseLost(
                f"the lease of {self._key!r} was not renewed within {self._ttl_s:g} s, and has "
                "expired; take a new one"
            )

    def end(self) -> None:
        try:
            self._gateway.ask("/v3/lease/revoke", _Renew(self._number), _Done)
        except Refused as refused:
            if refused.code != Code.NOT_FOUND:
                raise


class EtcdChanges:
    """What happens to the keys with one prefix; for those who wait for other things too.

    Where the member that tells is lost, another goes on: what was missed is what differs now.
    """

    def __init__(self, root: str, prefix: str, gateway: Gateway) -> None:
        self._gateway = gateway
        self._root = root.encode()
        self._prefix = self._root + prefix.encode()
        self._revisions: dict[bytes, int] = {}
        """Of the keys that were told of, and are there."""
        self._found: list[tuple[str, bytes | None]] = []
        self._selector = selectors.DefaultSelector()  # its file number stays, the stream's changes
        self._stream: Stream | None = None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._subscribe()
            on_failure.pop_all()

    def fileno(self) -> int:
        """Becomes readable when `poll()` has something to say."""
        return self._selector.fileno()

    def poll(self) -> list[tuple[str, bytes | None]]:
        """What is new, in order. PeerLost where no member of the cluster can be reached."""
        assert self._stream is not None
        try:
            self._take(_news(self._stream))
        except PeerLost:
            self._go_on()
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._selector.close()
        self._gateway.close()

    def _go_on(self) -> None:
        """Subscribe again. What was found meanwhile is told first, if that fails."""
        try:
            self._subscribe()
        except CommTimeout as error:
            if not self._found:
                raise PeerLost(str(error)) from error
        except PeerLost:
            if not self._found:
                raise

    def _subscribe(self) -> None:
        end = _end_of(self._prefix)
        found = self._gateway.ask("/v3/kv/range", _Range(self._prefix, end), _Found)
        watch = _Watch(_CreateWatch(self._prefix, found.header.revision + 1, end))
        stream = self._gateway.open_stream("/v3/watch", watch)
        if self._stream is not None:
            self._selector.unregister(self._stream)
            self._stream.close()
        self._stream = stream
        self._selector.register(stream, selectors.EVENT_READ)  # its first word has come already
        there = {kv.key for kv in found.kvs}
        gone = [_Event(_KeyValue(key), "DELETE") for key in self._revisions if key not in there]
        new = [kv for kv in found.kvs if self._revisions.get(kv.key) != kv.mod_revision]
        self._take(gone + [_Event(kv) for kv in sorted(new, key=lambda kv: kv.mod_revision)])

    def _take(self, events: list[_Event]) -> None:
        for event in events:
            key = event.kv.key.removeprefix(self._root).decode()
            if event.type == "DELETE":
                self._revisions.pop(event.kv.key, None)
                self._found.append((key, None))
            else:
                self._revisions[event.kv.key] = event.kv.mod_revision
                self._found.append((key, event.kv.value))


def connect(url: str, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S) -> EtcdStore:
    """A client of `etcd://[user:password@]host:port[,host:port...]/prefix`."""
    return EtcdStore(url, timeout_s, patience_s)
