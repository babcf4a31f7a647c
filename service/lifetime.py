"""Processes that end with the one that started them, whatever they are doing."""

import ctypes
import os
import signal
import threading

from service.env import get_env

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, as long as the calling thread lives.

    Args:
        parent_pid: the parent as it was when this process began; where another has taken its place the
            parent is dead already, and this process ends here.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_raylet() -> None:
    """Have this Ray worker end with the node that runs it; nothing in a process that is none.

    Ray's own way is to notice the dead node and to leave, and a worker that leaves while its node goes can
    wait for itself for ever ("Destructing CoreWorkerProcessImpl" ends its log): nobody would ever end it.
    """
    raylet_pid = get_env("RAY_RAYLET_PID")
    if raylet_pid != str(os.getppid()):  # something stands between: a container's init, a profiler
        return

    def stay() -> None:
        end_with_parent(int(raylet_pid))
        threading.Event().wait()

    # The kernel keeps the wish for each thread, and those that run an actor's methods end before it does.
    threading.Thread(target=stay, name="ends with its raylet", daemon=True).start()
