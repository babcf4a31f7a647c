"""Ray nodes that are Linux namespaces: each has an address, a table of processes and a /tmp/ray of its own.

    switch    a network of its own with a bridge        10.77.0.1
    head      plugged into it, no CPUs                  10.77.0.10
    node 1    plugged into it                           10.77.0.11      and so on

Links can be cut and healed; a node can lose any of its processes, all of them, or be frozen. A namespace
lives as long as its first process, and that one ends with the process that runs the tests, by the kernel's
hand: whatever happens, nothing is left, and no process of anybody else is touched. Two clusters know nothing
of each other. Memory, cores, /dev/shm and the file system (so run.storage too) are the machine's.

Needs root, or a user who may make such namespaces: `refusal` says what is in the way.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.live_runs import command_environment

NETWORK = "10.77.0"
PORT = 6379
RAY = Path(sys.executable).with_name("ray")
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""As in cluster.yaml: a node that does not answer is given up after 4 to 6 s."""
QUIET = {"RAY_enable_metrics_collection": "false", "RAY_event_stats": "false"}
"""Nobody reads these figures, and all nodes share this machine's cores."""
_UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--kill-child")
_FIRST_PROCESS = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.pause()"
"""Holds a namespace; the dead whose parents are gone become its children, and are buried at once."""


