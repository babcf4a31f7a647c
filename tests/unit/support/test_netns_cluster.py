"""The namespaces that stand for nodes: cut links are cut, and nothing is left, also after a SIGKILL."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import netns_cluster
from tests.support.netns_cluster import NetnsCluster, Node

# A kernel makes and ends networks one after another, slowly where its cores are taken.
pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[3]
LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    while True:
        server.accept()[0].close()
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 4000), 1.0).close()"
HOLD = """
import sys, time
from pathlib import Path
from tests.unit.support.test_netns_cluster import without_ray
with without_ray(Path(sys.argv[1])) as cluster:
    print(*(node.first_pid for node in cluster.nodes), flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := netns_cluster.refusal():
        pytest.skip(reason)


class Bare(NetnsCluster):
    """The namespaces alone."""

    def start_ray(self, node: Node) -> None:
        """No Ray."""


@contextlib.contextmanager
def without_ray(folder: Path) -> Iterator[Bare]:
    cluster = Bare(folder, 2, {})
    with cluster.rooms:
        cluster.start()
        yield cluster


def test_links_processes_and_folders_are_the_nodes_own(tmp_path: Path) -> None:
    with contextlib.ExitStack() as started, without_ray(tmp_path) as cluster:
        head, one, two = cluster.nodes
        words = [head.inside(sys.executable, "-SEc", LISTEN), one.inside("sleep", "100")]
        listening, sleeping = (started.enter_context(subprocess.Popen(w)) for w in words)
        wait_until(lambda: reaches(cluster, one))
        cluster.cut(one)
        assert not reaches(cluster, one)
        assert reaches(cluster, two)
        cluster.heal(one)
        wait_until(lambda: reaches(cluster, one))

        cluster.run_in(one, "touch", "/tmp/ray/mine")
        assert "mine" in cluster.run_in(one, "ls", "/tmp/ray")
        assert "mine" not in cluster.run_in(two, "ls", "/tmp/ray")
        assert not Path("/tmp/ray/mine").exists()

        assert list(one.find_all().values()) == ["sleep 100"]
        assert cluster.node_of("create_server") is head
        cluster.run_in(two, "sh", "-c", "sleep 200 > /dev/null 2>&1 &")
        sleeper = psutil.Process(two.find("sleep 200"))
        two.signal_all(signal.SIGSTOP)
        wait_until(lambda: sleeper.status() == psutil.STATUS_STOPPED)
        two.signal_all(signal.SIGCONT)
        wait_until(lambda: sleeper.status() == psutil.STATUS_SLEEPING)
        head.kill("create_server")
        assert listening.wait(5) == -signal.SIGKILL
    assert sleeping.wait(5) == -signal.SIGKILL
    assert not any(psutil.pid_exists(node.first_pid) for node in cluster.nodes)


def reaches(cluster: NetnsCluster, node: Node) -> bool:
    """The node can connect to the head's port."""
    words = node.inside(sys.executable, "-SEc", CALL, cluster.head.address)
    return subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    """A zombie is not: whether someone reaps an orphan is up to the machine's init."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_clusters_are_strangers(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as started, without_ray(folders[0]) as a, without_ray(folders[1]) as b:
        started.enter_context(subprocess.Popen(a.head.inside(sys.executable, "-SEc", LISTEN)))
        wait_until(lambda: reaches(a, a.nodes[1]))
        assert b.head.address == a.head.address
        assert not reaches(b, b.nodes[1])


def wait_until(is_true: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
