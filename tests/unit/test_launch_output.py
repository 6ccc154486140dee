"""What reaches log files and consoles."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.launch.output import Console, FileSink, Log, PlainText, TextSink


def plain(*chunks: bytes) -> bytes:
    text = PlainText()
    return b"".join([text.feed(chunk) for chunk in chunks]) + text.close()


@pytest.mark.parametrize(
    ("shown", "logged"),
    [
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"no end", b"no end"),
        (b"\x1b[1;31mred\x1b[0m\n", b"red\n"),
        (b"\x1b]0;title\x07text\n", b"text\n"),
        (b"dos\r\nline\r\n", b"dos\nline\n"),
        (b"\r 10%\r 20%\r100%\nnext\n", b"100%\nnext\n"),
        (b"start 0%\rhalf 50%\rfull 100%\n", b"start 0%\nfull 100%\n"),
        (b"\r 10%\r\x1b[2K\rdone\n", b"done\n"),
        (b"bar\r\x1b[K\n", b"bar\n"),
        ("grün\n".encode(), "grün\n".encode()),
    ],
)
def test_a_log_holds_what_was_left_on_the_screen(shown: bytes, logged: bytes) -> None:
    assert plain(shown) == logged


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\x1b[2K", b"\x1b[1A"])),
    st.data(),
)
def test_where_reads_cut_the_output_does_not_matter(
    parts: list[bytes], data: st.DataObject
) -> None:
    shown = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shown)), max_size=4)))
    ends = [0, *cuts, len(shown)]
    chunks = [shown[a:b] for a, b in itertools.pairwise(ends)]
    assert plain(*chunks) == plain(shown)


def test_a_cut_inside_an_escape_sequence_does_not_join_two_states() -> None:
    assert plain(b"\ra\r\x1b", b"[2Ka") == b"a"


def test_a_line_passes_before_it_ends() -> None:
    text = PlainText()
    assert text.feed(b"loading") == b"loading"
    assert text.feed(b" ... done\n") == b" ... done\n"


def test_a_bar_without_an_end_does_not_fill_the_memory() -> None:
    text = PlainText()
    text.feed(b"\r")
    assert text.feed(b"x" * 100_000) == b"x" * 100_000


def test_a_log_grows_and_remembers_its_end(tmp_path: Path) -> None:
    for _ in range(2):
        log = Log(tmp_path / "rank1.log")
        log.write(b"0123456789" * 30_000)
        log.write(b"the end\n")
        log.close()
    assert (tmp_path / "rank1.log").stat().st_size == 2 * (300_000 + 8)
    assert log.tail.endswith("789the end\n")
    assert len(log.tail) == 64 * 1024


def test_a_log_on_a_full_disk_keeps_only_the_end_in_memory() -> None:
    log = Log(Path("/dev/full"))
    log.write(b"something\n")
    log.write(b"more\n")
    assert log.problem == "No space left on device"
    assert log.tail == "something\nmore\n"
    log.close()


def test_a_log_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path / "missing" / "rank0.log")
    log.write(b"x")
    assert log.problem == "No such file or directory"


def test_a_slow_console_is_not_waited_for() -> None:
    read_end, write_end = os.pipe()
    sink = FileSink(write_end)
    sink.write(b"x" * 300_000)
    assert sink.waits_for == write_end
    assert not sink.is_full
    sink.write(b"y" * 1_000_000)
    assert sink.is_full
    received = 0
    while sink.waits_for is not None:
        received += len(os.read(read_end, 1 << 20))
        sink.flush()
    os.close(write_end)
    while data := os.read(read_end, 1 << 20):
        received += len(data)
    os.close(read_end)
    assert received == 1_300_000
    assert not sink.is_full


def test_a_closed_console_is_given_up() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    sink = FileSink(write_end)
    sink.write(b"nobody reads this")
    assert sink.waits_for is None
    os.close(write_end)


def test_text_is_decoded_across_reads() -> None:
    stream = io.StringIO()
    sink = TextSink(stream)
    encoded = "grün".encode()
    sink.write(encoded[:3])
    sink.write(encoded[3:])
    assert stream.getvalue() == "grün"


def test_a_note_begins_on_its_own_line() -> None:
    stream = io.StringIO()
    sink = TextSink(stream)
    console = Console(sink, sink, out_tty=None, err_tty=None)
    console.note("first")
    sink.write(b"half a line")
    console.note("second")
    assert stream.getvalue() == "parti: first\nhalf a line\nparti: second\n"
