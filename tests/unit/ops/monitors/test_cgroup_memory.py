"""Kills and limits of control groups, versions 2 and 1, in trees like /sys/fs/cgroup."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.monitors.cgroup_memory import CgroupMemoryMonitor


class Machine:
    """A /proc and a /sys/fs/cgroup."""

    def __init__(self, root, is_v2):
        self.proc, self.cgroup, self.is_v2 = root / "proc", root / "cgroup", is_v2
        self.ranks = {}
        self.join("self", "/agent")
        self.vmstat(0)

    def join(self, pid, path, **counts):
        (self.proc / str(pid)).mkdir(parents=True, exist_ok=True)
        lines = f"0::{path}\n" if self.is_v2 else f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/\n"
        (self.proc / str(pid) / "cgroup").write_text(lines)
        self.group(path, **counts)

    def group(self, path, oom_kill=0, n_hits=0, used=100, cache=0, limit="1000"):
        folder = self.cgroup / ("" if self.is_v2 else "memory") / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_v2:
            events = f"low 0\nhigh 0\nmax {n_hits}\noom 1\noom_kill {oom_kill}\noom_group_kill 0\n"
            files = {"memory.events": events, "memory.current": used, "memory.max": limit}
            files["memory.stat"] = f"anon 5\ninactive_file {cache}\n"
        else:
            limit = 0x7FFFFFFFFFFFF000 if limit == "max" else limit
            control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kill}\n"
            files = {"memory.oom_control": control, "memory.failcnt": n_hits}
            files |= {"memory.usage_in_bytes": used, "memory.limit_in_bytes": limit}
            files["memory.stat"] = f"cache 5\ntotal_inactive_file {cache}\n"
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")

    def vmstat(self, oom_kill):
        (self.proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {oom_kill}\n")

    def monitor(self):
        return CgroupMemoryMonitor("n1", lambda: self.ranks, self.proc, self.cgroup)


@pytest.fixture(params=[True, False], ids=["v2", "v1"])
def machine(request, tmp_path):
    return Machine(tmp_path, request.param)


def kinds(signals):
    return [signal.kind for signal in signals]


def test_a_kill_is_told_by_its_rise_also_after_the_rank_is_gone(machine):
    machine.join(10, "/job/rank0", oom_kill=3)
    machine.ranks = {10: 0}
    monitor = machine.monitor()
    assert monitor.is_supported()
    assert monitor.check(0.0) == []  # The three are old.
    machine.ranks = {}
    machine.group("/job/rank0", oom_kill=4)
    machine.vmstat(1)
    killed, on_host = monitor.check(10.0)
    assert (killed.kind, killed.value, str(killed.entity)) == ("oom_kill", 1, "rank 0 (node n1)")
    assert (on_host.kind, on_host.value, str(on_host.entity)) == ("host_oom_kill", 1, "node n1")
    assert monitor.check(20.0) == []


def test_a_group_of_several_ranks_blames_none_of_them(machine):
    machine.join(10, "/pod")
    machine.join(11, "/pod")
    machine.ranks = {10: 0, 11: 1}
    monitor = machine.monitor()
    assert monitor.check(0.0) == []
    machine.group("/pod", oom_kill=2)
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value, str(signal.entity)) == ("oom_kill", 2, "node n1")


def test_a_kill_elsewhere_on_the_machine_is_told_as_such(machine):
    monitor = machine.monitor()
    assert monitor.check(0.0) == []
    machine.vmstat(2)
    assert kinds(monitor.check(1.0)) == ["host_oom_kill"]


def test_hits_of_the_limit_are_told_as_an_episode(machine):
    monitor = machine.monitor()
    told = []
    for n_hits in (7, 9, 12, 12, 12):
        machine.group("/agent", n_hits=n_hits)
        told.append([(s.kind, s.value) for s in monitor.check(0.0)])
    assert told == [[], [("memory_limit_hit", 2)], [], [("memory_limit_hit_cleared", 0)], []]


def test_memory_that_cannot_be_given_back_nears_the_limit(machine):
    monitor = machine.monitor()
    machine.group("/agent", used=990, cache=500)
    assert monitor.check(0.0) == []
    machine.group("/agent", used=990, cache=10)
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value) == ("memory_high", 980)
    machine.group("/agent", used=930)
    assert monitor.check(1.5) == []  # It has to fall a little further than it rose.
    machine.group("/agent", used=990, limit="max")
    assert kinds(monitor.check(2.0)) == ["memory_high_cleared"]


def test_in_a_container_the_mount_is_the_group(machine):
    """/proc shows the host's path, which does not exist below the mount of the container."""
    machine.join(10, "/kubepods/pod1/abc")
    machine.group("/")
    for folder in (machine.cgroup / "kubepods", machine.cgroup / "memory" / "kubepods"):
        if folder.exists():
            folder.rename(folder.with_name("elsewhere"))
    machine.ranks = {10: 0}
    monitor = machine.monitor()
    assert monitor.check(0.0) == []
    machine.group("/", oom_kill=1)
    assert kinds(monitor.check(1.0)) == ["oom_kill"]


def test_no_control_groups(tmp_path):
    monitor = CgroupMemoryMonitor("n1", dict, tmp_path, tmp_path)
    assert not monitor.is_supported()
    assert monitor.check(0.0) == []


@pytest.fixture
def small_group():
    """A real group below our own, with room for 40 MiB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].strip("/") for line in lines}
    mount, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if "memory" not in paths:
        mount, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = mount / paths.get("memory", paths.get("", "")) / f"packtrain_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        (group / limit).write_text(str(40 << 20))
        yield group
    except OSError as error:
        pytest.skip(f"control groups have no memory limit here: {error}")
    finally:
        group.rmdir()


def test_a_real_kill(small_group):
    hog = "import sys; sys.stdin.readline(); x = [bytearray(1 << 20) for _ in range(400)]"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE) as process:
        (small_group / "cgroup.procs").write_text(str(process.pid))
        monitor = CgroupMemoryMonitor("n1", lambda: {process.pid: 3})
        assert monitor.check(0.0) == []
        process.communicate(b"go\n", timeout=30)
    if process.returncode == 0:
        pytest.skip("the kernel let it have more than its limit: swap")
    assert process.returncode == -9
    told = {(s.kind, str(s.entity)) for s in monitor.check(1.0)}
    assert ("oom_kill", "rank 3 (node n1)") in told


def test_the_real_ones():
    monitor = CgroupMemoryMonitor("n1", dict)
    if monitor.is_supported():
        assert "oom_kill" not in kinds(monitor.check(0.0))
