"""A Ray cluster of real `ray start` processes on fresh ports and folders; ended by pid."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from tests.support.live_runs import command_environment


@dataclass
class RayCluster:
    """A head, and nodes added to it."""

    port: int
    dashboard_port: int
    temp_dir: Path
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_node(self, *words: str, n_cpus: int) -> subprocess.Popen[bytes]:
        """Start one node in a session of its own and wait until its raylet runs."""
        log_path = self.temp_dir / f"node-{len(self.nodes)}.log"
        with log_path.open("wb") as log:
            node = self._popen(words, n_cpus, log)
        self.nodes.append(node)
        deadline = time.monotonic() + 90
        while b"Ray runtime started" not in log_path.read_bytes():
            assert node.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.2)
        return node

    def _popen(self, words: tuple[str, ...], n_cpus: int, log: BinaryIO) -> subprocess.Popen[bytes]:
        ray = Path(sys.executable).with_name("ray")
        return subprocess.Popen(
            [
                str(ray),
                "start",
                *words,
                f"--num-cpus={n_cpus}",
                "--object-store-memory=100000000",
                "--disable-usage-stats",
                "--block",
            ],
            env=command_environment(
                RAY_health_check_period_ms="1000",
                RAY_health_check_failure_threshold="3",
                PATH=f"{ray.parent}:{os.environ['PATH']}",
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def add_node(self, n_cpus: int, ip: str | None = None) -> subprocess.Popen[bytes]:
        """One more node on this machine; one with a loopback address of its own (127.0.0.2, ...) is told from
        the others by Packtrain, which knows nodes by their addresses."""
        own = [f"--node-ip-address={ip}"] if ip else []
        return self.start_node(f"--address={self.address}", *own, n_cpus=n_cpus)

    def end(self) -> None:
        """End every process of every node."""
        pids = []
        for node in self.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in psutil.Process(node.pid).children(recursive=True)]
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(15)
        for pid in [*pids, *(node.pid for node in self.nodes)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in self.nodes:
            node.wait(5)
        shutil.rmtree(self.temp_dir, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(n_cpus: int) -> Iterator[RayCluster]:
    """A head with a dashboard for jobs, on ports that were free a moment ago."""
    ports = [_free_port() for _ in range(4)]
    # Ray's sockets lie below the temporary folder, and the path of a Unix socket is short.
    cluster = RayCluster(ports[0], ports[1], Path(tempfile.mkdtemp(prefix="pt", dir="/tmp")))
    try:
        cluster.start_node(
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={cluster.port}",
            f"--dashboard-port={cluster.dashboard_port}",
            "--dashboard-host=127.0.0.1",
            f"--ray-client-server-port={ports[2]}",
            f"--dashboard-agent-listen-port={ports[3]}",
            f"--temp-dir={cluster.temp_dir}",
            n_cpus=n_cpus,
        )
        yield cluster
    finally:
        cluster.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
