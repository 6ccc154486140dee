"""What the documents show works when it is copied."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The first block of each is a whole script; it is made short, and otherwise left as it is.
FIRST_SCRIPTS = {
    "README.md": ("epochs=20", "epochs=1"),
    "docs/trainer.md": ("epochs=3", "epochs=1"),
}


def blocks(document: str) -> list[str]:
    """The Python in a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(directory: Path, script: str) -> str:
    (directory / "train.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
    done = subprocess.run(
        [sys.executable, "-m", "parti", "run", "-n", "2", "train.py"],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("document", sorted(FIRST_SCRIPTS))
def test_the_first_script_of_a_document_runs(document: str, tmp_path: Path) -> None:
    script = blocks(document)[0]
    long, short = FIRST_SCRIPTS[document]
    assert script.count(long) == 1
    shown = run(tmp_path, script.replace(long, short))
    assert "epoch 1/1" in shown
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_the_readmes_own_loop_runs(tmp_path: Path) -> None:
    whole, loop = blocks("README.md")[:2]
    model, _, _ = whole.partition("trainer = ")
    assert "epochs=20" in loop
    script = f"from torch.nn import functional as F\n{model}{loop.replace('epochs=20', 'epochs=1')}"
    assert "0.0 < loss" in run(
        tmp_path, f"{script}\nprint('0.0 < loss' if report.loss > 0 else '')"
    )


def test_the_own_loops_of_the_documents_run(tmp_path: Path) -> None:
    bodies = blocks("docs/trainer.md")
    (loop,) = (text for text in bodies if "optimizer = torch.optim.SGD" in text)
    (parts,) = (text for text in bodies if "parts = replica.run" in text)
    script = f"""
import torch, parti
from torch import nn
from torch.nn import functional as F

def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

train = tuple(part[:200] for part in parti.datasets.digits().train)
value, n = torch.tensor(2.0), 3
{loop}
{parts}
print("all ran")
"""
    assert "all ran" in run(tmp_path, script)
