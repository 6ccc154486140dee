"""Gradients of ranks on several hosts: added within each host first, then between hosts.

The flat block is cut into *lanes*, one for each process of the largest host, and a lane into
*buckets*. A bucket leaves for the other hosts as soon as backward has finished it on every process
of this host: a thread waits for it, adds up what the processes hold, and sends each host its part.
Each host adds the parts it received, in the order of the tree, and sends the sum to all. Bytes on
the wire are those of a ring all-reduce where the micro-batches of a host are one node of the tree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from parti.comm.protocol import Across, Neighbours
from parti.engine.gradients import (
    Addition,
    Made,
    SharedGradients,
    Sums,
    blocks,
    scale_all,
    write_additions,
)
from parti.engine.layout import LINE_BYTES, Layout
from parti.engine.placement import Deal
from parti.engine.tree import Leaf, Merge, Node, combine, cover
from parti.errors import CommTimeout

BUCKET_BYTES = 4 << 20
_NAP_S = 0.0002


@dataclass(frozen=True, slots=True)
class Bucket:
    """Chunks that travel together, and the lane they travel on."""

    lane: int
    run: range
    low: int
    high: int
    last_entry: int

    def part_bytes(self, num_hosts: int) -> int:
        """Every host adds up a part of this size; the last may reach past the end."""
        lines = -(-(self.high - self.low) // LINE_BYTES)
        return -(-lines // num_hosts) * LINE_BYTES


class AcrossGradients:
    needs_meeting = True

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        neighbours: Neighbours,
        across: Across,
        patience_s: float,
    ) -> None:
        self._layout = layout
        self._neighbours = neighbours
        self._across = across
        self._patience_s = patience_s
        self._hosts = across.hosts
        lanes = layout.own(len(across.lanes))
        size = len(neighbours.ranks)
        owner = [lane * size // len(lanes) for lane in range(len(lanes))]
        runs = tuple(
            _joined([run for run, each in zip(lanes, owner, strict=True) if each == i])
            for i in range(size)
        )
        self._local = SharedGradients(layout, parameters, neighbours, runs)
        self.runs, self.pieces = self._local.runs, self._local.pieces
        mine = [lane for lane, each in enumerate(owner) if each == neighbours.index]
        self._buckets = [b for lane in mine for b in _cut(layout, lane, lanes[lane])]
        self._finished = _counters(neighbours)
        self._steps = 0
        self._puts_left = 0
        self._streamed: list[bool] = []
        self._sender: threading.Thread | None = None
        self._program = lru_cache(maxsize=64)(self._write_program)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_Hook(self, i))  # type: ignore[no-untyped-call]
            for i, parameter in enumerate(parameters)
        ]

    def begin(self, deal: Deal, *, early: bool) -> None:
        self._local.begin(deal, early=early)
        self._deal = deal
        self._ops = deal.shares[self._neighbours.ranks[self._neighbours.index]].ops
        leaves = [i for i, op in enumerate(self._ops) if isinstance(op, Leaf)]
        self._puts_left = len(leaves)
        self._last = self._ops[leaves[-1]] if leaves else None
        self._tail = self._ops[leaves[-1] + 1 :] if leaves else ()
        self._streamed = [False] * len(self._layout.entries)
        self._prefix = 0
        self._steps += 1
        self._failure: BaseException | None = None
        self._sender = threading.Thread(target=self._send_all, name="parti-sender", daemon=True)
        if early:
            self._sender.start()
        if not leaves:
            self._say_finished(len(self._streamed))

    def homes(self, slot: int, onto: bool) -> Mapping[int, torch.Tensor]:
        return {}  # our hooks wait for autograd's own gradients

    def put(self, slot: int, made: Made, onto: bool) -> None:
        if self._puts_left > 1:
            self._local.put(slot, made, onto)
        else:
            for entry, gradient in enumerate(made):
                if not self._streamed[entry]:
                    self._finish(entry, gradient)
        self._puts_left -= 1

    def merge(self, into: int, source: int) -> None:
        # Merges behind the last micro-batch were made entry by entry, as backward went along.
        if self._puts_left > 0:
            self._local.merge(into, source)

    def stream(self, entry: int, gradient: torch.Tensor | None) -> None:
        """Autograd has finished a parameter; in the last backward of a step it may leave."""
        if self._puts_left == 1:
            self._finish(entry, gradient)

    def _finish(self, entry: int, gradient: torch.Tensor | None) -> None:
        assert isinstance(self._last, Leaf)
        self._local.put_entry(self._last.slot, entry, gradient, self._last.onto)
        for op in self._tail:
            assert isinstance(op, Merge)
            self._local.merge_entry(op.into, op.source, entry)
        self._streamed[entry] = True
        before = self._prefix
        while self._prefix < len(self._streamed) and self._streamed[self._prefix]:
            self._prefix += 1
        if self._prefix > before:
            self._say_finished(self._prefix)

    def sums(self, scale: float, *, keep: bool) -> Sums:
        sender = self._sender
        assert sender is not None
        if sender.ident is None:
            sender.start()
        sender.join()
        if self._failure is not None:
            raise self._failure
        for piece in self._local.of_slot_0(self._neighbours.index):
            scale_all(piece, scale)
            yield piece

    def sums_of(self, owner: int, scale: float) -> Sums:
        # Kept and scaled by its owner before the neighbours met.
        return self._local.of_slot_0(owner)

    def whole(self) -> list[torch.Tensor]:
        return self._local.whole_of_slots_0()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        sender = self._sender
        if sender is not None and sender.ident is not None:
            sender.join()  # connections that it may wait for have ended

    def _say_finished(self, num_entries: int) -> None:
        self._finished[self._neighbours.index].fill_(self._mark(num_entries))

    def _mark(self, num_entries: int) -> int:
        return self._steps * (len(self._layout.entries) + 1) + num_entries

    def _send_all(self) -> None:
        """The sender thread of one step."""
        try:
            steps = self._program(self._deal)
            scattered = []
            for bucket, step in zip(self._buckets, steps, strict=True):
                self._wait_until_finished(bucket)
                for left, right, into in step.gather_host:
                    torch.add(left, right, out=into)
                scattered.append(
                    self._across.scatter_parts(
                        bucket.lane, step.received, step.sent, step.received_sizes, step.sent_sizes
                    )
                )
            gathered = []
            for bucket, step, transfer in zip(self._buckets, steps, scattered, strict=True):
                transfer.wait()
                for left, right, into in step.add_hosts:
                    torch.add(left, right, out=into)
                gathered.append(self._across.gather_parts(bucket.lane, step.whole, step.part))
            for bucket, step, transfer in zip(self._buckets, steps, gathered, strict=True):
                transfer.wait()
                block = self._local.block(self._neighbours.index, 0)
                block[bucket.low : bucket.high].copy_(step.whole[: bucket.high - bucket.low])
        except BaseException as error:
            self._failure = error

    def _wait_until_finished(self, bucket: Bucket) -> None:
        target = self._mark(bucket.last_entry + 1)
        deadline = time.monotonic() + self._patience_s
        me = self._neighbours.ranks[self._neighbours.index]
        for rank, finished in zip(self._neighbours.ranks, self._finished, strict=True):
            while finished.item() < target:
                if time.monotonic() > deadline:
                    raise CommTimeout(
                        f"rank {me}: backward on rank {rank} did not come to its end within "
                        f"{self._patience_s:.0f} s. Raise `patience_s` if this is expected."
                    )
                if rank != me:
                    self._neighbours.check()
                time.sleep(_NAP_S)

    def _write_program(self, deal: Deal) -> list[_BucketStep]:
        return [self._write_bucket(deal, bucket) for bucket in self._buckets]

    def _write_bucket(self, deal: Deal, bucket: Bucket) -> _BucketStep:
        nodes_of = [_host_nodes(deal, host) for host in self._hosts]
        mine = nodes_of[self._across.host]
        size = bucket.part_bytes(len(self._hosts))
        device = self._local.block(self._neighbours.index, 0).device

        def room(num_bytes: int) -> torch.Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        sent = room(len(self._hosts) * len(mine) * size)
        received = room(sum(len(nodes) for nodes in nodes_of) * size)
        whole = room(len(self._hosts) * size)
        part = room(size)
        step = _BucketStep(
            gather_host=[],
            add_hosts=[],
            sent=sent,
            received=received,
            sent_sizes=[len(mine) * size] * len(self._hosts),
            received_sizes=[len(nodes) * size for nodes in nodes_of],
            whole=whole,
            part=part,
        )
        held = [
            (neighbour, slot, node)
            for neighbour, rank in enumerate(self._neighbours.ranks)
            for slot, node in enumerate(deal.nodes[rank])
        ]
        for low, high, dtype in blocks(self._layout, bucket.run):
            for host in range(len(self._hosts)):
                start, end = bucket.low + host * size, bucket.low + (host + 1) * size
                a, b = max(low, start), min(high, end)
                if a >= b:
                    continue
                for k, node in enumerate(mine):
                    inside = [each for each in held if node[0] <= each[2][0] < node[1]]
                    base = (host * len(mine) + k) * size - start
                    step.gather_host.extend(
                        write_additions(
                            combine(tuple(n for *_, n in inside), node),
                            [self._local.block(n, s)[a:b].view(dtype) for n, s, _ in inside],
                            sent[base + a : base + b].view(dtype),
                        )
                    )
                if host == self._across.host:
                    order = [node for nodes in nodes_of for node in nodes]
                    step.add_hosts.extend(
                        write_additions(
                            combine(tuple(order), (0, deal.num_leaves)),
                            [
                                received[k * size - start + a : k * size - start + b].view(dtype)
                                for k in range(len(order))
                            ],
                            part[a - start : b - start].view(dtype),
                        )
                    )
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketStep:
    """The memory and the additions of one bucket, for one deal."""

    gather_host: list[Addition]
    add_hosts: list[Addition]
    sent: torch.Tensor
    received: torch.Tensor
    sent_sizes: list[int]
    received_sizes: list[int]
    whole: torch.Tensor
    part: torch.Tensor


def _host_nodes(deal: Deal, ranks: Sequence[int]) -> tuple[Node, ...]:
    """The nodes that a host holds when its processes have added up what they can."""
    held = [node for rank in ranks for node in deal.nodes[rank]]
    if not held:
        return ()
    return cover(min(held)[0], max(held)[1], deal.num_leaves)


def _cut(layout: Layout, lane: int, run: range) -> list[Bucket]:
    buckets: list[Bucket] = []
    start = run.start
    for i in run:
        low, high = layout.chunks[start].low, layout.chunks[i].high
        if high - low >= BUCKET_BYTES or i == run.stop - 1:
            buckets.append(Bucket(lane, range(start, i + 1), low, high, layout.chunks[i].entry))
            start = i + 1
    return buckets


def _joined(runs: Sequence[range]) -> range:
    """Runs that follow one another, as one."""
    if not runs:
        return range(0)
    return range(runs[0].start, runs[-1].stop)


def _counters(neighbours: Neighbours) -> list[torch.Tensor]:
    """One number for each neighbour that all can read: how far its backward has come."""
    if len(neighbours.ranks) == 1:
        return [torch.zeros(1, dtype=torch.int64)]
    return [view.view(torch.int64) for view in neighbours.allocate(8).views]


class _Hook:
    """Called by autograd when a parameter's gradient of one backward is whole."""

    __slots__ = ("_entry", "_gradients")

    def __init__(self, gradients: AcrossGradients, entry: int) -> None:
        self._gradients = gradients
        self._entry = entry

    def __call__(self, parameter: torch.Tensor) -> None:
        self._gradients.stream(self._entry, parameter.grad)
