"""Twenty faults at random moments; `make chaos` does the same two hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import chaos


@pytest.mark.timeout(300)
def test_twenty_faults_leave_no_trace(tmp_path: Path) -> None:
    found = chaos.run(processes=3, faults=20, seed=5, directory=tmp_path)
    assert found == {chaos.undisturbed(sorted(found)[0], tmp_path / "alone")}
