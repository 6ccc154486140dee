"""Every example runs in its short form, on two processes and as its twin; few lines differ."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

PRINTS = {
    "bare_loop": "accuracy 0.",
    "char_gpt": "def ",
    "cifar_resnet18": "accuracy",
    "digits": "accuracy",
    "gan": "==",
    "mnist_cnn": "accuracy",
}
"""What must be in the output of each, and of its twin."""

NAMES = sorted(PRINTS)

CHANGED = {"bare_loop": 5, "gan": 6}
"""Lines that differ from the twin where it is not four: a loop of one's own has a line to bind and
one for each kind of step in place of the trainer's two."""


def run(*command: str, cwd: Path) -> str:
    """The output of a program that ends well."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def code(path: Path) -> list[str]:
    """The lines that do something: indentation, comments, docstring and imports left out."""
    text = path.read_text().split('"""', 2)[2]
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "import ", "from "))]


def test_every_example_has_a_twin() -> None:
    twins = {path.stem for path in (EXAMPLES / "single_device").glob("*.py")}
    assert twins == set(NAMES)
    # The demonstration compares one process with many by itself.
    assert {path.stem for path in EXAMPLES.glob("*.py")} == twins | {"demo"}


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ_from_the_single_device_twin(name: str) -> None:
    twin, here = code(EXAMPLES / "single_device" / f"{name}.py"), code(EXAMPLES / f"{name}.py")
    changed = [line for line in difflib.ndiff(twin, here) if line.startswith("+ ")]
    assert len(changed) == CHANGED.get(name, 4), changed


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_two_processes(name: str, tmp_path: Path) -> None:
    script = str(EXAMPLES / f"{name}.py")
    output = run("-m", "parti", "run", "-n", "2", script, "--short", cwd=tmp_path)
    assert PRINTS[name] in output


def test_runs_when_started_plainly(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "digits.py"), "--short", cwd=tmp_path)
    assert PRINTS["digits"] in output


@pytest.mark.parametrize("name", NAMES)
def test_twin_runs_on_one_device(name: str, tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "single_device" / f"{name}.py"), "--short", cwd=tmp_path)
    assert PRINTS[name] in output


def test_the_readmes_program_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = (ROOT / "README.md").read_text().split("```python\n")
    script = tmp_path / "train.py"
    program = blocks[1].split("```")[0]
    script.write_text(program.replace("epochs=20", "epochs=2"))
    assert program.count("epochs=20") == 1
    run("-m", "parti", "run", "-n", "2", str(script), cwd=tmp_path)
    assert (tmp_path / "digits.safetensors").stat().st_size > 1000
