"""The folder of a new run: whole or not there, whatever happens while it is made."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jobs.errors import SpecError
from service import run_store
from service.run_store import FAILED, RUNNING, create_run, iter_runs, read_spec, read_state
from tests.support.runs import tiny_spec

ROOT = Path(__file__).resolve().parents[3]
CREATE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from jobs.spec.load import spec_from_json
from service import run_store
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "rename":
    Path.rename = die
else:
    setattr(run_store, sys.argv[2], die)
spec_file = Path(sys.argv[1])
run_store.create_run(spec_from_json(spec_file.read_text()), spec_file.parent / "runs" / "demo")
"""


@pytest.mark.parametrize("moment", ["write_atomically", "write_state", "rename"])
def test_killed_while_it_is_made_the_name_stays_free(tmp_path: Path, moment: str) -> None:
    spec = tiny_spec(tmp_path / "runs")
    (tmp_path / "spec.json").write_text(run_store.resolved_json(spec))
    words = [sys.executable, "-c", CREATE_AND_DIE, str(tmp_path / "spec.json"), moment]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "runs").iterdir())) == 1, "it died before it had begun"
    assert list(iter_runs(tmp_path / "runs")) == []
    create_run(spec, tmp_path / "runs" / "demo")
    assert list(iter_runs(tmp_path / "runs")) == [tmp_path / "runs" / "demo"]


def test_a_new_run_is_whole_and_alive_on_every_host(tmp_path: Path) -> None:
    spec, run_dir = tiny_spec(tmp_path), tmp_path / "a" / "b" / "demo"
    state = create_run(spec, run_dir)
    assert read_state(run_dir) == state
    assert read_spec(run_dir) == spec
    assert [path.name for path in run_dir.parent.iterdir()] == ["demo"]
    elsewhere = replace(state, driver_host="another", driver_pid=1)
    assert elsewhere.current_status(run_dir) == RUNNING


def test_a_killed_driver_that_nobody_has_reaped_is_dead(tmp_path: Path) -> None:
    state = create_run(tiny_spec(tmp_path), tmp_path / "demo")
    with subprocess.Popen(["sleep", "60"]) as driver:
        started_at = psutil.Process(driver.pid).create_time()
        state = replace(state, driver_pid=driver.pid, driver_started_at=started_at)
        assert state.current_status(tmp_path / "demo") == RUNNING
        os.kill(driver.pid, signal.SIGKILL)
        os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
        assert state.current_status(tmp_path / "demo") == FAILED


@pytest.mark.parametrize("there", ["empty folder", "folder", "file", "dangling link"])
def test_a_name_that_anything_has_is_in_use(tmp_path: Path, there: str) -> None:
    run_dir = tmp_path / "demo"
    if there == "file":
        run_dir.write_text("mine")
    elif there == "dangling link":
        run_dir.symlink_to(tmp_path / "nowhere")
    else:
        run_dir.mkdir()
    if there == "folder":
        (run_dir / "notes").write_text("mine")
    with pytest.raises(SpecError, match="run name in use"):
        create_run(tiny_spec(tmp_path), run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert [path.name for path in run_dir.glob("*")] == (["notes"] if there == "folder" else [])


def test_the_second_of_two_at_the_same_moment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, write_state = tmp_path / "demo", run_store.write_state

    def overtaken(making: Path, state: run_store.RunState) -> None:
        write_state(making, state)
        run_dir.mkdir()
        (run_dir / "run.json").write_text("the other's")

    monkeypatch.setattr(run_store, "write_state", overtaken)
    with pytest.raises(SpecError, match="run name in use"):
        create_run(tiny_spec(tmp_path), run_dir)
    assert (run_dir / "run.json").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
