"""A followed log loses no line and repeats none: appended, rotated, cut; and a device of records."""

import os
import tty

import pytest

from ops.monitors.follow import MAX_BYTES_A_CHECK
from ops.monitors.kernel_log import KernelLogMonitor
from ops.signal import Entity, EntityKind, Signal

NODE = Entity(EntityKind.NODE, "n1")


def parse_line(line, now):
    return None if "boring" in line else Signal(now, "kernel_log", "line", NODE, None, line)


def told(monitor, now=1.0):
    return [signal.text for signal in monitor.check(now)]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("old 1\nold 2\n")
    return path


@pytest.fixture
def monitor(log):
    monitor = KernelLogMonitor(log, parse_line)
    assert monitor.is_supported()
    yield monitor
    monitor.close()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_only_new_lines_that_the_parser_wants(log, monitor):
    assert told(monitor) == []
    append(log, "new 1\nboring\nnew 2\r\n")
    assert monitor.check(5.0)[0].at == 5.0
    assert told(monitor) == []
    append(log, "new 3\n")
    assert told(monitor) == ["new 3"]


def test_a_line_is_told_when_its_end_is_written(log, monitor):
    append(log, "NVRM: Xid (PCI:0000:")
    assert told(monitor) == []
    append(log, "18:00): 79, gone\nnext")
    assert told(monitor) == ["NVRM: Xid (PCI:0000:18:00): 79, gone"]


def test_rotation_loses_nothing(log, monitor, tmp_path):
    append(log, "before\n")
    log.rename(tmp_path / "kern.log.1")
    append(tmp_path / "kern.log.1", "still the old file\nwithout its end")
    assert told(monitor) == ["before", "still the old file"]
    log.write_text("first of the new\n")
    assert told(monitor) == ["without its end", "first of the new"]
    append(log, "second\n")
    assert told(monitor) == ["second"]


def test_cut_and_written_anew(log, monitor):
    append(log, "new\n")
    assert told(monitor) == ["new"]
    log.write_text("a\n")
    assert told(monitor) == ["a"]


def test_cut_and_already_longer_than_before(log, monitor):
    log.write_text("".join(f"another {i}\n" for i in range(40)))
    assert told(monitor) == [f"another {i}" for i in range(40)]


def test_a_flood_is_read_in_parts_and_whole(log, monitor):
    n_lines = MAX_BYTES_A_CHECK // 1000 + 500
    append(log, "".join(f"{i:0>999}\n" for i in range(n_lines)))
    first, second = told(monitor), told(monitor)
    assert second
    assert [int(line) for line in first + second] == list(range(n_lines))


def test_bytes_that_are_no_text_are_no_fault(log, monitor):
    with log.open("ab") as file:
        file.write(b"\xff\xfe\x00 x\n")
    assert told(monitor)[0].endswith(" x")


def test_a_device_gives_records(tmp_path):
    """A terminal is a character device that gives a line a read, as /dev/kmsg gives a record."""
    ours, theirs = os.openpty()
    tty.setcbreak(theirs)
    monitor = KernelLogMonitor(tmp_path / "kmsg", parse_line)
    (tmp_path / "kmsg").symlink_to(os.ttyname(theirs))
    try:
        assert monitor.is_supported()
        assert told(monitor) == []
        os.write(ours, b"6,3965,206764310,-;NVRM: Xid\n SUBSYSTEM=pci\n")
        assert told(monitor) == ["6,3965,206764310,-;NVRM: Xid"]
        assert told(monitor) == []
    finally:
        monitor.close()
        os.close(ours)
        os.close(theirs)


def test_the_real_kernel_log_is_silent_or_closed_to_us():
    from pathlib import Path

    monitor = KernelLogMonitor(Path("/dev/kmsg"), lambda line, now: None)
    if monitor.is_supported():
        assert monitor.check(1.0) == []
    monitor.close()


def test_no_log(tmp_path):
    monitor = KernelLogMonitor(tmp_path / "none", parse_line)
    assert not monitor.is_supported()
    assert monitor.check(1.0) == []
