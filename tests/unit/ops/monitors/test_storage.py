"""Disks and shared memory: full, out of inodes, read-only, gone; and in order again."""

import errno
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.monitors.disks import DiskMonitor
from ops.monitors.shm import ShmMonitor

GIB = 1 << 30
MOUNTINFO = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
35 22 0:30 / /mnt/my\\040data {options} shared:9 - {filesystem} srv:/x {super_options}
36 22 0:31 / /mnt rw - tmpfs tmpfs rw
garbage
"""


def usage(free_gib=50, size_gib=100, free_inodes=900, inodes=1000):
    return SimpleNamespace(
        f_frsize=4096,
        f_blocks=int(size_gib * GIB) // 4096,
        f_bavail=int(free_gib * GIB) // 4096,
        f_files=inodes,
        f_favail=free_inodes,
    )


def kinds(signals):
    return [signal.kind for signal in signals]


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def mount(proc, options="rw,noatime", filesystem="ext4", super_options="rw"):
    text = MOUNTINFO.format(options=options, filesystem=filesystem, super_options=super_options)
    (proc / "self" / "mountinfo").write_text(text)


@pytest.mark.parametrize(
    ("bad", "kind", "value"),
    [
        (usage(free_gib=4.9), "disk_full", int(4.9 * GIB) // 4096 * 4096),
        (usage(free_gib=0.9, size_gib=10), "disk_full", int(0.9 * GIB) // 4096 * 4096),
        (usage(free_inodes=49), "inodes_full", 49),
    ],
)
def test_a_full_disk_is_told_once_and_when_there_is_room_again(proc, bad, kind, value):
    now_used = [usage()]
    monitor = DiskMonitor([Path("/mnt/my data/run")], "n1", proc, statvfs=lambda path: now_used[0])
    mount(proc)
    assert monitor.check(1.0) == []
    now_used[0] = bad
    (signal,) = monitor.check(2.0)
    assert (signal.at, signal.kind, signal.value) == (2.0, kind, value)
    assert str(signal.entity) == "storage /mnt/my data/run (node n1)"
    assert monitor.check(3.0) == []
    now_used[0] = usage()
    assert kinds(monitor.check(4.0)) == [f"{kind}_cleared"]


def test_a_disk_at_its_limit_is_not_told_in_turns(proc):
    now_used = [usage(free_gib=4.9)]
    monitor = DiskMonitor([Path("/mnt")], "n1", proc, statvfs=lambda path: now_used[0])
    assert kinds(monitor.check(1.0)) == ["disk_full"]
    for free_gib in (5.2, 4.9, 5.4):
        now_used[0] = usage(free_gib=free_gib)
        assert monitor.check(2.0) == []
    now_used[0] = usage(free_gib=5.6)
    assert kinds(monitor.check(3.0)) == ["disk_full_cleared"]


def test_a_small_disk_and_one_without_a_size_are_not_full(proc):
    mount(proc)
    for fine in (usage(free_gib=0.15, size_gib=0.5), usage(0, 0, 0, 0)):
        assert DiskMonitor([Path("/mnt")], "n1", proc, statvfs=lambda path, fine=fine: fine).check(1.0) == []


@pytest.mark.parametrize("read_only", [{"options": "ro,noatime"}, {"super_options": "ro,errors=remount-ro"}])
def test_a_read_only_remount_is_told_for_the_paths_below_it(proc, read_only):
    mount(proc)
    paths = [Path("/mnt/my data/run"), Path("/mnt/other"), Path("/tmp")]
    monitor = DiskMonitor(paths, "n1", proc, statvfs=lambda path: usage())
    assert monitor.check(1.0) == []
    mount(proc, **read_only)
    (signal,) = monitor.check(2.0)
    assert (signal.kind, signal.entity.name) == ("read_only", "/mnt/my data/run")
    mount(proc)
    assert kinds(monitor.check(3.0)) == ["read_only_cleared"]


def test_read_only_from_the_start_is_told(proc):
    mount(proc, options="ro")
    monitor = DiskMonitor([Path("/mnt/my data")], "n1", proc, statvfs=lambda path: usage())
    assert kinds(monitor.check(1.0)) == ["read_only"]


def test_a_mount_that_went_stale(proc):
    stale = [False]

    def statvfs(path):
        if stale[0]:
            raise OSError(errno.ESTALE, "stale")
        return usage()

    mount(proc)
    monitor = DiskMonitor([Path("/mnt/my data")], "n1", proc, statvfs=statvfs)
    assert monitor.check(1.0) == []
    stale[0] = True
    (signal,) = monitor.check(2.0)
    assert (signal.kind, signal.text) == ("storage_unreachable", "/mnt/my data: Stale file handle")
    stale[0] = False
    assert kinds(monitor.check(3.0)) == ["storage_unreachable_cleared"]


def test_a_mount_that_is_lost(proc):
    mount(proc)
    monitor = DiskMonitor([Path("/mnt/my data/run")], "n1", proc, statvfs=lambda path: usage())
    assert monitor.check(1.0) == []
    everything = (proc / "self" / "mountinfo").read_text()
    (proc / "self" / "mountinfo").write_text(everything.replace("/mnt/my", "/mnt/other"))
    (signal,) = monitor.check(2.0)
    assert (signal.kind, signal.text) == ("mount_lost", "/mnt/my data/run: lies on /mnt, lay on /mnt/my data")
    mount(proc)
    assert kinds(monitor.check(3.0)) == ["mount_lost_cleared"]


def run(*command):
    """Needs the rights of root."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {ended.stderr.strip()}")


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount(8)")
def test_a_real_mount_fills_turns_read_only_and_goes(tmp_path):
    run("mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path)
    try:
        monitor = DiskMonitor([tmp_path], "n1", min_free_frac=0.1)
        assert monitor.check(0.0) == []
        (tmp_path / "file").write_bytes(bytes(1_000_000))
        assert kinds(monitor.check(1.0)) == ["disk_full"]
        (tmp_path / "file").unlink()
        run("mount", "-o", "remount,ro", tmp_path)
        assert kinds(monitor.check(2.0)) == ["disk_full_cleared", "read_only"]
    finally:
        subprocess.run(["umount", tmp_path], check=False)
    assert kinds(monitor.check(3.0)) == ["mount_lost", "read_only_cleared"]


def test_the_real_file_system(tmp_path):
    calm = DiskMonitor([tmp_path], "n1", min_free_frac=0.0, min_free_bytes=0)
    assert calm.is_supported()
    assert calm.check(1.0) == []
    strict = DiskMonitor([tmp_path, tmp_path / "none"], "n1", min_free_frac=1.01)
    assert kinds(strict.check(1.0)) in (  # Some file systems count no inodes.
        ["disk_full", "storage_unreachable"],
        ["disk_full", "inodes_full", "storage_unreachable"],
    )


def test_no_paths():
    assert not DiskMonitor([], "n1").is_supported()
    assert DiskMonitor([], "n1").check(1.0) == []


def test_shared_memory_that_docker_gave():
    monitor = ShmMonitor("n1", statvfs=lambda path: usage(free_gib=1 / 16, size_gib=1 / 16))
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value, str(signal.entity)) == ("shm_small", 64 << 20, "node n1")
    assert monitor.check(2.0) == []


def test_shared_memory_fills_and_empties():
    now_used = [usage()]
    monitor = ShmMonitor("n1", statvfs=lambda path: now_used[0])
    assert monitor.check(1.0) == []
    now_used[0] = usage(free_gib=9.9)
    assert kinds(monitor.check(2.0)) == ["shm_full"]
    assert monitor.check(3.0) == []
    now_used[0] = usage()
    assert kinds(monitor.check(4.0)) == ["shm_full_cleared"]


def test_no_shared_memory(tmp_path):
    assert not ShmMonitor("n1", path=tmp_path / "none").is_supported()
