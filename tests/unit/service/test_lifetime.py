"""Processes that end with the one that started them."""

import subprocess
import sys
import time

import psutil

PARENT = """
import os, subprocess, sys, time
os.environ["RAY_RAYLET_PID"] = sys.argv[2] or str(os.getpid())
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60.0)
"""
CHILD = """
import os, threading, time
from service.lifetime import end_with_raylet
caller = threading.Thread(target=end_with_raylet)  # as methods of actors are called
caller.start()
caller.join()
time.sleep(0.2)
print(os.getpid(), flush=True)
time.sleep(60.0)
"""


def start(raylet_pid: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PARENT, CHILD, raylet_pid]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def is_gone(pid: int, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_does_not_outlive_its_raylet() -> None:
    with start() as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert is_gone(pid)


def test_a_worker_under_another_parent_is_left_to_it() -> None:
    """Where something stands between raylet and worker, the raylet's pid is not its parent's."""
    with start("1") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert not is_gone(pid, limit_s=0.5)
    psutil.Process(pid).kill()
