"""Faults of whole nodes, each a network namespace: who is blamed, how soon, what is done, and what is lost.

Two ranks on two of three nodes; the third is the spare. Each run must end with the weights, moments and
counters of the undisturbed run of the same layout, bit for bit.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_runs import LiveRun, live_run, resumed_run, shard_checksums
from tests.support.netns_cluster import RAY, NetnsCluster, Node, netns_cluster, refusal

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]
STEPS = 80
HIT_AT = 17
"""Two steps after a commit: what was trained since is lost, and trained again."""
OVERRIDES = (
    f"train.steps={STEPS}",
    "train.global_batch_size=32",
    "train.micro_batch_size=16",
    "data.seq_len=256",
    "strategy.dp=2",
    "resources.placement=SPREAD",
)
"""Workers outlive their raylet for a while: the run must be under way when they go."""
RAYLET_LIMIT_S = 5.0
SILENCE_LIMIT_S = 8.0
"""A cut link, a frozen node: nobody says anything, the health checks must run out."""
DRAIN_LIMIT_S = 5.0
DRAIN_NOTICE_S = 60
Checksums = list[list[int]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsCluster]:
    if reason := refusal():
        pytest.skip(reason)
    store = tmp_path_factory.mktemp("gcs")
    with netns_cluster(3, RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(store)) as made:
        yield made


@pytest.fixture(scope="module")
def calm(cluster: NetnsCluster, tmp_path_factory: pytest.TempPathFactory) -> Checksums:
    """Of the undisturbed run."""
    with run_on(cluster, cluster.head, tmp_path_factory.mktemp("calm"), "calm") as run:
        assert run.wait(200) == 0, run.text()
        assert not run.events("incident")
        return shard_checksums(run.run_dir, STEPS)


@contextlib.contextmanager
def run_on(cluster: NetnsCluster, driver: Node, tmp_path: Path, name: str) -> Iterator[LiveRun]:
    """A run whose driver is on a given node."""
    flags = ("--address", cluster.address)
    with live_run(tmp_path, name, *OVERRIDES, flags=flags, prefix=driver.inside()) as run:
        yield run


def node_of(cluster: NetnsCluster, run: LiveRun, rank: int) -> Node:
    return cluster.node_of(f"packtrain[{run.run_dir.name}] rank {rank}:")


def first_incident(run: LiveRun) -> dict[str, Any]:
    run.until(lambda: bool(run.events("incident")), "an incident")
    return run.events("incident")[0]


def assert_goes_on_without(run: LiveRun, victim: Node, calm: Checksums, failure_class: str) -> None:
    """To the end of a run that lost a node: one verdict, that node, a new attempt elsewhere, nothing lost."""
    assert run.wait(200) == 0, run.text()
    incidents = run.events("incident")
    told = [(one["class"], one["culprit"], one["action"]) for one in incidents]
    assert told == [(failure_class, f"node {victim.address}", "RESTART_WITHOUT_NODE")], incidents
    assert len(run.events("attempt_started")) == 2
    assert shard_checksums(run.run_dir, STEPS) == calm


def test_a_killed_raylet(cluster: NetnsCluster, calm: Checksums, tmp_path: Path) -> None:
    with run_on(cluster, cluster.head, tmp_path, "raylet") as run:
        run.until_step(HIT_AT)
        victim, at = node_of(cluster, run, 1), time.time()
        victim.kill("raylet/raylet", "--node_id=")
        assert first_incident(run)["detected_at"] - at <= RAYLET_LIMIT_S
        assert_goes_on_without(run, victim, calm, "node_lost")
    cluster.restart_ray(victim)


def test_a_link_that_is_cut_and_healed_later(cluster: NetnsCluster, calm: Checksums, tmp_path: Path) -> None:
    """The node of rank 0, where the ranks meet. What it still runs when it comes back does no harm."""
    with run_on(cluster, cluster.head, tmp_path, "cut") as run:
        run.until_step(HIT_AT)
        victim, at = node_of(cluster, run, 0), time.time()
        cluster.cut(victim)
        try:
            assert first_incident(run)["detected_at"] - at <= SILENCE_LIMIT_S
            run.until(lambda: len(run.events("ranks_started")) == 2, "ranks on other nodes")
        finally:
            cluster.heal(victim)
        assert_goes_on_without(run, victim, calm, "node_lost")
        assert_is_left_alone(victim, run)
    cluster.restart_ray(victim)


def test_a_frozen_node_that_thaws_later(cluster: NetnsCluster, calm: Checksums, tmp_path: Path) -> None:
    with run_on(cluster, cluster.head, tmp_path, "frozen") as run:
        run.until_step(HIT_AT)
        victim, at = node_of(cluster, run, 1), time.time()
        victim.signal_all(signal.SIGSTOP)
        try:
            assert first_incident(run)["detected_at"] - at <= SILENCE_LIMIT_S
            run.until(lambda: len(run.events("ranks_started")) == 2, "ranks on other nodes")
        finally:
            victim.signal_all(signal.SIGCONT)
        assert_goes_on_without(run, victim, calm, "node_lost")
        assert_is_left_alone(victim, run)
    cluster.restart_ray(victim)


def assert_is_left_alone(victim: Node, run: LiveRun) -> None:
    """Ranks and shells of the attempt that a node has lost end there by themselves."""
    title, deadline = f"packtrain[{run.run_dir.name}]", time.monotonic() + 30
    while left := victim.find_all(title):
        assert time.monotonic() < deadline, f"{victim.name} still runs {left}"
        time.sleep(0.2)


def test_a_drained_node(cluster: NetnsCluster, calm: Checksums, tmp_path: Path) -> None:
    with run_on(cluster, cluster.head, tmp_path, "drained") as run:
        run.until_step(HIT_AT)
        victim = node_of(cluster, run, 1)
        why = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot instance taken back")
        notice = f"--deadline-remaining-seconds={DRAIN_NOTICE_S}"
        asked = (f"--address={cluster.address}", f"--node-id={victim.ray_id}", *why, notice)
        cluster.run_in(cluster.head, str(RAY), "drain-node", *asked)
        at = time.time()
        assert first_incident(run)["detected_at"] - at <= DRAIN_LIMIT_S
        assert_goes_on_without(run, victim, calm, "preemption")
    cluster.restart_ray(victim)


def test_a_killed_control_store_is_not_noticed(
    cluster: NetnsCluster, calm: Checksums, tmp_path: Path
) -> None:
    """GCS on RocksDB, gone for seconds and started again."""
    with run_on(cluster, cluster.nodes[1], tmp_path, "gcs") as run:
        run.until_step(HIT_AT)
        command = cluster.gcs_command()
        cluster.head.kill("gcs_server")
        time.sleep(3)
        cluster.revive_gcs(*command)
        assert run.wait(200) == 0, run.text()
        assert not run.events("incident")
        assert len(run.events("attempt_started")) == 1
        assert shard_checksums(run.run_dir, STEPS) == calm


def test_a_lost_head_with_the_driver_elsewhere(
    cluster: NetnsCluster, calm: Checksums, tmp_path: Path
) -> None:
    """All of the head's processes at once; it comes back with what RocksDB kept."""
    with run_on(cluster, cluster.nodes[1], tmp_path, "headless") as run:
        run.until_step(HIT_AT)
        cluster.restart_ray(cluster.head)
        assert run.wait(200) == 0, run.text()
        assert shard_checksums(run.run_dir, STEPS) == calm
        assert not run.events("incident")


def test_a_killed_controller_and_then_a_killed_driver(
    cluster: NetnsCluster, calm: Checksums, tmp_path: Path
) -> None:
    driver = cluster.nodes[1]
    with run_on(cluster, driver, tmp_path, "orphan") as run:
        run.until_step(HIT_AT)
        at = time.time()
        driver.kill("controller of attempt")
        incident = first_incident(run)
        assert incident["detected_at"] - at <= 1.0
        told = (incident["class"], incident["culprit"], incident["action"])
        assert told == ("worker_killed", "Ray Train controller", "RESTART")
        run.until_step(2 * HIT_AT)
        driver.kill("-m service run", "--address")
        assert run.wait(20) == -signal.SIGKILL
        assert len(run.events("incident")) == 1
    flags = ("--address", cluster.address)
    with resumed_run(tmp_path, "orphan", flags=flags, prefix=driver.inside()) as again:
        assert again.wait(200) == 0, again.text()
        assert len(again.events("attempt_started")) == 3
        assert shard_checksums(again.run_dir, STEPS) == calm
