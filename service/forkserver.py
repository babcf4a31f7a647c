"""The warm fork server: a fresh single-threaded process that imports torch once and forks ranks from there.

    shell (Ray Train worker)                 fork server                         rank
      ForkServer()         -- Popen ------->   import preload list
      .fork(request)       -- socket, fd -->   os.fork()  --------->  run_forked_rank(request)
                           <-- "forked", pid                                   |
                           <-- "exited", code  waitpid()  <---------  _exit(code)

One rank lives at a time. The server never touches CUDA, starts no thread and has no other socket open at a
fork. When the shell dies the socket closes: the server kills its rank and waits a while for the shell of a
new attempt (warm_servers.py); where the shell has said "leave", it leaves. Ray kills the children of the
workers that it ends: so the shell's child only waits for its own child, the server. When the server dies the
kernel kills the rank (PR_SET_PDEATHSIG). It knows nothing of Ray; what a rank does is rank_process.py's.
"""

import contextlib
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
from typing import Any, Literal

from service.lifetime import end_with_parent
from service.rank_process import RankRequest, run_forked_rank
from service.warm_servers import Warm, await_adoption

PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = -1


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int

    def reap(self) -> int:
        """Exit code; waits for the end."""
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def serve(control: socket.socket, preload: list[str], warm: Warm | None) -> None:
    """Import the preload list, then fork ranks on request until nobody wants them any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle: ranks must live to save
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the kernel's, if the shell dies while its rank is stopped
    _send(control, {"event": "started", "pid": os.getpid()})
    missing = [name for name in preload if not _imports(name)]
    gc.collect()
    gc.freeze()  # what was imported is never collected, so a rank's collector does not copy its pages
    next_shell: socket.socket | None = control
    while next_shell is not None:
        with next_shell as control:
            _send(control, {"event": "ready", "missing": missing})
            if _serve_shell(control) == "leave":
                return
        next_shell = await_adoption(warm) if warm else None


def _serve_shell(control: socket.socket) -> Literal["leave", "gone"]:
    """Fork ranks for one shell; none is left when it returns."""
    child: _Child | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is control:
                        request, channel_fd = _receive(control)
                        if request is None:
                            return "gone"
                        if request.get("event") == "leave":
                            return "leave"
                        child = _fork(request, channel_fd, control)
                        selector.register(child.pidfd, selectors.EVENT_READ)
                        _send(control, {"event": "forked", "pid": child.pid})
                    elif child is not None:
                        selector.unregister(child.pidfd)
                        ended, child = child, None
                        _send(control, {"event": "exited", "pid": ended.pid, "exit_code": ended.reap()})
        finally:
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.reap()


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
    """Tell the shell; that it is gone is learnt from what it sends: it may have said "leave" before."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """One line, and the file descriptor sent beside a request; (None, -1) when the shell is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(control, 1 << 20, 1)
    except ConnectionResetError:
        return None, -1
    while not data.endswith(b"\n"):
        more = control.recv(1 << 20) if data else b""
        if not more:
            return None, -1
        data += more
    return json.loads(data), fds[0] if fds else -1


if __name__ == "__main__":
    if server_pid := os.fork():
        os.waitpid(server_pid, 0)
        os._exit(0)
    kept = json.loads(sys.argv[2])
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:], Warm(*kept) if kept else None)
