"""Runs one command within a time limit and leaves no process behind. Knows nothing of what the command does.

    contained.py LIMIT_S COMMAND [ARGUMENT ...]

The command's orphans, daemons in sessions of their own too, become children of this process (Linux: a child
subreaper), so that all of them are found at the end without a look at names or titles.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 20.0
"""Time to end by itself: for the command once it is interrupted, and for what it left behind."""


def main(limit_s: float, command: list[str]) -> int:
    """Exit status of the command; 124 where it ran out of time."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed: orphans of the command could not be found")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    status = wait_for(child.pid, limit_s)
    if status is None:
        print(f"CI: {' '.join(command)} took more than {limit_s:.0f} s: interrupting it.", flush=True)
        os.killpg(child.pid, signal.SIGINT)
        if wait_for(child.pid, GRACE_S) is None:
            os.kill(child.pid, signal.SIGKILL)
            wait_for(child.pid, GRACE_S)
        status = 124
    end_descendants()
    return status if status >= 0 else 128 - status


def wait_for(pid: int, limit_s: float) -> int | None:
    """Exit code of this child, negative for a signal; None where it runs for longer.

    Orphans that end meanwhile are reaped as an init does: what waits for their end would see zombies.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            time.sleep(0.1)
    return None


def end_descendants() -> None:
    """Wait for what the command left running, then name and kill it."""
    deadline = time.monotonic() + GRACE_S
    while (found := descendants()) and time.monotonic() < deadline:
        reap()
        time.sleep(0.2)
    for pid, title in found.items():
        print(f"CI: left behind, killed: {pid} {title}", flush=True)
    while found := descendants():
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
        reap()


def descendants() -> dict[int, str]:
    """Pid and title of every living process below this one."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    known = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in known} - known:
        known |= more
    return {pid: title(pid) for pid in sorted(known - {os.getpid()})}


def title(pid: int) -> str:
    """Command line of a process, shortened; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:100]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def reap() -> None:
    """Take the exit status of ended children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
