"""Fork servers that outlive their shell, so that a new attempt need not import torch again.

    shell of attempt 0      fork server                          shell of attempt 1, on the same node
      dies, or "keep"  -->    kills its rank,
                              listens for KEEP_WARM_S    <----     connects, and has its own server

What makes two shells want the same server is its key: run, driver, node, environment, modules. A server that
nobody takes over, or whose node ends, leaves. The socket's file lies in a folder of this user alone. Knows
nothing of Ray, imports no torch.
"""

import contextlib
import hashlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

KEEP_WARM_S = 30.0
"""Between the end of an attempt and the shells of the next; longer for nobody: it holds memory."""
LOOK_S = 0.5


class Warm(NamedTuple):
    """Where a server waits for the next shell."""

    folder: str
    """Holds the sockets; made where it is missing."""
    key: str
    owner_pid: int | None
    """The process that stands for the node: a server that waits ends with it."""


def warm_key(run_id: str, node_id: str, environment: Mapping[str, str], preload: Sequence[str]) -> str:
    """What a server must have been started with to serve such a shell.

    Args:
        run_id: of the run.
        node_id: Ray's.
        environment: what was set for the server, which devices its ranks see, and whose it is.
        preload: modules.
    """
    words = json.dumps([run_id, node_id, sorted(environment.items()), list(preload)])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def adopt(warm: Warm) -> tuple[socket.socket, int] | None:
    """Take over a server that waits; None where there is none.

    Returns:
        The control socket, and the server's process id.
    """
    for path in sorted(Path(warm.folder).glob(f"warm-{warm.key}-*.sock")):
        taken = path.with_suffix(".taken")
        control = socket.socket(socket.AF_UNIX)
        try:
            path.rename(taken)  # one shell gets it
            control.connect(str(taken))
            pid, owner, _ = _peer(control)
            if owner == os.getuid():
                return control, pid
        except OSError:  # another shell was faster, or the server has been killed
            pass
        finally:
            with contextlib.suppress(OSError):
                taken.unlink()
        control.close()
    return None


def await_adoption(warm: Warm) -> socket.socket | None:
    """Listen until another shell of this user's takes this server over; None when nobody has."""
    folder = Path(warm.folder)
    path = folder / f"warm-{warm.key}-{os.getpid()}.sock"
    bound = path.with_suffix(".bound")
    deadline = time.monotonic() + KEEP_WARM_S
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
            listener.bind(str(bound))
            listener.listen(1)
            bound.rename(path)  # whoever sees it can connect
            selector.register(listener, selectors.EVENT_READ)
            is_open = True
            while is_open:
                is_open = time.monotonic() < deadline and _is_there(warm.owner_pid)
                if not is_open:
                    path.unlink(missing_ok=True)  # and once more a look: a shell may have connected just now
                if not selector.select(LOOK_S if is_open else 0.0):
                    continue
                control, _ = listener.accept()
                if _peer(control)[1] == os.getuid():
                    return control
                control.close()
    except OSError:  # no room for a socket: the next attempt starts its own server
        return None
    finally:
        for left in (path, bound):
            with contextlib.suppress(OSError):
                left.unlink()
    return None


def _peer(control: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    layout = "3i"
    found: tuple[int, int, int] = struct.unpack(
        layout, control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    )
    return found


def _is_there(pid: int | None) -> bool:
    """A process that has ended is not, reaped or not; of None nothing is known."""
    if pid is None:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
