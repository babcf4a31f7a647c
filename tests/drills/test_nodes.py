"""A node goes away under a run that spans two: the run goes on where there is room, bit for bit."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.live_runs import live_run, shard_checksums
from tests.support.ray_cluster import ray_cluster

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]
STEPS = 60
SLOW = ("train.global_batch_size=32", "train.micro_batch_size=16", "data.seq_len=256")
"""Workers outlive their raylet for a while: the run must be under way when they go."""


def test_a_killed_raylet_of_the_second_node(tmp_path: Path) -> None:
    overrides = (f"train.steps={STEPS}", "strategy.dp=2", "resources.placement=SPREAD", *SLOW)
    with ray_cluster(n_cpus=2) as cluster:
        second = cluster.add_node(n_cpus=2)
        flags = ("--address", cluster.address)
        with live_run(tmp_path, "calm", *overrides, flags=flags) as calm:
            assert calm.wait(300) == 0, calm.text()
        with live_run(tmp_path, "nodeless", *overrides, flags=flags) as run:
            run.until_step(STEPS // 6)
            raylets = [p for p in psutil.Process(second.pid).children() if "raylet/raylet" in p.cmdline()[0]]
            assert len(raylets) == 1
            os.kill(raylets[0].pid, signal.SIGKILL)
            assert run.wait(400) == 0, run.text()
        incidents = run.events("incident")
        assert [event["action"] for event in incidents][-1] == "RESTART"
        assert {event["class"] for event in incidents} <= {"node_lost", "worker_killed", "network"}
        assert "node_lost" in {event["class"] for event in incidents}
        assert len(run.events("attempt_started")) == 2
        assert shard_checksums(run.run_dir, STEPS) == shard_checksums(calm.run_dir, STEPS)
