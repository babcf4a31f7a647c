"""The warm fork server: a fresh single-threaded process that imports torch once and forks ranks from there.

    shell (Ray Train worker)                 fork server                         rank
      ForkServer()         -- Popen ------->   import preload list
      .fork(request)       -- socket, fd -->   os.fork()  --------->  run_forked_rank(request)
                           <-- "forked", pid                                   |
                           <-- "exited", code  waitpid()  <---------  _exit(code)

One rank lives at a time. The server never touches CUDA, starts no thread and opens no socket before a
fork. When the shell dies the socket closes: the server kills its rank and leaves. When the server dies the
kernel kills the rank (PR_SET_PDEATHSIG). It knows nothing of Ray; what a rank does is rank_process.py's
business.
"""

import array
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from service.lifetime import end_with_parent
from service.rank_process import RankRequest, run_forked_rank

PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = -1


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int


def serve(control_fd: int, preload: list[str]) -> None:
    """Import the preload list, then fork ranks on request until the control socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle: ranks must live to save
    control = socket.socket(fileno=control_fd)
    missing = [name for name in preload if not _imports(name)]
    gc.collect()
    gc.freeze()  # what was imported is never collected, so a rank's collector does not copy its pages
    _send(control, {"event": "ready", "missing": missing})
    child: _Child | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    request, channel_fd = _receive(control)
                    if request is None:
                        if child is not None:
                            os.kill(child.pid, signal.SIGKILL)
                        return
                    child = _fork(request, channel_fd, control)
                    selector.register(child.pidfd, selectors.EVENT_READ)
                    _send(control, {"event": "forked", "pid": child.pid})
                elif child is not None:
                    selector.unregister(child.pidfd)
                    os.close(child.pidfd)
                    _, status = os.waitpid(child.pid, 0)
                    code = os.waitstatus_to_exitcode(status)
                    _send(control, {"event": "exited", "pid": child.pid, "exit_code": code})
                    child = None


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # a broken library raises anything; the rank meets the same error and can tell of it
        return False
    return True


def _fork(request: dict[str, Any], channel_fd: int, control: socket.socket) -> _Child:
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            end_with_parent(server_pid)
            # Where only ancestors may look into a process: py-spy is started by the shell, and is none.
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
            control.close()
            code = run_forked_rank(RankRequest.from_json(request), socket.socket(fileno=channel_fd))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(channel_fd)
    return _Child(pid, os.pidfd_open(pid))


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """One request line and the file descriptor sent beside it; (None, -1) when the shell is gone."""
    data, fds, _, _ = socket.recv_fds(control, 1 << 20, 1)
    while not data.endswith(b"\n"):
        more = control.recv(1 << 20) if data else b""
        if not more:
            return None, -1
        data += more
    return json.loads(data), array.array("i", fds)[0]


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
