"""`parti checkpoint`: what it prints, writes, and returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parti import cli
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer

Run = Any


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model.head(model.norm(model.embed(torch.arange(5)))).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    writer = Writer(Checkpoint(tmp_path / "kept"), token="job", note=pytest.fail)
    for step in (10, 20):
        writer.begin(
            {**tree, "step": step},
            step=step,
            facts={"epoch": step // 10, "seed": 7},
            part=0,
            num_parts=1,
            deadline_s=30.0,
        )
        assert writer.wait(30.0) is None
    writer.close()
    return tmp_path / "kept"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program; returns its exit code and what it printed."""

    def run_program(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["parti", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run_program


def spoil(path: Path) -> None:
    (part,) = path.glob("part*")
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_inspect_a_directory(run: Run, directory: Path) -> None:
    code, out, _ = run("inspect", directory)
    assert code == 0
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["step", "epoch", "written", "size", "parts", "tensors"]
    assert [row[:2] for row in rows] == [["20", "2"], ["10", "1"]]
    assert rows[0][-2:] == ["1", "15"]
    (directory / "step-0000000010" / "manifest.json").unlink()
    assert "manifest.json is missing." in run("inspect", directory)[1]


def test_inspect_one(run: Run, directory: Path) -> None:
    code, out, _ = run("inspect", directory / "step-0000000020")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "step 20" in lines
    assert "epoch 2" in lines
    assert "seed 7" in lines
    assert "model.embed.weight float32 5×3 part-00000" in lines
    assert "model.norm.num_batches_tracked int64 – part-00000" in lines
    assert "model.head.weight = model.embed.weight" in lines


def test_verify(run: Run, directory: Path) -> None:
    code, out, _ = run("verify", directory)
    assert code == 0
    assert [line.split(" ")[0] for line in out.splitlines()] == [
        "step-0000000020:", "step-0000000010:",
    ]  # fmt: skip
    spoil(directory / "step-0000000010")
    code, out, _ = run("verify", directory)
    assert code == 1
    assert "step-0000000020: good" in out
    assert "step-0000000010: damaged\n  part-00000-of-00001.safetensors is damaged" in out
    assert run("verify", directory / "step-0000000020")[0] == 0
    assert run("verify", directory / "step-0000000010")[0] == 1


def test_export_weights_that_a_model_takes(run: Run, directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    code, said, _ = run("export", directory / "step-0000000010", out)
    assert code == 0
    assert "step-0000000010 → " in said
    model = Tied()
    model.load_state_dict(load_file(out))
    assert torch.equal(model.embed.weight, trained()[0].embed.weight)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_export_the_whole_state(run: Run, directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    assert run("export", directory / "step-0000000010", out)[0] == 0
    state = torch.load(out, weights_only=True)
    model, optimizer = trained()
    assert state["step"] == 10
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def test_export_a_branch(run: Run, directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "optimizer.pt"
    assert run("export", directory / "step-0000000010", out, "--only", "optimizer")[0] == 0
    assert torch.load(out, weights_only=True).keys() == {"state", "param_groups"}
    weights = tmp_path / "optimizer.safetensors"
    code, _, err = run("export", directory / "step-0000000010", weights, "--only", "optimizer")
    assert code == 1
    assert "optimizer.param_groups.0.lr is a float" in err
    assert "Export to a name that ends in .pt" in err


def test_export_takes_the_newest_good_one(run: Run, directory: Path, tmp_path: Path) -> None:
    spoil(directory / "step-0000000020")
    code, out, _ = run("export", directory, tmp_path / "state.pt")
    assert code == 0
    assert "step-0000000020 is not used: part-00000-of-00001.safetensors is damaged" in out
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "nowhere"], 2, "nowhere does not exist"),
        (["verify", "."], 2, "is no checkpoint and holds none; expected manifest.json in it"),
        (["export", "kept", "out.bin"], 2, "'out.bin' does not say what to write"),
        (["export", "kept", "no/out.pt"], 2, "no is no directory"),
        (["export", "kept", "out.pt", "--only", "modle"], 2, "has no branch 'modle'; it has "),
        (["inspect", "kept/step-0000000030"], 1, "manifest.json is missing"),
    ],
)
def test_mistakes_are_explained(
    run: Run,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(directory.parent)
    found, _, err = run(*arguments)
    assert found == code
    assert err.startswith("parti: ")
    assert words in err
    assert {path.name for path in directory.parent.iterdir()} == {"kept"}
