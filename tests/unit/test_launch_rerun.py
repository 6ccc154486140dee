"""When a script can put itself under a supervisor, and how it is started again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import parti.launch
from parti.errors import ConfigError
from parti.launch.rerun import Context, starting_directory, stem, unsuitable

SCRIPT = Context(
    orig_argv=("python", "train.py", "--epochs", "3"),
    main_file="/home/me/train.py",
    main_module=None,
    in_ipython=False,
    in_main_thread=True,
    in_child_of_multiprocessing=False,
)
MODULE = replace(
    SCRIPT,
    orig_argv=("python", "-m", "package"),
    main_file="/home/me/package/__main__.py",
    main_module="package.__main__",
)
COMMAND = replace(SCRIPT, orig_argv=("python", "-c", "import parti"), main_file=None)


@pytest.mark.parametrize("context", [SCRIPT, MODULE, COMMAND])
def test_what_can_be_run_again(context: Context) -> None:
    assert unsuitable(context) is None


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (replace(SCRIPT, orig_argv=("python",), main_file=None), "interactive interpreter"),
        (replace(SCRIPT, orig_argv=("python", "-"), main_file=None), "standard input"),
        (replace(SCRIPT, in_ipython=True), "notebook"),
        (replace(SCRIPT, in_main_thread=False), "thread"),
        (replace(SCRIPT, in_child_of_multiprocessing=True), "multiprocessing"),
        (replace(SCRIPT, main_file="/usr/bin/pytest"), "pytest"),
        (replace(SCRIPT, main_module="pytest.__main__"), "pytest"),
    ],
)
def test_what_cannot(context: Context, words: str) -> None:
    problem = unsuitable(context)
    assert problem is not None
    assert words in problem


def test_the_name_of_a_run() -> None:
    assert [stem(context) for context in (SCRIPT, MODULE, COMMAND)] == [
        "train",
        "package",
        "command",
    ]


@pytest.mark.parametrize(
    ("context", "now", "shells", "expected"),
    [
        (SCRIPT, "/home/me", "/home/me", None),
        (SCRIPT, "/data", "/home/me", "/home/me"),
        (SCRIPT, "/data", "/elsewhere", None),
        (SCRIPT, "/data", None, None),
        (replace(SCRIPT, orig_argv=("python", "/home/me/train.py")), "/data", "/home/me", None),
    ],
)
def test_workers_start_where_the_script_did(
    context: Context, now: str, shells: str | None, expected: str | None
) -> None:
    assert starting_directory(context, now, shells) == expected


def test_a_test_is_told_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"call parti\.launch\(fn, strategy\)"):
        parti.launch.ensure(2)


def test_a_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTI_RANK", "0")
    assert parti.launch.ensure(2) is None  # type: ignore[func-returns-value]


def test_in_a_worker_the_function_is_simply_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTI_RANK", "0")
    assert parti.launch(lambda a, b: a + b, 2, 3, 4) == 7  # type: ignore[operator]


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'start'"):
        parti.launch.start  # type: ignore[attr-defined] # noqa: B018
