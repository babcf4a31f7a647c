"""One rank: environment, groups, engine, restore, training, a clean end. No Ray here.

    run_forked_rank (forked from the warm server)     torchrun.py (torchrun -m service.torchrun SPEC)
                              |                        |
                               train_rank: store -> groups -> engine -> data -> restore -> hooks -> trainer

A rank tells its shell three things: where its store listens, how it ended, and with which error. It is
told two: where the store is, and to save and leave.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class RankRequest:
    """Everything that a rank must be told; plain values, so that it travels as JSON."""

    run_dir: str
    data_dir: str
    attempt: int
    generation: int
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    node: str
    log_path: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankRequest":
        """From what to_json gave."""
        return cls(**values)


class StopFlag:
    """Set by SIGTERM or by the shell; read by the trainer between steps."""

    def __init__(self) -> None:
        """Not set."""
        self._event = threading.Event()

    def set(self, *_: Any) -> None:
        """Ask for save-and-leave (also fits as a signal handler)."""
        self._event.set()

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()


class ShellLink:
    """The rank's end of the channel to its shell."""

    def __init__(self, channel: socket.socket, stop: StopFlag) -> None:
        """Listen in a thread, so that a stop request needs no signal and an address can be waited for."""
        self._channel = channel
        self._stop = stop
        self._address: tuple[str, int] | None = None
        self._has_address = threading.Event()
        threading.Thread(target=self._listen, name="shell-link", daemon=True).start()

    def send(self, event: str, **fields: Any) -> None:
        """Tell the shell something; a shell that is gone is no error (the kernel ends us soon)."""
        try:
            self._channel.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")
        except OSError as error:
            sys.stderr.write(f"shell is gone: {error}\n")

    def wait_for_store(self, timeout_s: float) -> tuple[str, int]:
        """Host and port of this generation's store.

        Raises:
            TimeoutError: rank 0 did not open it in time.
        """
        if not self._has_address.wait(timeout_s) or self._address is None:
            raise TimeoutError(f"timed out: rank 0 opened no store within {timeout_s:.0f} s")
        return self._address

    def _listen(self) -> None:
        for line in self._channel.makefile("rb"):
            message = json.loads(line)
            if message["event"] == "store":
                self._address = (message["host"], message["port"])
                self._has_address.set()
            elif message["event"] == "terminate":
                self._stop.set()


def run_forked_rank(request: RankRequest, channel: socket.socket) -> int:
    """Body of a forked rank; returns its exit code. Called in the child right after the fork."""
    stop = StopFlag()
    signal.signal(signal.SIGTERM, stop.set)
    link = ShellLink(channel, stop)
    try:
        _redirect_output(Path(request.log_path))
        faulthandler.enable()
        outcome = train_rank(request, lambda: _open_store(request, link), stop)
    except BaseException as error:
        traceback.print_exc()
        link.send("error", **describe_error(error))
        return 1
    link.send("outcome", outcome=outcome)
    return 0


def train_rank(request: RankRequest, open_store: Callable[[], "Store"], stop: StopFlag) -> str:
    """Train from the newest verified checkpoint to the end; returns "finished" or "stopped". Collective."""
    from service.rank_training import train_from_newest_checkpoint

    return train_from_newest_checkpoint(request, open_store, stop)


def describe_error(error: BaseException) -> dict[str, Any]:
    """What the shell reports of an exception."""
    from torch.distributed import DistError

    from jobs.errors import CheckpointError, DataError, NumericError, SpecError
    from ops.checkpoint.manifest import CorruptCheckpointError

    classes: tuple[tuple[type[BaseException], str], ...] = (
        (NumericError, "numerics"),
        (SpecError, "configuration"),
        (DataError, "configuration"),
        (CorruptCheckpointError, "corrupt_checkpoint"),
        (CheckpointError, "configuration"),  # of another model: it is so each time
        (MemoryError, "host_out_of_memory"),
        (ImportError, "environment"),
    )
    from_communication = isinstance(error, DistError) or type(error) is TimeoutError
    failure_class = next((name for kind, name in classes if isinstance(error, kind)), "")
    if not failure_class and type(error).__name__ == "OutOfMemoryError":
        failure_class = "gpu_out_of_memory"
    return {
        "error_type": f"{type(error).__module__}.{type(error).__qualname__}",
        "error_text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "failure_class": failure_class,
        "from_communication": from_communication,
    }


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _open_store(request: RankRequest, link: ShellLink) -> "Store":
    """The generation's own TCPStore: rank 0 opens it on a free port, the others are told where."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=STORE_TIMEOUT_S)
    if request.rank == 0:
        store = TCPStore(
            request.node, 0, request.world_size, is_master=True, timeout=limit, wait_for_workers=False
        )
        link.send("store", port=store.port)
        return store
    host, port = link.wait_for_store(STORE_TIMEOUT_S)
    return TCPStore(host, port, request.world_size, is_master=False, timeout=limit, wait_for_workers=False)


STORE_TIMEOUT_S = 120.0
"""How long ranks of one generation wait for each other to appear."""
