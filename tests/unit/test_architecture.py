"""The house: who may import whom, who reads the environment, what the façade shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parti

SOURCE = Path(parti.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)

LAYERS: dict[str, int] = {
    "cli": 6,
    "__main__": 6,
    "testing": 5,
    "doctor": 5,
    "trainer": 5,
    "strategy": 4,
    "monitor": 4,
    "checkpoint": 4,
    "datasets": 4,
    "curves": 3,
    "history": 3,
    "metrics": 3,
    "engine": 3,
    "launch": 3,
    "data": 3,
    "elastic": 3,
    "comm": 2,
    "cluster": 1,
    "errors": 0,
}
"""A room may import from rooms of its own layer and below. Files of the Trainer share its layer."""
TRAINERS_LAYER = 5


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules imported anywhere in a file, those for type checking only left out."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(child for part in node.body for child in ast.walk(part))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "parti":
                yield from (f"parti.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    layer = LAYERS.get(room(path), TRAINERS_LAYER)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "parti" and len(parts) > 1:
            assert LAYERS.get(parts[1], TRAINERS_LAYER) <= layer, f"{name} lies above"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_comm_knows_torch_distributed(path: Path) -> None:
    if room(path) != "comm":
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_environment_is_read_in_cluster_and_launch_only(path: Path) -> None:
    if room(path) not in ("cluster", "launch", "cli"):
        text = path.read_text()
        assert "os.environ" not in text
        assert "getenv" not in text


def test_the_launcher_never_imports_torch() -> None:
    script = (
        "import sys, parti.cli, parti.cluster, parti.launch.job, parti.launch.supervisor;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_facade_is_sorted_and_every_name_is_there() -> None:
    assert list(parti.__all__) == sorted(parti.__all__)
    for name in parti.__all__:
        assert getattr(parti, name) is not None


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(AttributeError, match="MirroredStrategy"):
        parti.MirorredStrategy  # noqa: B018
