"""One connection and its frames, over a pair of sockets without ranks at the ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from parti.comm.links import Frame, Header, Kind, Link, Place
from parti.comm.operations import Operation

Ends = tuple[Link, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A link, and the bare socket at its other end."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    link = Link(mine, peer=1, lane=0)
    yield link, theirs
    link.close()
    theirs.close()


class Desk:
    """Takes frames in; lanes' frames have a place only when it has been given."""

    def __init__(self) -> None:
        self.came: list[tuple[Header, bytes]] = []

    def find_place(self, link: Link, header: Header) -> memoryview | None:
        if header.kind == Kind.LETTER:
            return memoryview(bytearray(header.num_bytes))
        return link.places[0].memory if link.places else None

    def take(self, link: Link, header: Header, body: memoryview) -> None:
        self.came.append((header, bytes(body)))


def operation() -> Operation:
    return Operation("scatter 0 on lane 0", 0, unsent={1}, unreceived={1})


def place(size: int, number: int = 0) -> Place:
    memory = memoryview(bytearray(size))
    return Place(Header(Kind.SCATTER, number, size), memory, operation())


def wire(kind: Kind, number: int, body: bytes = b"") -> bytes:
    return b"".join(Frame(kind, number, body).rest)


def test_a_frame_that_comes_byte_by_byte_is_whole(ends: Ends) -> None:
    link, theirs = ends
    desk = Desk()
    for byte in wire(Kind.LETTER, 3, b"hello"):
        assert desk.came == []
        theirs.send(bytes([byte]))
        link.read(desk)
    assert desk.came == [(Header(Kind.LETTER, 3, 5), b"hello")]


def test_frames_that_come_together_are_taken_one_by_one(ends: Ends) -> None:
    link, theirs = ends
    desk = Desk()
    theirs.send(wire(Kind.LETTER, 0, b"a") + wire(Kind.LETTER, 1) + wire(Kind.LETTER, 2, b"c"))
    for count in (1, 2, 3):
        link.read(desk)
        assert len(desk.came) == count
    assert [body for _, body in desk.came] == [b"a", b"", b"c"]
    link.read(desk)  # nothing there: not an error
    assert len(desk.came) == 3


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_frame_without_a_place_waits_for_it(ends: Ends, size: int) -> None:
    link, theirs = ends
    desk = Desk()
    theirs.send(wire(Kind.SCATTER, 0, b"x" * size))
    link.read(desk)
    assert link.is_stalled
    assert desk.came == []
    link.places.append(place(size))
    link.is_stalled = False
    link.read(desk)
    assert desk.came == [(Header(Kind.SCATTER, 0, size), b"x" * size)]
    assert link.places[0].memory == b"x" * size
    assert not link.is_stalled


def test_what_the_kernel_does_not_take_stays_in_the_queue(ends: Ends) -> None:
    link, theirs = ends
    body = bytes(range(256)) * 20_000
    mine = operation()
    link.enqueue(Frame(Kind.SCATTER, 0, memoryview(body), mine))
    link.enqueue(Frame(Kind.GATHER, 1, b"end", mine))
    expected = wire(Kind.SCATTER, 0, body) + wire(Kind.GATHER, 1, b"end")
    came = bytearray()
    sent = []
    while len(came) < len(expected):
        sent += link.flush()
        came += theirs.recv(1 << 20)
    assert came == expected
    assert sent == [mine, mine]
    assert not link.is_waiting_to_send


def test_the_end_comes_after_what_was_sent_before_it(ends: Ends) -> None:
    link, theirs = ends
    desk = Desk()
    theirs.send(wire(Kind.LETTER, 0, b"last"))
    theirs.close()
    link.send(Frame(Kind.LETTER, 0, b"to nobody"))
    link.send(Frame(Kind.LETTER, 1, b"to nobody"))
    assert link.problem == "broken pipe"
    assert not link.is_waiting_to_send
    link.read(desk)
    assert [body for _, body in desk.came] == [b"last"]
    with pytest.raises(EOFError, match="broken pipe"):
        link.read(desk)


def test_headers_name_themselves() -> None:
    assert str(Header(Kind.SCATTER, 7, 12)) == "scatter 7 of 12 bytes"
    assert str(Header(99, 7, 12)) == "frame of kind 99 7 of 12 bytes"
