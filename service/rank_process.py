"""One rank: environment, groups, engine, restore, training, a clean end. No Ray here.

    run_forked_rank (forked from the warm server)     torchrun.py (torchrun -m service.torchrun SPEC)
                              |                        |
                               train_rank: store -> groups -> engine -> data -> restore -> hooks -> trainer

A rank tells its shell three things: where its store listens, how it ended, and with which error. It is
told four: where the store is, to save and leave, to write down its collectives, and (in a drill) to fail.
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

from jobs.events import Ranges
from service.rank_faults import RankFaults

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ops.findings import Finding


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
    box_dir: str = ""
    """Folder of the node's black boxes; empty keeps none."""
    restore_before: int | None = None
    """Newest step whose checkpoint may be restored; 0 begins anew, None takes the newest whole one."""
    skip_samples: Ranges = ()
    """Global sample ordinals that are passed over."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankRequest":
        """From what to_json gave."""
        ranges = tuple((int(first), int(stop)) for first, stop in values["skip_samples"])
        return cls(**{**values, "skip_samples": ranges})


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

    def __init__(self, channel: socket.socket, stop: StopFlag, faults: RankFaults) -> None:
        """Listen in a thread, so that a stop request needs no signal and an address can be waited for."""
        self._channel = channel
        self._stop = stop
        self._faults = faults
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
            elif message["event"] == "dump":
                dump_collectives(Path(message["path"]), Path(message["groups_path"]))
            elif message["event"] == "fault":
                self._faults.ask(message["fault"])


def run_forked_rank(request: RankRequest, channel: socket.socket) -> int:
    """Body of a forked rank; returns its exit code. Called in the child right after the fork."""
    stop = StopFlag()
    signal.signal(signal.SIGTERM, stop.set)
    faults = RankFaults()
    link = ShellLink(channel, stop, faults)
    try:
        _redirect_output(Path(request.log_path))
        faulthandler.enable()

        def tell(finding: "Finding") -> None:
            link.send("signal", **finding.to_json())

        outcome = train_rank(request, lambda: _open_store(request, link), stop, tell, faults)
    except BaseException as error:
        traceback.print_exc()
        link.send("error", **describe_error(error))
        return 1
    link.send("outcome", outcome=outcome)
    return 0


def train_rank(
    request: RankRequest,
    open_store: Callable[[], "Store"],
    stop: StopFlag,
    tell: "Callable[[Finding], None]",
    faults: RankFaults | None = None,
) -> str:
    """Train from the newest verified checkpoint to the end; returns "finished" or "stopped". Collective.

    Args:
        request: everything that the rank must be told.
        open_store: where the ranks of this generation meet.
        stop: asked once a step.
        tell: takes what rank 0 finds out about the training; from any thread.
        faults: of a drill.
    """
    from service.rank_training import train_from_newest_checkpoint

    return train_from_newest_checkpoint(request, open_store, stop, faults or RankFaults(), tell)


def dump_collectives(path: Path, groups_path: Path) -> None:
    """Write this process's flight recorder, as far as this build of torch has one. Any thread, any moment.

    NCCL's where there is one, else that of the other backends. Whoever asks waits for no answer: it looks
    whether the file is there. Stacks are left out: taking them can lock up beside a stuck thread.

    Args:
        path: takes the recorder's own bytes.
        groups_path: takes the ranks of each of this process's groups by name, as JSON.
    """
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    made = list(distributed_c10d._world.pg_map)
    members = {group.group_name: distributed_c10d.get_process_group_ranks(group) for group in made}
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    dump = dump or getattr(_distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return
    try:
        groups_path.write_text(json.dumps(members))
        path.with_suffix(".part").write_bytes(dump(True, False, False))
        path.with_suffix(".part").replace(path)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"the flight recorder could not be written to {path}: {error}\n")


def describe_error(error: BaseException) -> dict[str, Any]:
    """What the shell reports of an exception."""
    from torch.distributed import DistError

    from jobs.errors import CheckpointError, DataError, NumericEchoError, NumericError, SpecError
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
    from_communication = isinstance(error, DistError | NumericEchoError) or type(error) is TimeoutError
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
