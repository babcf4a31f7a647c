"""One driver for a run: the second is refused, that of a dead one follows. Real processes, real locks."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.errors import SpecError
from service.run_store import FAILED, RUNNING, RunState, read_state, sole_driver, write_state

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from pathlib import Path
from service.run_store import sole_driver
with sole_driver(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    write_state(tmp_path, RunState("one", FAILED, created_at=1.0))
    return tmp_path


@contextmanager
def other_driver(run_dir: Path, for_s: float) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run."""
    words = [sys.executable, "-c", HOLD, str(run_dir), str(for_s)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_second_driver_is_refused_while_the_first_prepares(run_dir: Path) -> None:
    """The state says FAILED until the first has found its data and its cluster: only the lock can tell."""
    with (
        other_driver(run_dir, 60.0),
        pytest.raises(SpecError, match="is held by another process"),
        sole_driver(run_dir, wait_s=0.3),
    ):
        pass


def test_the_place_of_a_killed_driver_is_free(run_dir: Path) -> None:
    with other_driver(run_dir, 60.0) as process:
        process.kill()
        process.wait()
        with sole_driver(run_dir, wait_s=0.0):
            pass


def test_a_driver_that_closes_its_books_is_waited_for(run_dir: Path) -> None:
    with other_driver(run_dir, 1.0) as process, sole_driver(run_dir, wait_s=30.0):
        assert process.wait(10) == 0


def test_a_running_run_is_refused_at_once(run_dir: Path) -> None:
    driven = replace(read_state(run_dir), status=RUNNING).driven_by_me()
    with other_driver(run_dir, 60.0):
        began = time.monotonic()
        write_state(run_dir, replace(driven, driver_pid=1, driver_host="another", driver_started_at=0.0))
        (run_dir / "control" / "driver_alive").touch()
        with pytest.raises(SpecError, match="on another"), sole_driver(run_dir, wait_s=30.0):
            pass
        assert time.monotonic() - began < 5.0
