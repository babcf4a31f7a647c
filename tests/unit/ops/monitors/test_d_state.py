"""Threads stuck in the kernel, in a tree like /proc."""

import os
import shutil

import pytest

from ops.monitors.d_state import DStateMonitor


def put(proc, pid, tid, state, n_switches=5, name="pt_main (x) thread", started=4711):
    folder = proc / str(pid) / "task" / str(tid)
    folder.mkdir(parents=True, exist_ok=True)
    rest = " ".join(["1"] * 18)
    (folder / "stat").write_text(f"{tid} ({name}) {state} {rest} {started} 0 0\n")
    (folder / "status").write_text(
        f"Name:\tx\nvoluntary_ctxt_switches:\t{n_switches}\nnonvoluntary_ctxt_switches:\t2\n"
    )
    (folder / "wchan").write_text("nfs_wait_bit_killable")


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("1 (x) R 0\n")
    for pid in (10, 11):
        put(tmp_path, pid, pid, "S")
        put(tmp_path, pid, pid + 100, "S")
    return tmp_path


@pytest.fixture
def monitor(proc):
    monitor = DStateMonitor("n1", lambda: {10: 0, 11: 1}, n_checks=3, proc_root=proc)
    assert monitor.is_supported()
    return monitor


def kinds(signals):
    return [signal.kind for signal in signals]


def test_a_stuck_thread_is_told_at_the_third_check_with_its_rank_and_place(proc, monitor):
    put(proc, 11, 111, "D")
    assert monitor.check(0.0) == []
    assert monitor.check(10.0) == []
    (signal,) = monitor.check(20.0)
    assert (signal.kind, signal.value, str(signal.entity)) == ("d_state", 20.0, "rank 1 (node n1)")
    assert "process 11, thread 111" in signal.text
    assert "nfs_wait_bit_killable" in signal.text
    assert monitor.check(30.0) == []
    put(proc, 11, 111, "S", n_switches=6)
    (cleared,) = monitor.check(40.0)
    assert (cleared.kind, cleared.value) == ("d_state_cleared", 40.0)


def test_a_thread_that_waits_for_its_disk_again_and_again_is_not_stuck(proc, monitor):
    for check in range(6):
        put(proc, 11, 111, "D", n_switches=check)
        assert monitor.check(float(check)) == []


def test_the_process_that_got_the_number_later_is_another(proc, monitor):
    for started in (1, 1, 2, 2):
        put(proc, 11, 111, "D", started=started)
        assert monitor.check(0.0) == []


def test_a_stuck_process_that_ends_is_cleared(proc, monitor):
    put(proc, 11, 11, "D")
    assert kinds([s for at in range(3) for s in monitor.check(at)]) == ["d_state"]
    shutil.rmtree(proc / "11")
    assert kinds(monitor.check(3.0)) == ["d_state_cleared"]
    assert monitor.check(4.0) == []


def test_the_processes_of_others_are_not_watched(proc):
    put(proc, 11, 11, "D")
    monitor = DStateMonitor("n1", lambda: {10: 0}, n_checks=1, proc_root=proc)
    assert monitor.check(0.0) == []


def test_the_real_proc_and_no_proc(tmp_path):
    real = DStateMonitor("n1", lambda: {os.getpid(): 0, 2**22 + 1: 1})
    assert real.is_supported()
    assert [real.check(float(at)) for at in range(2)] == [[], []]
    assert not DStateMonitor("n1", dict, proc_root=tmp_path).is_supported()
