"""Layouts beside data parallelism through the command line: a killed rank costs steps, never a bit."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.live_runs import live_run, packtrain, shard_checksums

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
STEPS = 16


def test_a_killed_rank_of_a_tensor_parallel_run_leaves_the_weights_bitwise_equal(tmp_path: Path) -> None:
    settings = (f"train.steps={STEPS}", "strategy.tp=2")
    with live_run(tmp_path, "calm", *settings) as calm:
        assert calm.wait() == 0, calm.text()
    with live_run(tmp_path, "hit", *settings) as run:
        run.until_step(STEPS // 2)
        os.kill(run.pid_of("packtrain[hit] rank 1"), signal.SIGKILL)
        assert run.wait() == 0, run.text()
    assert [event["action"] for event in run.events("incident")] == ["RESTART_RANKS"]
    assert shard_checksums(run.run_dir, STEPS) == shard_checksums(calm.run_dir, STEPS)
    told = packtrain("report", str(run.run_dir), cwd=tmp_path).stdout
    assert "native tp=2, 2 ranks" in told
