"""For tests of single parts of the service."""

from pathlib import Path

import pytest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder in a storage of its own: what the runs of one storage know of nodes is shared."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return folder
