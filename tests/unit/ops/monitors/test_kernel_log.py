"""A followed log loses no line and repeats none: appended, rotated, cut; and a device of records."""

import os
import random
import tty
from pathlib import Path

import pytest

from ops.diagnosis.kernel_events import KernelLogReader
from ops.diagnosis.kernel_log import kernel_signals
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
    monitor = KernelLogMonitor(Path("/dev/kmsg"), lambda line, now: None)
    if monitor.is_supported():
        assert monitor.check(1.0) == []
    monitor.close()


KERNEL_LOGS = sorted((Path(__file__).parents[3] / "data" / "kernel_logs").glob("*.log"))


@pytest.mark.parametrize("source", KERNEL_LOGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", range(3))
def test_followed_in_pieces_through_rotations_real_logs_say_what_they_say_whole(tmp_path, source, seed):
    """Pieces end anywhere, also within a line; after some the file is renamed away."""
    content = source.read_bytes().rstrip(b"\n") + b"\n"
    chance = random.Random(seed)
    path = tmp_path / "kern.log"
    path.write_bytes(b"")
    monitor = KernelLogMonitor(path, KernelLogReader("n1").signal)
    assert monitor.is_supported()
    ends = [at + 1 for at, byte in enumerate(content[:-1]) if byte == ord("\n")]
    cuts = sorted({*chance.sample(range(1, len(content)), 12), *chance.sample(ends, min(3, len(ends)))})
    found, n_rotations = [], 0
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with path.open("ab") as file:
            file.write(content[start:end])
        if content[end - 1 : end] == b"\n" or chance.random() < 0.7:
            found += monitor.check(7.0)
        if content[end - 1 : end] == b"\n" and n_rotations < 3:  # Between lines, as logrotate does it.
            n_rotations += 1
            path.rename(tmp_path / f"kern.log.{n_rotations}")
            path.write_bytes(b"")
    found += monitor.check(7.0)
    monitor.close()
    assert n_rotations
    assert found == kernel_signals(content.decode("utf-8", "replace").splitlines(), 7.0, "n1")


def test_an_xid_comes_from_the_device_with_its_gpu(tmp_path):
    ours, theirs = os.openpty()
    tty.setcbreak(theirs)
    (tmp_path / "kmsg").symlink_to(os.ttyname(theirs))
    monitor = KernelLogMonitor(tmp_path / "kmsg", KernelLogReader("n1").signal)
    try:
        assert monitor.is_supported()
        os.write(ours, b"6,1,2064,-;NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d\n")
        assert monitor.check(1.0) == []
        os.write(ours, b"4,2,2065,-;NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n")
        (signal,) = monitor.check(2.0)
        assert (signal.at, signal.kind, signal.value) == (2.0, "xid", 79)
        assert signal.entity == Entity(EntityKind.GPU, "GPU-509665ad-b600-ac93-3616-d754b23d636d", "n1")
    finally:
        monitor.close()
        os.close(ours)
        os.close(theirs)


def test_no_log(tmp_path):
    monitor = KernelLogMonitor(tmp_path / "none", parse_line)
    assert not monitor.is_supported()
    assert monitor.check(1.0) == []
