"""Ranks on this machine without Ray: forked from one warm server, gloo on the loopback, never left behind.

For short comparisons in the foreground. What they run is the caller's; long runs are worker.py's business.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from jobs.errors import PacktrainError, SpecError
from jobs.mesh import Mesh
from service.env import set_env

COLLECTIVE_LIMIT_S = 120.0
GRACE_S = 3.0
"""After one rank has failed the others get so long to fail by themselves before they are killed."""
RANK_BYTES = 160 * 1024**2
"""Memory of its own that a rank with a tiny model takes, beside what it shares with the server."""
LOG_TAIL_BYTES = 2000


class LocalRanks:
    """Starts ranks, as often as asked, from one server that imports `preload` once a process."""

    def __init__(self, preload: Sequence[str], folder: Path) -> None:
        """Start the server; it imports meanwhile.

        Args:
            preload: names to import before the first rank is forked; one that does not import is passed over.
            folder: a fresh folder for what the ranks print and meet in.
        """
        self._folder = folder
        self._log = folder / "ranks.log"
        # Read early, so the server has to be started with them: one thread a rank, and gloo on the loopback
        # whatever the host's name resolves to.
        set_env("OMP_NUM_THREADS", "1")
        set_env("GLOO_SOCKET_IFNAME", "lo")
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
        with _output_into(self._log):
            forkserver.ensure_running()

    def run(self, fn: Callable[..., Any], mesh: Mesh, kv_replicas: int, *args: Any) -> list[Any]:
        """Run `fn(groups, *args)` on every rank; what each returned, in rank order.

        Args:
            fn: a module-level function; its first argument is a jobs.comm.groups.Groups.
            mesh: the layout.
            kv_replicas: see jobs.comm.groups.init_groups.
            args: picklable, the same for every rank.

        Raises:
            SpecError: this machine has no memory for so many ranks.
            PacktrainError: a rank raised (its traceback is in the text) or died.
        """
        check_memory(mesh.world_size, psutil.virtual_memory().available)
        store = Path(tempfile.mkdtemp(prefix="store-", dir=self._folder)) / "store"
        payload = pickle.dumps((fn, args))
        context = multiprocessing.get_context("forkserver")
        ranks: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(mesh.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(rank, mesh, kv_replicas, str(store), payload, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append(process)
                pipes.append(ours)
            return self._collect(ranks, pipes)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()

    def _collect(self, ranks: list[BaseProcess], pipes: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline_s: float | None = None
        open_pipes = dict(enumerate(pipes))
        while open_pipes:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = wait(list(open_pipes.values()), left_s)
            if not ready:
                break
            for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
                try:
                    is_good, value = pickle.loads(open_pipes.pop(rank).recv_bytes())
                except EOFError:
                    ranks[rank].join(1.0)
                    is_good, value = False, f"died with exit code {ranks[rank].exitcode}\n{self._log_tail()}"
                (results if is_good else failures)[rank] = value
                if not is_good and deadline_s is None:
                    deadline_s = time.monotonic() + GRACE_S
        if failures:
            told = "\n".join(
                f"rank {rank} of {len(ranks)}: {text}" for rank, text in sorted(failures.items())
            )
            raise PacktrainError(f"the ranks failed\n{told}")
        return [results[rank] for rank in range(len(ranks))]

    def _log_tail(self) -> str:
        if not self._log.exists():
            return ""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


def check_memory(n_ranks: int, available_bytes: int) -> None:
    """Refuse ranks that this machine could only swap.

    Raises:
        SpecError: says both numbers.
    """
    wanted = n_ranks * RANK_BYTES
    if wanted > available_bytes:
        fit = available_bytes // RANK_BYTES
        raise SpecError(
            f"{n_ranks} ranks x {RANK_BYTES / 1024**2:.0f} MiB = {wanted / 1024**3:.1f} GiB wanted, but "
            f"{available_bytes / 1024**3:.1f} GiB are free: room for {fit}; use fewer ranks"
        )


@contextlib.contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """What is started meanwhile prints into the file: libraries print when they are imported."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with log.open("ab") as file:
        for number, _ in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def _rank_main(rank: int, mesh: Mesh, kv_replicas: int, store: str, payload: bytes, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the starter ends us
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    try:
        reply = (True, _run(rank, mesh, kv_replicas, store, payload))
    except Exception:
        reply = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would send tensors as handles that die with this process.
    pipe.send_bytes(pickle.dumps(reply))
    pipe.close()


def _run(rank: int, mesh: Mesh, kv_replicas: int, store: str, payload: bytes) -> Any:
    import torch
    from torch._C._distributed_c10d import FileStore

    from jobs.comm.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    set_env("LOCAL_RANK", str(rank))  # DeepSpeed asks for it
    fn, args = pickle.loads(payload)
    meeting = FileStore(store, mesh.world_size)
    groups = init_groups(mesh, rank, meeting, "gloo", COLLECTIVE_LIMIT_S, kv_replicas)
    value = fn(groups, *args)
    destroy_groups(groups)
    return value


def _end_with_the_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os._exit(1)
