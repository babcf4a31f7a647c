"""For tests of single parts of the service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.fork_client import ForkServer
from tests.support.one_rank import start_server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder in a storage of its own: what the runs of one storage know of nodes is shared."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A warm fork server for real ranks of the native engine."""
    made = start_server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()
