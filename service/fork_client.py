"""The shell's side of the fork server: start it, fork a rank, hear of its messages and its end.

Single-threaded use: one owner reads `events`. Knows nothing of Ray.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from service.rank_process import RankRequest
from service.warm_servers import Warm, adopt

SERVER_END_LIMIT_S = 5.0
RANK_END_LIMIT_S = 30.0
"""How long a killed rank may take to give back its memory and its devices."""


@dataclass(frozen=True)
class RankMessage:
    """Something that the live rank said, or that became of it."""

    event: str
    """ "ready" | "forked" | "exited" from the server, "lost" when the server itself died, else the rank's
    own event."""
    fields: Mapping[str, Any] = field(default_factory=dict)


class ForkServer:
    """A fork server process and the one rank that it may have."""

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log_path: Path,
        niceness: int | None = None,
        warm: Warm | None = None,
    ) -> None:
        """Take over the server of an earlier shell, or start one; it imports `preload` meanwhile.

        Args:
            preload: modules to import before the first fork; what does not import is skipped.
            environment: of the server and its ranks.
            folder: working directory of both.
            log_path: takes what the server prints.
            niceness: of both, where this user may give it; None keeps this process's own.
            warm: where a server waits for the next shell; None: it never does.
        """
        adopted = adopt(warm) if warm else None
        self._parent: subprocess.Popen[bytes] | None = None
        """Of the server, where we have started it."""
        if adopted is not None:
            ours, self.pid = adopted
        else:
            self._parent, ours = _start(preload, environment, folder, log_path, warm)
            self.pid = _first_words(ours, log_path)
            if niceness is not None:
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
        self._control = ours
        self._channel: socket.socket | None = None
        self._buffers: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(ours, selectors.EVENT_READ)
        self.rank_pid: int | None = None

    def watch(self, wake_up: socket.socket) -> None:
        """Let `wait` return also when `wake_up` becomes readable (its bytes are drained)."""
        wake_up.setblocking(False)
        self._selector.register(wake_up, selectors.EVENT_READ, data="wake")

    def fork(self, request: RankRequest) -> None:
        """Ask for a rank. Its pid comes as the event "forked".

        Raises:
            OSError: the server is gone.
        """
        self._drop_channel()
        ours, theirs = socket.socketpair()
        with theirs:
            line = json.dumps(request.to_json()).encode() + b"\n"
            sent = socket.send_fds(self._control, [line], [theirs.fileno()])
            self._control.sendall(line[sent:])
        self._channel = ours
        self._selector.register(ours, selectors.EVENT_READ)

    def tell_rank(self, message: Mapping[str, Any]) -> None:
        """Send one message to the rank; a rank that is gone is no error."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(json.dumps(message).encode() + b"\n")

    def signal_rank(self, number: signal.Signals) -> None:
        """Send a signal to the rank; a rank that is gone is no error."""
        if self.rank_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank_pid, number)

    def wait(self, timeout_s: float | None = None) -> list[RankMessage]:
        """Block until something happens (or the wake-up socket or the time-out ends the wait)."""
        messages: list[RankMessage] = []
        # The rank's own channel is read before the server's "exited", so that a last word is never lost.
        ready = sorted(self._selector.select(timeout_s), key=lambda item: item[0].fileobj is self._control)
        for key, _ in ready:
            if key.data == "wake":
                with contextlib.suppress(BlockingIOError):
                    while key.fileobj.recv(4096):  # type: ignore[union-attr]
                        pass
            elif key.fileobj is self._control:
                messages += self._read_channel_to_end() if self._is_exit_pending() else []
                messages += self._read(self._control)
            elif isinstance(key.fileobj, socket.socket):
                messages += self._read(key.fileobj)
        return messages

    def close(self, *, keep_warm: bool = False) -> None:
        """Let go of the server; returns when its rank is gone, so that no later rank meets this one.

        Args:
            keep_warm: the server waits for another shell; else it is gone too.
        """
        self._drop_channel()
        self._selector.close()
        if not keep_warm:
            with contextlib.suppress(OSError):
                self._control.sendall(b'{"event": "leave"}\n')
        self._control.close()
        waits_for = self.rank_pid if keep_warm else self.pid
        if waits_for is not None and not _is_gone_within(waits_for, SERVER_END_LIMIT_S):
            with contextlib.suppress(ProcessLookupError):  # the kernel ends the rank of a dead server
                os.kill(self.pid, signal.SIGKILL)
        if self._parent is not None:
            if keep_warm:
                self._parent.kill()
            self._parent.wait()
        if self.rank_pid is not None:
            _is_gone_within(self.rank_pid, RANK_END_LIMIT_S)

    def _is_exit_pending(self) -> bool:
        with contextlib.suppress(OSError):
            return b'"exited"' in self._control.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    def _read_channel_to_end(self) -> list[RankMessage]:
        """What a rank that has exited still had in its channel."""
        messages: list[RankMessage] = []
        with contextlib.suppress(BlockingIOError):  # a child of the rank's may still hold the other end open
            while self._channel is not None:
                messages += self._read(self._channel)
        return messages

    def _read(self, source: socket.socket) -> list[RankMessage]:
        try:
            data = source.recv(1 << 20, socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:
            if source is self._channel:
                self._drop_channel()
                return []
            self._selector.unregister(source)
            return [RankMessage("lost")]
        *lines, rest = (self._buffers.get(source, b"") + data).split(b"\n")
        self._buffers[source] = rest
        return [self._parse(line) for line in lines if line]

    def _parse(self, line: bytes) -> RankMessage:
        fields = json.loads(line)
        event = fields.pop("event")
        if event == "forked":
            self.rank_pid = fields["pid"]
        elif event == "exited":
            self.rank_pid = None
        return RankMessage(event, fields)

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._buffers.pop(self._channel, None)
            self._channel.close()
            self._channel = None


def _start(
    preload: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log_path: Path,
    warm: Warm | None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new server: its parent, and its control socket."""
    ours, theirs = socket.socketpair()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "service.forkserver", str(theirs.fileno()), json.dumps(warm), *preload]
    with theirs, log_path.open("ab") as log:
        process = subprocess.Popen(
            words,
            env=dict(environment),
            cwd=folder,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ray kills the group of a worker that has ended
        )
    return process, ours


def _first_words(control: socket.socket, log_path: Path) -> int:
    """Process id of the server."""
    line = b""
    while not line.endswith(b"\n"):
        more = control.recv(1)
        if not more:
            raise OSError(f"the fork server did not start: see {log_path}")
        line += more
    return int(json.loads(line)["pid"])


def _is_gone_within(pid: int, limit_s: float) -> bool:
    """A process that is no child of ours has ended, reaped or not, before the time was over."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True
