"""Which failure was the first, and how it is told."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.launch.failure import (
    Ending,
    Report,
    describe,
    excerpt,
    fold,
    is_failure,
    judge,
    shell_code,
    summary,
)


def report(
    rank: int, at_s: float, summary: str = "ValueError: x", *, blames: bool = False
) -> Report:
    return Report(
        rank=rank,
        at_s=at_s,
        summary=summary,
        traceback=f"Traceback (most recent call last):\n  somewhere\n{summary}\n",
        is_consequence=blames,
        is_printed=False,
    )


def ending(rank: int, exit_code: int = 1, at_s: float = 1.0, **more: object) -> Ending:
    return Ending(rank=rank, exit_code=exit_code, at_s=at_s, **more)  # type: ignore[arg-type]


def text_of(*endings: Ending) -> str:
    verdict = judge(endings)
    assert verdict is not None
    return describe(verdict, log_of=lambda e: f"runs/x/rank{e.rank}.log")


def test_nothing_failed() -> None:
    assert judge([ending(0, 0), ending(1, 0)]) is None


def test_those_that_the_supervisor_ended_have_not_failed() -> None:
    ended_by_us = ending(1, -signal.SIGTERM, 0.5, is_ended_by_us=True)
    assert not is_failure(ended_by_us)
    verdict = judge([ending(0, 3, 1.0), ended_by_us])
    assert verdict is not None
    assert verdict.first.rank == 0
    assert verdict.consequences == ()


def test_a_report_counts_from_when_it_was_written_not_from_the_exit() -> None:
    slow = ending(0, 1, at_s=9.0, report=report(0, 1.0, "KeyError: 'a'"))
    quick = ending(1, 7, at_s=2.0)
    verdict = judge([quick, slow])
    assert verdict is not None
    assert verdict.first is slow
    assert verdict.consequences == (quick,)


def test_an_error_that_blames_a_peer_gives_way_to_any_other() -> None:
    early = ending(0, report=report(0, 1.0, "PeerLost: rank 1 is gone", blames=True))
    killed = ending(1, -signal.SIGKILL, at_s=5.0)
    verdict = judge([early, killed])
    assert verdict is not None
    assert verdict.first is killed
    assert verdict.consequences == (early,)


def test_the_blame_is_seen_in_the_output_where_there_is_no_report() -> None:
    early = ending(0, at_s=1.0, tail="...\nparti.errors.PeerLost: rank 1 is gone\n")
    late = ending(1, 4, at_s=2.0)
    verdict = judge([early, late])
    assert verdict is not None
    assert verdict.first is late


def test_if_all_blame_others_the_first_is_told() -> None:
    both = [ending(r, report=report(r, 2.0 - r, f"PeerLost: {r}", blames=True)) for r in (0, 1)]
    verdict = judge(both)
    assert verdict is not None
    assert verdict.first.rank == 1


def test_the_same_words_from_several_ranks_are_one_defect() -> None:
    same = [ending(r, report=report(r, float(r), "ValueError: bad batch size")) for r in range(3)]
    text = text_of(*same)
    assert "rank 0 failed with exit code 1, and ranks 1, 2 alike" in text
    assert text.count("ValueError: bad batch size") == 1


def test_a_cause_found_later_takes_the_place_of_an_announced_consequence() -> None:
    announced = ending(0, report=report(0, 1.0, "PeerLost: 3", blames=True), host="a")
    cause = ending(3, -signal.SIGSEGV, host="b")
    verdict = fold(announced, [cause])
    assert verdict.first is cause
    assert verdict.consequences == (announced,)


@given(st.permutations(range(5)), st.integers(0, 4))
def test_the_order_in_which_endings_are_listed_does_not_matter(
    order: list[int], cause: int
) -> None:
    endings = [
        ending(r, report=report(r, float(r), f"E: {r}", blames=r != cause)) for r in range(5)
    ]
    verdict = judge([endings[index] for index in order])
    assert verdict == judge(endings)
    assert verdict is not None
    assert verdict.first.rank == cause
    assert [e.rank for e in verdict.consequences] == [r for r in range(5) if r != cause]


@pytest.mark.parametrize(("code", "shells"), [(0, 0), (3, 3), (-9, 137), (-11, 139), (-15, 143)])
def test_exit_codes_are_told_as_shells_do(code: int, shells: int) -> None:
    assert shell_code(code) == shells


@pytest.mark.parametrize(
    ("num_oom_kills", "words"),
    [(1, "want of memory"), (0, "not by the kernel's out-of-memory killer"), (None, "")],
)
def test_a_sigkill_says_whether_memory_is_plausible(num_oom_kills: int | None, words: str) -> None:
    text = text_of(ending(1, -signal.SIGKILL, num_oom_kills=num_oom_kills))
    assert "rank 1 was killed by SIGKILL" in text
    assert words in text
    assert ("memory" in text) == (num_oom_kills is not None)


def test_a_full_story() -> None:
    text = text_of(
        ending(2, report=report(2, 1.0, "ValueError: boom"), host="b"),
        ending(0, report=report(0, 2.0, "PeerLost: rank 2 is gone", blames=True), host="a"),
        ending(1, -signal.SIGABRT, at_s=3.0, host="a"),
    )
    assert text.splitlines() == [
        "rank 2 on b failed with exit code 1",
        "Traceback (most recent call last):",
        "  somewhere",
        "ValueError: boom",
        "after it, and most likely because of it:",
        "  rank 0 on a: PeerLost: rank 2 is gone",
        "  rank 1 on a: killed by SIGABRT",
        "log: runs/x/rank2.log",
    ]


def test_what_the_console_has_shown_is_not_repeated() -> None:
    shown = ending(0, 3, tail="a long story\n", is_on_console=True)
    assert "a long story" not in text_of(shown)
    assert "a long story" in text_of(ending(1, 3, tail="a long story\n"))


def test_the_excerpt_is_the_last_traceback_or_else_the_last_lines() -> None:
    head = "Traceback (most recent call last):\n"
    assert excerpt(f"x\n{head} 1\nE\ny\n{head} 2\nF\n") == f"{head} 2\nF"
    assert excerpt("\n".join(map(str, range(50)))).splitlines() == [str(n) for n in range(30, 50)]


def test_the_summary_without_a_report() -> None:
    assert summary(ending(0, 1, tail="Traceback (most recent call last):\n a\nE: b\n")) == "E: b"
    assert summary(ending(0, 5, tail="some output\n")) == "exit code 5"
