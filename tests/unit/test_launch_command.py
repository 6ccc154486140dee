"""What `parti run` makes of its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.launch.command import RunOptions, nodes_by_options, read_options, run_script
from parti.launch.environment import ProcessTuning
from parti.launch.job import Nodes


def test_all_that_follows_the_script_is_the_scripts() -> None:
    options = read_options(["-n", "2", "train.py", "--epochs", "3", "-n", "7", "--", "-m", "-h"])
    assert options.num_processes == 2
    assert options.script == "train.py"
    assert options.arguments == ("--epochs", "3", "-n", "7", "--", "-m", "-h")


def test_a_module() -> None:
    options = read_options(["-m", "package.train", "-n", "7"])
    assert (options.is_module, options.script) == (True, "package.train")
    assert options.arguments == ("-n", "7")
    assert options.num_processes is None


def test_values_may_be_attached() -> None:
    options = read_options(["-n4", "--threads=2", "--runs-dir=/r", "--name", "a", "x.py"])
    assert (options.num_processes, options.threads, options.script) == (4, 2, "x.py")
    assert (options.runs_dir, options.name) == (Path("/r"), "a")


@pytest.mark.parametrize(
    ("flags", "tuning"),
    [
        ([], ProcessTuning()),
        (["--no-allocator-tuning"], ProcessTuning(allocator=False)),
        (["--no-thread-tuning"], ProcessTuning(threads=False)),
        (["--no-tuning"], ProcessTuning(allocator=False, threads=False)),
    ],
)
def test_tuning_can_be_turned_off(flags: list[str], tuning: ProcessTuning) -> None:
    assert read_options([*flags, "x.py"]).tuning == tuning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no script"),
        (["-n"], "expected one argument"),
        (["-n", "two", "x.py"], "invalid int value: 'two'"),
        (["--nproc", "2", "x.py"], "unrecognized arguments: --nproc"),
    ],
)
def test_a_command_line_that_cannot_be_read(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"did you mean .*/train\.py\?"):
        run_script(RunOptions(script=str(tmp_path / "trian.py")))
    with pytest.raises(ConfigError, match="there is no directory"):
        run_script(RunOptions(script=str(tmp_path / "src" / "train.py")))
    with pytest.raises(ConfigError, match=r"a directory without a __main__\.py"):
        run_script(RunOptions(script=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 0}, "-n is 0; it has to be 1 or more"),
        ({"threads": 0}, "--threads is 0"),
        ({"nodes": "2"}, "--node-rank and --address missing"),
        ({"nodes": "2", "node_rank": 2, "address": "h:1"}, "has to be between 0 and 1"),
        ({"nodes": "0", "node_rank": 0, "address": "h:1"}, "--nodes is 0"),
        ({"nodes": "2", "node_rank": 0, "address": "h"}, "expected HOST:PORT"),
        ({"nodes": "2", "node_rank": 0, "address": "h:99999"}, "expected HOST:PORT"),
        ({"nodes": "two", "node_rank": 0, "address": "h:1"}, "expected a number, or MIN:MAX"),
        ({"nodes": "4:1", "address": "h:1"}, "expected MIN:MAX with 1 <= MIN <= MAX"),
        ({"nodes": "1:", "address": "h:1"}, "expected MIN:MAX"),
        ({"nodes": "1:4"}, "--address missing"),
        ({"nodes": "1:4", "node_rank": 0, "address": "h:1"}, "leave it out"),
        ({"nodes": "1:4", "address": "h"}, "expected HOST:PORT"),
        ({"join": "h"}, "--join is 'h'; expected HOST:PORT"),
        ({"join": "h:1", "nodes": "2"}, "--join comes with --nodes"),
    ],
)
def test_options_that_cannot_be(options: dict[str, int], words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match=words):
        run_script(RunOptions(script=str(script), **options))  # type: ignore[arg-type]


def test_nodes() -> None:
    expected = Nodes(node_rank=1, num_nodes=2, address="tcp://10.0.0.1:29400")
    assert nodes_by_options(2, 1, "10.0.0.1:29400") == expected
    assert nodes_by_options(2, 1, "tcp://10.0.0.1:29400") == expected


def test_a_process_that_is_a_rank_already_cannot_be_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="was started once for each rank"):
        run_script(RunOptions(script=str(script)))
