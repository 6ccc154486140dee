"""Supervisors on several hosts: how they meet, agree on the world, and end together.

Node 0 serves the store. Each node signs in with its number of processes; node 0 then publishes the
layout. The key `over` holds the job's end: whoever sets it first says why, and everybody watches
it. It is also every supervisor's will, so a host that vanishes ends the job too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from parti.errors import CommError, CommTimeout, ConfigError
from parti.launch.failure import Ending
from parti.launch.peers import Announcement, Kind, Layout
from parti.launch.register import LocalRegister, Register
from parti.launch.store import Store, Watch, bracketed, connect, parse_url
from parti.launch.store_server import Server

JOIN_TIMEOUT_S = 600.0
_PATIENCE_S = 10.0
"""How long a node waits for others before it says so."""
_FAREWELL_S = 2.0
_OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node says of itself when it signs in."""

    node_rank: int
    num_nodes: int
    host: str
    pid: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What node 0 publishes when everybody is there."""

    job: str
    name: str
    nodes: tuple[Node, ...]


def join(
    *,
    address: str,
    node: Node,
    job: str,
    name: str,
    note: Callable[[str], None],
    timeout_s: float = JOIN_TIMEOUT_S,
) -> ManyHosts:
    """Meet the other supervisors at `address` (tcp://host:port). The name of the job and of its
    run are node 0's."""
    host, port = parse_url(address)
    server = None
    with contextlib.ExitStack() as on_failure:
        if node.node_rank == 0:
            server = Server(host, port)
            on_failure.callback(server.close)
            port = server.port
            store = connect(f"tcp://{bracketed(server.host)}:{port}", timeout_s=timeout_s)
            note(_invitation(host, port, node.num_nodes))
        else:
            if port == 0:
                raise ConfigError("port 0 can be chosen on node 0 only; it prints the one it got")
            store = connect(address, timeout_s=timeout_s)
        on_failure.callback(store.abandon)
        _sign_in(store, node, timeout_s)
        lost = Announcement(kind=Kind.LOST, node_rank=node.node_rank, host=node.host)
        store.leave_will(_OVER, _encode(lost))
        if server is not None:
            world = _World(
                job=job,
                name=name,
                nodes=_gather(store, node.num_nodes, note, timeout_s),
            )
            store.set("world", msgspec.msgpack.encode(world))
        encoded = store.get("world", timeout_s)
        layout = _layout(
            msgspec.msgpack.decode(encoded, type=_World),
            node.node_rank,
            f"tcp://{bracketed(host)}:{port}",
        )
        watch = store.watch(_OVER, timeout_s=timeout_s)
        on_failure.callback(watch.close)
        on_failure.pop_all()
        return ManyHosts(layout, store, watch, server, note)


def _sign_in(store: Store, node: Node, timeout_s: float) -> None:
    if node.node_rank == 0:
        store.set("num_nodes", b"%d" % node.num_nodes)
    expected = int(store.get("num_nodes", timeout_s))
    if expected != node.num_nodes:
        raise ConfigError(
            f"this node was told of {node.num_nodes} nodes, node 0 of {expected}: "
            "give --nodes the same value everywhere"
        )
    mine = msgspec.msgpack.encode(node)
    found = store.compare_set(f"node/{node.node_rank}", None, mine)
    if found is not None and found != mine:
        other = msgspec.msgpack.decode(found, type=Node)
        raise ConfigError(
            f"node rank {node.node_rank} is taken by {other.host} (process {other.pid}): "
            "each node needs a --node-rank of its own"
        )


def _gather(
    store: Store, num_nodes: int, note: Callable[[str], None], timeout_s: float
) -> tuple[Node, ...]:
    """Wait for every node to sign in."""
    started_s = time.monotonic()
    found: list[Node] = []
    while len(found) < num_nodes:
        left_s = started_s + timeout_s - time.monotonic()
        wait_s = max(0.0, min(_PATIENCE_S, left_s))
        try:
            encoded = store.get(f"node/{len(found)}", wait_s)
        except TimeoutError as error:
            present = {key.removeprefix("node/") for key in store.keys("node/")}
            missing = ", ".join(str(k) for k in range(num_nodes) if str(k) not in present)
            waited = (
                f"waited {time.monotonic() - started_s:.0f} s for node {missing} of {num_nodes}"
            )
            if left_s <= wait_s:
                raise CommTimeout(f"{waited}; start `parti run` there, too") from error
            note(waited)
        else:
            found.append(msgspec.msgpack.decode(encoded, type=Node))
    return tuple(found)


def _layout(world: _World, node_rank: int, rendezvous: str) -> Layout:
    return Layout(
        job=world.job,
        name=world.name,
        node_rank=node_rank,
        hosts=tuple(node.host for node in world.nodes),
        local_counts=tuple(node.num_processes for node in world.nodes),
        rendezvous=rendezvous,
    )


def _invitation(host: str, port: int, num_nodes: int) -> str:
    others = "1" if num_nodes == 2 else f"1 to {num_nodes - 1}"
    return (
        f"node 0 of {num_nodes} waits for node {others}: "
        f"parti run --nodes {num_nodes} --node-rank ... --address {bracketed(host)}:{port} ..."
    )


def _encode(announcement: Announcement) -> bytes:
    return msgspec.msgpack.encode(announcement)


def _decode(encoded: bytes) -> Announcement:
    return msgspec.msgpack.decode(encoded, type=Announcement)


class ManyHosts:
    """The other supervisors, through the store."""

    number = 0
    can_lose = False
    has_left = False
    why_out = ""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        watch: Watch,
        server: Server | None,
        note: Callable[[str], None],
    ) -> None:
        self._layout = layout
        self._note = note
        self._store = store
        self._watch = watch
        self._server = server
        self._lost_nodes: set[int] = set()

    @property
    def layout(self) -> Layout:
        return self._layout

    def register(self, num_spares: int) -> Register:
        return LocalRegister(self._layout.num_local, num_spares)

    def leave(self) -> None:
        self._note(
            "this host cannot leave: the job has a fixed number of hosts. Start it with "
            "`--nodes MIN:MAX`"
        )

    @property
    def waits_for(self) -> int | None:
        return self._watch.fileno()

    def poll(self) -> Announcement | None:
        try:
            encoded = self._watch.poll()
        except CommError:
            return self._node_0_is_lost()
        return None if encoded is None else self._remember(_decode(encoded))

    def announce(self, announcement: Announcement) -> Announcement:
        try:
            found = self._store.compare_set(_OVER, None, _encode(announcement))
        except CommError:  # node 0 is gone, and with it whoever else could have told
            return announcement
        return announcement if found is None else self._remember(_decode(found))

    def succeed(self, announcement: Announcement) -> Announcement | None:
        try:
            num_succeeded = self._store.add("succeeded", 1)
        except CommError:
            return self._node_0_is_lost()
        if num_succeeded < self._layout.num_nodes:
            return None
        return self.announce(announcement)

    def finish(self, failures: Sequence[Ending]) -> tuple[Ending, ...]:
        """Node 0 keeps the store open until everybody has had the news, or a deadline."""
        others: list[Ending] = []
        with contextlib.suppress(CommError):
            key = f"ended/{self._layout.node_rank}"
            self._store.set(key, msgspec.msgpack.encode(tuple(failures)))
            if self._server is not None:
                others = self._collect()
        self._watch.close()
        self._store.close()
        if self._server is not None:
            self._server.close()
        return tuple(others)

    def _collect(self) -> list[Ending]:
        deadline_s = time.monotonic() + _FAREWELL_S
        others: list[Ending] = []
        for node_rank in set(range(1, self._layout.num_nodes)) - self._lost_nodes:
            wait_s = max(0.001, deadline_s - time.monotonic())
            try:
                encoded = self._store.get(f"ended/{node_rank}", wait_s)
            except TimeoutError:
                continue
            others += msgspec.msgpack.decode(encoded, type=list[Ending])
        return others

    def _node_0_is_lost(self) -> Announcement:
        lost = Announcement(kind=Kind.LOST, node_rank=0, host=self._layout.hosts[0])
        return self._remember(lost)

    def _remember(self, announcement: Announcement) -> Announcement:
        if announcement.kind is Kind.LOST:
            self._lost_nodes.add(announcement.node_rank)
        return announcement


def this_node(*, node_rank: int, num_nodes: int, num_processes: int) -> Node:
    return Node(
        node_rank=node_rank,
        num_nodes=num_nodes,
        host=socket.gethostname(),
        pid=os.getpid(),
        num_processes=num_processes,
    )