@functools.cache
def refusal() -> str | None:
    """Why this machine or user cannot have such a cluster; None where it can."""
    missing = [name for name in ("setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (util-linux, iproute2)"
    tried = subprocess.run(
        [*_UNSHARE, "--mount-proc", "sh", "-c", "ip link add br0 type bridge && mount -t tmpfs none /mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"network namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Room:
    """Mount, network and process namespace of their own, held by a first process."""

    first_pid: int
    """As seen from here; the kernel ends all others of the room with it."""

    def inside(self, *words: str) -> list[str]:
        """A command line that runs `words` in the room."""
        return ["nsenter", f"--target={self.first_pid}", "--mount", "--net", "--pid", "--", *words]

    def pids(self) -> list[int]:
        """What runs in the room, its first process aside; pids as seen from here."""
        own, found = _process_table_of(self.first_pid), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if pid != self.first_pid and _process_table_of(pid) == own:
                    found.append(pid)
        return found


@dataclass
class Node(Room):
    """A Ray node."""

    name: str
    address: str
    """Its IP address."""

    def find(self, *marks: str) -> int:
        """Pid, as seen from here, of the one process whose command line holds all the marks."""
        found = self.find_all(*marks)
        assert len(found) == 1, f"{self.name}: {marks} fits {found or 'nothing'}"
        return next(iter(found))

    def find_all(self, *marks: str) -> dict[int, str]:
        """All such processes: command line by pid."""
        running = {pid: _words(pid) for pid in self.pids()}
        return {pid: words for pid, words in running.items() if all(mark in words for mark in marks)}

    @property
    def ray_id(self) -> str:
        """What Ray calls the node, from its living raylet."""
        words = psutil.Process(self.find("raylet/raylet", "--node_id=")).cmdline()
        return next(word.partition("=")[2] for word in words if word.startswith("--node_id="))

    def kill(self, *marks: str) -> None:
        """SIGKILL of one process."""
        os.kill(self.find(*marks), signal.SIGKILL)

    def signal_all(self, number: int) -> None:
        """A signal to every process of the node: SIGKILL ends it, SIGSTOP freezes it.

        The `nsenter` out here of a process that is frozen is stopped as well.
        """
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class NetnsCluster:
    """A head without CPUs, and nodes with one each."""

    folder: Path
    n_nodes: int
    environment: Mapping[str, str]
    """Of every `ray start`."""
    rooms: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    nodes: list[Node] = field(default_factory=list)
    """The head first."""
    _switch: Room | None = None

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{PORT}"

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def node_of(self, *marks: str) -> Node:
        """The node that a process runs on, known by its command line."""
        found = [node for node in self.nodes for _ in node.find_all(*marks)]
        assert len(found) == 1, f"{marks} runs on {[node.name for node in found] or 'no node'}"
        return found[0]

    def start(self) -> None:
        """Make all namespaces, start Ray in them."""
        switch = self._switch = self._room(f"ip link set lo up && {_bridge()}")
        hosts = self._write_hosts()
        for number in range(self.n_nodes + 1):
            name = f"node{number}" if number else "head"
            own = self.folder / name
            own.mkdir()
            mounts = f"mkdir -p /tmp/ray && mount --bind {own} /tmp/ray && mount --bind {hosts} /etc/hosts"
            room = self._room(f"{mounts} && ip link set lo up")
            node = Node(room.first_pid, name, f"{NETWORK}.{10 + number}")
            _plug(switch, node)
            self.nodes.append(node)
        self.start_ray(self.head)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start_ray, self.nodes[1:]))

    def _write_hosts(self) -> Path:
        """Names of the nodes: torch's store asks for that of each peer, and no name server is reached.

        Waiting for one takes 20 s in each start of ranks.
        """
        numbers = range(self.n_nodes + 1)
        own = "".join(f"{NETWORK}.{10 + number} node{number}.packtrain.test\n" for number in numbers)
        path = self.folder / "hosts"
        path.write_text(Path("/etc/hosts").read_text() + own)
        return path

    def start_ray(self, node: Node) -> None:
        """`ray start` on a node; returns once its raylet is registered."""
        own = [
            f"--node-ip-address={node.address}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        if node is self.head:
            words = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        else:
            words = [f"--address={self.address}", "--num-cpus=1"]
        self.run_in(node, str(RAY), "start", *words, *own)

    def run_in(self, node: Node, *words: str, timeout_s: float = 240.0) -> str:
        """Run one command on a node to its end; what it printed. Fails where the command does."""
        environment = command_environment(
            **self.environment, PATH=f"{RAY.parent}:{os.environ['PATH']}", PYTHONWARNINGS="ignore"
        )
        # A file, not a pipe: what the command leaves running holds on to it.
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            started = subprocess.Popen(
                node.inside(*words),
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            with started:
                try:
                    exit_code: int | None = started.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    exit_code = None
                    for process in psutil.Process(started.pid).children(recursive=True):
                        process.kill()
            output.seek(0)
            printed = output.read()
        assert exit_code == 0, f"{node.name}: {' '.join(words)}: {exit_code}: {printed}"
        return printed

    def restart_ray(self, node: Node) -> None:
        """A node that lost its Ray comes back, as a machine does after a reboot."""
        node.signal_all(signal.SIGCONT)
        node.signal_all(signal.SIGKILL)
        self.start_ray(node)

    def cut(self, node: Node) -> None:
        """Pull the node's cable out at the switch."""
        self._on_switch("down", node)

    def heal(self, node: Node) -> None:
        """Put the node's cable in again."""
        self._on_switch("up", node)

    def revive_gcs(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the head's control store again, as its supervisor would; arguments by `gcs_command`."""
        with (self.folder / "gcs-revived.log").open("ab") as log:
            revived = subprocess.Popen(
                self.head.inside(*command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.rooms.callback(revived.wait, 10)
        self.rooms.callback(revived.kill)

    def gcs_command(self) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of the head's control store."""
        process = psutil.Process(self.head.find("gcs_server"))
        return process.cmdline(), process.environ()

    def _on_switch(self, state: str, node: Node) -> None:
        assert self._switch is not None
        _run(self._switch.inside("ip", "link", "set", node.name, state))

    def _room(self, setup: str) -> Room:
        script = f"{setup} && exec {sys.executable} -SEc '{_FIRST_PROCESS}'"
        log = self.folder / "rooms.log"
        with log.open("ab") as errors:
            holder = subprocess.Popen(
                [*_UNSHARE, "--mount-proc", "--propagation=slave", "sh", "-ec", script],
                stdin=subprocess.DEVNULL,
                stderr=errors,
            )
        self.rooms.callback(_close, holder)
        deadline = time.monotonic() + 60
        while True:
            for child in psutil.Process(holder.pid).children():
                with contextlib.suppress(psutil.Error):
                    if _FIRST_PROCESS in child.cmdline():
                        return Room(child.pid)
            has_time = holder.poll() is None and time.monotonic() < deadline
            assert has_time, f"cannot make a namespace: {setup}: {log.read_text()}"
            time.sleep(0.02)


@contextlib.contextmanager
def netns_cluster(n_nodes: int, **environment: str) -> Iterator[NetnsCluster]:
    """A head and `n_nodes` nodes, Ray running on all.

    Args:
        n_nodes: nodes beside the head, with one CPU each.
        environment: variables for every `ray start`, over HEALTH_CHECKS and QUIET.
    """
    folder = Path(tempfile.mkdtemp(prefix="ptnodes"))
    values = {**HEALTH_CHECKS, **QUIET, **environment}
    cluster = NetnsCluster(folder, n_nodes, values)
    try:
        with cluster.rooms:
            cluster.start()
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _process_table_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _close(holder: subprocess.Popen[bytes]) -> None:
    """End a room; on return the kernel has ended everything in it."""
    first = psutil.Process(holder.pid).children()
    for process in first:
        process.kill()
    if not first:
        holder.kill()
    holder.wait(10)


def _bridge() -> str:
    return f"ip link add bridge type bridge && ip addr add {NETWORK}.1/24 dev bridge && ip link set bridge up"


def _plug(switch: Room, node: Node) -> None:
    """A cable from the switch, where it is called as the node is, to eth0 of the node."""
    peer = ("peer", "name", "eth0", "netns", str(node.first_pid))
    # Process ids of this machine are known out here only: no --pid.
    net = ["nsenter", f"--target={switch.first_pid}", "--net", "--", "ip"]
    _run([*net, "link", "add", node.name, "type", "veth", *peer])
    _run([*net, "link", "set", node.name, "master", "bridge", "up"])
    _run(node.inside("ip", "addr", "add", f"{node.address}/24", "dev", "eth0"))
    _run(node.inside("ip", "link", "set", "eth0", "up"))
    _run(node.inside("ip", "route", "add", "default", "via", f"{NETWORK}.1"))


def _run(words: list[str]) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
