"""Whole runs through the command line on an embedded Ray cluster, undisturbed and disturbed."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_runs import LiveRun, live_run, packtrain, resumed_run, shard_checksums

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
STEPS = 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """The run that nothing disturbs: what every disturbed one must equal."""
    with live_run(
        tmp_path_factory.mktemp("undisturbed"), "calm", f"train.steps={STEPS}", "strategy.dp=2"
    ) as run:
        assert run.wait() == 0, run.text()
        yield run


def test_an_undisturbed_run_finishes_once_and_leaves_no_process(undisturbed: LiveRun) -> None:
    assert [line["step"] for line in undisturbed.metrics()] == list(range(1, STEPS + 1))
    assert undisturbed.metrics()[-1]["loss"] < undisturbed.metrics()[0]["loss"]
    assert not undisturbed.events("incident")
    assert [event["status"] for event in undisturbed.events("run_ended")] == ["FINISHED"]
    left = [process for process in undisturbed.own if process.is_running()]
    assert not left
    told = packtrain("report", str(undisturbed.run_dir), "--json", cwd=undisturbed.run_dir)
    report = json.loads(told.stdout)
    assert (report["status"], report["steps"], report["lost_steps"]) == ("FINISHED", STEPS, 0)
    assert (undisturbed.run_dir / "report.html").exists()
    assert (undisturbed.run_dir / "loss.png").exists()


def test_a_killed_rank_is_restarted_in_place_and_the_weights_are_bitwise_equal(
    undisturbed: LiveRun, tmp_path: Path
) -> None:
    with live_run(tmp_path, "killed", f"train.steps={STEPS}", "strategy.dp=2") as run:
        run.until_step(STEPS // 2)
        rank = run.pid_of("packtrain[killed] rank 1")
        # Ray's workers run at a lower priority than other programs, their ranks must not.
        assert os.getpriority(os.PRIO_PROCESS, rank) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(rank, signal.SIGKILL)
        assert run.wait() == 0, run.text()
        incident = run.events("incident")
        assert [(i["class"], i["action"]) for i in incident] == [("worker_killed", "RESTART_RANKS")]
        assert incident[0]["culprit"].startswith("rank 1 ")
        assert len(run.events("attempt_started")) == 1
        assert len(run.events("ranks_started")) == 2
        assert shard_checksums(run.run_dir, STEPS) == shard_checksums(undisturbed.run_dir, STEPS)
        report = json.loads(packtrain("report", str(run.run_dir), "--json", cwd=tmp_path).stdout)
        assert report["restarts"] == 1
        assert report["lost_steps"] == len(run.metrics()) - STEPS
        assert sum(report["phases_s"].values()) == pytest.approx(report["wall_s"], abs=1e-3)


def test_a_killed_driver_is_followed_by_resume(undisturbed: LiveRun, tmp_path: Path) -> None:
    with live_run(tmp_path, "driverless", f"train.steps={STEPS}", "strategy.dp=2") as run:
        run.until_step(STEPS // 2)
        run.processes()
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
        listed = json.loads(
            packtrain("list", "--storage", str(tmp_path / "runs"), "--json", cwd=tmp_path).stdout
        )
        assert [(row["run_id"], row["status"]) for row in listed] == [("driverless", "FAILED")]
        with resumed_run(tmp_path, "driverless") as again:
            assert again.wait() == 0, again.text()
        assert shard_checksums(run.run_dir, STEPS) == shard_checksums(undisturbed.run_dir, STEPS)


def test_stop_saves_first_and_resume_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    steps = 300
    storage = str(tmp_path / "runs")
    overrides = (f"train.steps={steps}", "strategy.dp=2", "checkpoint.every_steps=1000")
    with live_run(tmp_path, "stopped", *overrides) as run:
        run.until_step(5)
        told = packtrain("stop", "stopped", "--storage", storage, cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        assert "STOPPED" in told.stdout
        assert run.wait() == 3
        stopped_at = run.last_step()
        assert 5 <= stopped_at < steps
        assert [event["step"] for event in run.events("checkpoint_committed")] == [stopped_at]
        refused = packtrain("resume", "stopped", "--storage", storage, "--set", "run.seed=7", cwd=tmp_path)
        assert refused.returncode == 2
        assert "run.seed: 0 -> 7" in refused.stderr
    with resumed_run(tmp_path, "stopped") as again:
        assert again.wait() == 0, again.text()
        assert [line["step"] for line in again.metrics()] == list(range(1, steps + 1))
        assert [line["sample_ordinal"] for line in again.metrics()] == [
            4 * step for step in range(1, steps + 1)
        ]
        finished = packtrain("resume", "stopped", "--storage", storage, cwd=tmp_path)
        assert finished.returncode == 2
        assert "FINISHED" in finished.stderr


def test_an_error_in_the_data_code_stops_at_once_with_its_traceback(tmp_path: Path) -> None:
    """A shard of the prepared data that vanishes under the run is no reason to try again."""
    with live_run(tmp_path, "broken", "train.steps=2000", "strategy.dp=2") as run:
        run.until_step(3)
        told = packtrain("logs", "broken", "--storage", str(tmp_path / "runs"), cwd=tmp_path)
        assert told.returncode == 0
        pid = run.pid_of("packtrain[broken] rank 0")
        cache = tmp_path / "runs" / "cache"
        for path in cache.rglob("*.bin"):
            path.write_bytes(b"")
        with contextlib.suppress(ProcessLookupError):  # it has mapped what is gone: SIGBUS may be faster
            os.kill(pid, signal.SIGKILL)  # the next generation reads the data anew
        assert run.wait() == 93
        last = run.events("incident")[-1]
        assert last["action"] == "STOP"
        assert last["class"] in ("configuration", "user_code")
        assert "Traceback" in last["evidence"]
        assert "Traceback" in run.text() or "DataError" in run.text()
