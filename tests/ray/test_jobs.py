"""Runs on a cluster that somebody else started: by `packtrain submit`, and by plain `ray job submit`."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_runs import ROOT, SPEC, command_environment, packtrain
from tests.support.ray_cluster import RayCluster, ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(n_cpus=2) as started:
        yield started


def wait_for_end(storage: Path, run: str, limit_s: float = 200.0) -> dict[str, object]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        told = packtrain("status", run, "--storage", str(storage), "--json", cwd=storage.parent)
        if told.returncode == 0 and json.loads(told.stdout)["status"] != "RUNNING":
            found: dict[str, object] = json.loads(told.stdout)
            return found
        time.sleep(2.0)
    raise AssertionError(f"run {run} has not ended: {told.stdout} {told.stderr}")


def test_packtrain_submit(cluster: RayCluster, tmp_path: Path) -> None:
    storage = tmp_path / "runs"
    told = packtrain(
        "submit",
        str(SPEC),
        "--address",
        cluster.dashboard,
        "--set",
        f"run.storage={storage}",
        "--set",
        "strategy.dp=2",
        "--json",
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stderr
    submitted = json.loads(told.stdout)
    state = wait_for_end(storage, submitted["run_id"])
    assert (state["status"], state["step"]) == ("FINISHED", 10)
    assert submitted["run_dir"] == str(storage / submitted["run_id"])


def test_ray_job_submit_with_the_working_directory(cluster: RayCluster, tmp_path: Path) -> None:
    storage = tmp_path / "runs"
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run(
        [
            str(ray),
            "job",
            "submit",
            "--address",
            cluster.dashboard,
            "--working-dir",
            str(ROOT),
            "--",
            "python",
            *("-m", "service", "run", "jobs/specs/tiny.yaml"),
            *("--set", f"run.storage={storage}", "--set", "run.name=plain"),
        ],
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    assert "FINISHED" in told.stdout
    state = wait_for_end(storage, "plain")
    assert (state["status"], state["step"]) == ("FINISHED", 10)


def test_more_workers_than_the_cluster_has_is_refused_before_a_worker_starts(
    cluster: RayCluster, tmp_path: Path
) -> None:
    told = packtrain(
        "run",
        str(SPEC),
        *("--address", cluster.address),
        *("--set", f"run.storage={tmp_path / 'runs'}", "--set", "run.name=large"),
        *("--set", "strategy.dp=4", "--set", "train.global_batch_size=8"),
        cwd=tmp_path,
    )
    assert told.returncode == 2
    assert "4" in told.stderr
    assert "2" in told.stderr
    assert not (tmp_path / "runs" / "large").exists()
