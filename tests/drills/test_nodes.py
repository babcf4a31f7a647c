"""Nodes go away under a run, come back, are drained or out of service: where it goes on, and with what."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from ray._raylet import GcsClient

from ops.node_book import NodeBook
from ops.quarantine import ChangeKind, NodeChange, Owner
from tests.support.live_runs import LiveRun, live_run, shard_checksums
from tests.support.ray_cluster import RayCluster, ray_cluster

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]
STEPS = 60
SECOND = "127.0.0.2"
SLOW = ("train.global_batch_size=32", "train.micro_batch_size=16", "data.seq_len=256")
"""Workers outlive their raylet for a while: the run must be under way when they go."""
TWO_NODES = ("strategy.dp=2", "resources.placement=SPREAD", *SLOW)


def kill_raylet(node: subprocess.Popen[bytes]) -> None:
    raylets = [p for p in psutil.Process(node.pid).children() if "raylet/raylet" in p.cmdline()[0]]
    assert len(raylets) == 1
    os.kill(raylets[0].pid, signal.SIGKILL)


def drain(cluster: RayCluster, address: str) -> None:
    """As an autoscaler does before it takes a preempted node away."""
    client = GcsClient(address=cluster.address)
    nodes = client.get_all_node_info()
    (node_id,) = [one for one, info in nodes.items() if info.node_manager_address == address]
    preemption, in_an_hour_ms = 2, 3_600_000 + int(1000 * time.time())
    is_accepted, why = client.drain_node(node_id.hex(), preemption, "spot", in_an_hour_ms)
    assert is_accepted, why


def losses(run: LiveRun) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics()}


def test_a_killed_raylet_of_the_second_node(tmp_path: Path) -> None:
    overrides = (f"train.steps={STEPS}", *TWO_NODES)
    with ray_cluster(n_cpus=2) as cluster:
        second = cluster.add_node(n_cpus=2, ip=SECOND)
        flags = ("--address", cluster.address)
        with live_run(tmp_path, "calm", *overrides, flags=flags) as calm:
            assert calm.wait(300) == 0, calm.text()
        with live_run(tmp_path, "nodeless", *overrides, flags=flags) as run:
            run.until_step(STEPS // 6)
            kill_raylet(second)
            assert run.wait(400) == 0, run.text()
        incident = run.events("incident")[-1]
        assert (incident["class"], incident["culprit"]) == ("node_lost", f"node {SECOND}")
        assert (incident["action"], incident["exclude"]) == ("RESTART_WITHOUT_NODE", [SECOND])
        assert {event["class"] for event in run.events("incident")} <= {"node_lost", "network"}
        assert [event["world_size"] for event in run.events("attempt_started")] == [2, 2]
        assert SECOND in run.events("ranks_started")[0]["nodes"]
        assert SECOND not in run.events("ranks_started")[-1]["nodes"]
        assert [change.node for change in NodeBook(tmp_path / "runs").changes()] == [SECOND]
        assert shard_checksums(run.run_dir, STEPS) == shard_checksums(calm.run_dir, STEPS)


def test_without_a_spare_the_run_shrinks_and_grows_back(tmp_path: Path) -> None:
    overrides = ("train.steps=48", *TWO_NODES)
    with ray_cluster(n_cpus=1) as cluster:
        second = cluster.add_node(n_cpus=1, ip=SECOND)
        flags = ("--address", cluster.address)
        with live_run(tmp_path, "calm", *overrides, flags=flags) as calm:
            assert calm.wait(300) == 0, calm.text()
        with live_run(tmp_path, "shrunk", *overrides, flags=flags) as run:
            run.until_step(7)
            kill_raylet(second)
            run.until(lambda: len(run.events("attempt_started")) == 2, "a shrunk attempt")
            cluster.add_node(n_cpus=1, ip=SECOND)
            assert run.wait(400) == 0, run.text()
        assert [(one["class"], one["action"]) for one in run.events("incident")] == [("node_lost", "SHRINK")]
        assert [event["layout"] for event in run.events("attempt_started")] == ["dp=2", "dp=1", "dp=2"]
        assert len(run.events("growth")) == 1
        by_attempt = [[line["step"] for line in run.metrics() if line["attempt"] == n] for n in range(3)]
        assert by_attempt[2][0] == by_attempt[1][-1] + 1  # it saved before it left
        assert losses(run) == pytest.approx(losses(calm), abs=1e-5)


def test_a_drained_node_is_left_with_a_checkpoint_and_one_out_of_service_never_used(tmp_path: Path) -> None:
    storage, broken = tmp_path / "runs", "127.0.0.3"
    cordon = NodeChange(1.0, broken, ChangeKind.CORDON, Owner.HUMAN, "fans")
    NodeBook(storage).change(lambda _: [cordon])
    with ray_cluster(n_cpus=2) as cluster:
        for ip, n_cpus in ((SECOND, 2), (broken, 4), ("127.0.0.4", 2)):
            cluster.add_node(n_cpus=n_cpus, ip=ip)
        flags = ("--address", cluster.address)
        overrides = ("train.steps=30", "resilience.max_attempts=1", "resilience.spares=1", *TWO_NODES)
        with live_run(tmp_path, "drained", *overrides, flags=flags) as run:
            run.until_step(8)
            first = run.events("ranks_started")[0]["nodes"]
            (spare,) = run.events("spares")
            assert len(spare["held"]) == 1
            assert not {broken, *first} & set(spare["held"])
            leaving = next(node for node in first if node.startswith("127."))
            drain(cluster, leaving)
            assert run.wait(400) == 0, run.text()
        (incident,) = run.events("incident")
        assert (incident["class"], incident["action"]) == ("preemption", "RESTART_WITHOUT_NODE")
        assert incident["at_checkpoint"]
        assert [line["step"] for line in run.metrics()] == list(range(1, 31))  # none was lost
        last = run.events("ranks_started")[1]["nodes"]
        assert len(first) == len(last) == 2
        assert leaving not in last
        assert broken not in {*first, *last}
        assert run.events("attempt_started")[0]["exclude"] == [broken]
