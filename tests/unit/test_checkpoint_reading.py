"""Reading: what is damaged is found and named, and the newest good one is used."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parti.checkpoint.manifest import MANIFEST, SUMS
from parti.checkpoint.read import facts, list_checkpoints, load, newest_good, verify
from parti.checkpoint.value import Checkpoint
from parti.checkpoint.writer import Writer
from parti.errors import CheckpointError

PART = "part-00000-of-00002.safetensors"


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(60, 30, generator=generator)
    return {
        "model": {"embed": weight, "head": weight, "norm": torch.randn(30, generator=generator)},
        "average": {"embed": torch.randn(60, 30, generator=generator).bfloat16()},
        "wide": torch.randn(3, dtype=torch.complex128, generator=generator),
        "empty": torch.empty(0, 4),
        "step": step,
    }


def write(directory: Path, *steps: int) -> None:
    settings = Checkpoint(directory, keep=10)
    writers = [Writer(settings, token="job", note=pytest.fail) for _ in range(2)]
    for step in steps:
        for part, writer in enumerate(writers):
            writer.begin(
                state(step),
                step=step,
                facts={"epoch": step // 100, "rate": float("inf")},
                part=part,
                num_parts=2,
                deadline_s=30.0,
            )
        assert [writer.wait(30.0) for writer in writers] == [None, None]
    for writer in writers:
        writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    write(directory, 100, 200, 300)
    return directory


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def assert_is_state(tree: Any, step: int) -> None:
    expected = state(step)
    assert tree["step"] == step
    for branch, name in [("model", "embed"), ("model", "norm"), ("average", "embed")]:
        assert torch.equal(tree[branch][name], expected[branch][name])
    assert torch.equal(tree["wide"], expected["wide"])
    assert tree["empty"].shape == (0, 4)
    assert tree["model"]["head"] is tree["model"]["embed"]


def test_the_newest_first(written: Path) -> None:
    found = list_checkpoints(written)
    assert [one.step for one in found] == [300, 200, 100]
    assert [one.head.facts["epoch"] for one in found if one.head] == [3, 2, 1]
    assert found[0].num_bytes == sum(
        path.stat().st_size for path in found[0].path.glob("*.safetensors")
    )


def test_a_directory_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == ()
    assert newest_good(tmp_path / "nowhere", pytest.fail) is None


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Expected a directory of checkpoints"):
        list_checkpoints(tmp_path / "file")


def test_what_was_written_is_read(written: Path) -> None:
    for step in (100, 200, 300):
        path = written / f"step-{step:010}"
        assert verify(path) == ()
        assert_is_state(load(path), step)
        assert facts(path) == {"epoch": step // 100, "rate": float("inf")}


def test_a_checkpoint_may_be_moved(directory: Path, tmp_path: Path) -> None:
    moved = (directory / "step-0000000200").rename(tmp_path / "best")
    assert verify(moved) == ()
    assert_is_state(load(moved), 200)


def test_a_part_of_the_tensors(written: Path) -> None:
    path = written / "step-0000000300"
    found = load(path, names=lambda name: name.startswith("average."))
    assert found == {"model": {}, "average": found["average"], "step": 300}
    assert torch.equal(found["average"]["embed"], state(300)["average"]["embed"])
    tied = load(path, names=lambda name: name == "model.head")  # held under another name
    assert torch.equal(tied["model"]["head"], state(300)["model"]["embed"])


def test_files_of_no_wanted_tensor_are_not_read(directory: Path) -> None:
    path = directory / "step-0000000300"
    manifest = json.loads((path / MANIFEST).read_text())
    (path / manifest["tensors"]["average.embed"]["file"]).unlink()
    other = [
        name
        for name, tensor in manifest["tensors"].items()
        if tensor["file"] != manifest["tensors"]["average.embed"]["file"]
    ]
    load(path, names=other.__contains__)
    with pytest.raises(CheckpointError):
        load(path)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def rewrite_format(path: Path) -> None:
    manifest = path.parent / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace("parti.checkpoint/1", "parti.checkpoint/9"))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped byte": (PART, lambda path: flip(path, -1), "SHA-256"),
    "a flipped byte of the header": (PART, lambda path: flip(path, 20), "damaged"),
    "a flipped byte of the header's length": (PART, lambda path: flip(path, 2), "damaged"),
    "a truncated part": (PART, truncate, "bytes instead of"),
    "a longer part": (PART, lambda path: path.write_bytes(path.read_bytes() + b"x"), "instead of"),
    "a missing part": (PART, Path.unlink, ""),
    "an empty part": (PART, lambda path: path.write_bytes(b""), "0 bytes instead of"),
    "a flipped byte of the manifest": (MANIFEST, lambda path: flip(path, 300), "damaged"),
    "a truncated manifest": (MANIFEST, truncate, "damaged"),
    "an empty manifest": (MANIFEST, lambda path: path.write_bytes(b""), "damaged"),
    "a manifest that is none": (MANIFEST, lambda path: path.write_text("[1]"), "damaged"),
    "a manifest that is no text": (MANIFEST, lambda path: path.write_bytes(b'"\xff'), "damaged"),
    "a missing manifest": (MANIFEST, Path.unlink, "is missing"),
    "a flipped byte of the sums": (SUMS, lambda path: flip(path, 5), "damaged"),
    "missing sums": (SUMS, Path.unlink, "is missing"),
    "a foreign version": (MANIFEST, rewrite_format, "'parti.checkpoint/9'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named_and_an_older_one_used(directory: Path, damage: str) -> None:
    name, spoil, words = DAMAGES[damage]
    path = directory / "step-0000000300"
    spoil(path / name)
    problems = verify(path)
    assert len(problems) == 1
    assert name in problems[0]
    assert words in problems[0]
    notes: list[str] = []
    newest = newest_good(directory, notes.append)
    assert newest is not None
    assert newest.step == 200
    assert notes == [f"{path} is not used: {problems[0]}"]
    with pytest.raises(CheckpointError, match=name) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_every_flipped_byte_is_found(directory: Path) -> None:
    """In each file at many places, the first and the last among them."""
    path = directory / "step-0000000300"
    for file in path.iterdir():
        whole = file.read_bytes()
        step = max(1, len(whole) // 40)
        for at in {*range(0, len(whole), step), len(whole) - 1}:
            flip(file, at)
            assert len(verify(path)) == 1, (file.name, at)
            with pytest.raises(CheckpointError):
                load(path)
            file.write_bytes(whole)
    assert verify(path) == ()


def test_all_that_is_wrong_is_named(directory: Path) -> None:
    path = directory / "step-0000000300"
    flip(path / PART, -1)
    (path / "part-00001-of-00002.safetensors").unlink()
    problems = verify(path)
    assert len(problems) == 2
    assert any(PART in problem and "SHA-256" in problem for problem in problems)
    assert "part-00001-of-00002.safetensors is missing." in problems


def test_where_none_is_good_all_are_named(directory: Path) -> None:
    for path in directory.iterdir():
        (path / PART).unlink()
    notes: list[str] = []
    assert newest_good(directory, notes.append) is None
    assert len(notes) == 3


def test_one_without_a_manifest_stands_where_its_step_does(directory: Path) -> None:
    (directory / "step-0000000200" / MANIFEST).unlink()
    found = list_checkpoints(directory)
    assert [one.step for one in found] == [300, 200, 100]
    assert found[1].head is None
    assert "manifest.json is missing" in (found[1].problem or "")


def test_a_manifest_names_no_file_elsewhere(directory: Path) -> None:
    path = directory / "step-0000000300"
    text = (path / MANIFEST).read_text().replace(PART, f"../step-0000000200/{PART}")
    (path / MANIFEST).write_text(text)
    sums = (path / SUMS).read_text().splitlines()
    sums[0] = sums[0].replace(PART, f"../step-0000000200/{PART}")
    sums[-1] = f"{hashlib.sha256(text.encode()).hexdigest()}  {MANIFEST}"
    (path / SUMS).write_text("".join(f"{line}\n" for line in sums))
    assert "which is no part's name" in verify(path)[0]


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert verify(tmp_path / "nowhere") == ("the checkpoint is missing.",)
    assert "manifest.json is missing" in verify(tmp_path)[0]
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        facts(tmp_path)


def test_looking_and_verifying_need_no_torch() -> None:
    script = (
        "import sys, parti.checkpoint.command, parti.checkpoint.read, parti.checkpoint.value;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
