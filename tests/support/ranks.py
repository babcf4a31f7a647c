"""Distributed tests: forks ranks from one warm fork server and brings back what they return.

A test module whose ranks need more than torch and jobs preloaded says so in a module variable, for example
`RANKS_PRELOAD = ("deepspeed",)`; tests/conftest.py collects these before the server starts, once a session.
"""

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jobs.mesh import Mesh

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor",
    "jobs.comm.groups",
    "jobs.engines.build",
    "jobs.engines.native",
    "jobs.models.llama",
    "jobs.trainer",
]
GRACE_S = 3.0
"""After one rank has failed the others get so long to fail by themselves before they are killed."""


class RankFailedError(AssertionError):
    """A rank raised, died or hung; the text holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    layout: int | Mesh,
    tmp_path: Path,
    *args: Any,
    timeout_s: float = 50.0,
    collective_timeout_s: float | None = None,
    kv_replicas: int = 1,
) -> list[Any]:
    """Run `fn(groups, *args)` in gloo processes, one a rank; returns what each rank returned, in rank order.

    Args:
        fn: a module-level function of a test module; its first argument is a jobs.comm.groups.Groups.
        layout: the mesh, or the number of ranks on its dp axis.
        tmp_path: a fresh folder; the ranks meet in a file store below it.
        args: picklable, the same for every rank.
        timeout_s: ranks that have not returned by then are killed.
        collective_timeout_s: limit of each collective; None takes timeout_s.
        kv_replicas: see jobs.comm.groups.init_groups.

    Raises:
        RankFailedError: a rank raised (its traceback is shown), died or hung.
    """
    mesh = Mesh(dp=layout) if isinstance(layout, int) else layout
    context = multiprocessing.get_context("forkserver")
    store = Path(tempfile.mkdtemp(prefix="store-", dir=tmp_path)) / "store"
    payload = pickle.dumps((fn, args))
    limit_s = timeout_s if collective_timeout_s is None else collective_timeout_s
    ranks: list[multiprocessing.process.BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(mesh.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, mesh, kv_replicas, str(store), limit_s, payload, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        return _collect(ranks, pipes, timeout_s)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def preload(names: Sequence[str]) -> None:
    """Decide what the fork server imports before the first rank is forked; later calls change nothing."""
    # One thread a rank, and gloo on the loopback whatever the host's name resolves to: both are read early,
    # so the server has to be started with them.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *names])


def warm() -> None:
    """Start the fork server without waiting for it: it imports while the first tests run."""
    forkserver.ensure_running()


def _collect(
    ranks: list[multiprocessing.process.BaseProcess], pipes: list[Connection], timeout_s: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, pipe in list(open_pipes.items()):
            if pipe not in ready:
                continue
            del open_pipes[rank]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ranks[rank].join(1.0)
                ok, value = False, f"died with exit code {ranks[rank].exitcode}"
            (results if ok else failures)[rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise RankFailedError("".join(f"\nrank {r} of {len(ranks)}: {text}" for r, text in failures.items()))
    if open_pipes:
        raise RankFailedError(
            f"ranks {sorted(open_pipes)} of {len(ranks)} still running after {timeout_s} s: killed"
        )
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int, mesh: Mesh, kv_replicas: int, store: str, limit_s: float, payload: bytes, pipe: Connection
) -> None:
    threading.Thread(target=_die_with_the_test, daemon=True).start()
    try:
        reply = (True, _run(rank, mesh, kv_replicas, store, limit_s, payload))
    except BaseException:
        reply = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would send tensors as handles that die with this process.
    pipe.send_bytes(pickle.dumps(reply))
    pipe.close()


def _run(rank: int, mesh: Mesh, kv_replicas: int, store: str, limit_s: float, payload: bytes) -> Any:
    import torch
    import torch.distributed as dist

    from jobs.comm.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks for it
    fn, args = pickle.loads(payload)
    meeting = dist.FileStore(store, mesh.world_size)
    groups = init_groups(mesh, rank, meeting, "gloo", limit_s, kv_replicas)
    value = fn(groups, *args)
    destroy_groups(groups)
    return value


def _die_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
