"""Runs a lesson (model.kind: mlp) on this machine: forks gloo ranks, puts what they say in order, compares.

No Ray and no run folder. The ranks come from one warm fork server (multiprocessing's, torch imported) and die
with this process, however it ends. What a lesson does is in jobs/lessons.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import PacktrainError
from jobs.spec.lesson import LessonSpec
from service.env import set_env

if TYPE_CHECKING:
    from jobs.lessons.compare import Finding

COLLECTIVE_LIMIT_S = 120.0
GRACE_S = 3.0
"""After one rank has failed the others get so long to fail by themselves before they are killed."""
PRELOAD = ["torch", "torch.distributed", "service.cli", "jobs.lessons.compare"]


@dataclass
class _Rank:
    """What one rank has said so far: parts of the lesson, each a title and lines."""

    process: BaseProcess
    pipe: Connection
    parts: list[tuple[str, list[str]]] = field(default_factory=lambda: [("", [])])
    findings: "list[Finding] | None" = None
    failure: str | None = None

    @property
    def has_ended(self) -> bool:
        """It said its last word."""
        return self.findings is not None or self.failure is not None


def run_lesson(spec: LessonSpec, say: Callable[[str], None]) -> int:
    """Run the lesson in the foreground; 0 where the ranks equal one process, 1 where not, 3 after Ctrl-C.

    Raises:
        PacktrainError: a rank raised or died; holds its traceback.
    """
    began_s = time.monotonic()
    try:
        with _folder() as folder, _ranks(spec, Path(folder)) as ranks:
            _listen(ranks, say)
    except KeyboardInterrupt:
        say("stopped")
        return 3
    from jobs.lessons.compare import judge

    verdict = judge([rank.findings or [] for rank in ranks])
    if verdict.missing:
        say(f"no rank has shown all of: {', '.join(verdict.missing)}")
    answer = "yes" if verdict.ok else "NO"
    say("")
    say(
        f"equal to one process: {answer}, worst difference {verdict.worst:.1e} ({verdict.worst_name}); "
        f"{len(ranks)} ranks, {time.monotonic() - began_s:.1f} s"
    )
    return 0 if verdict.ok else 1


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the ranks meet."""
    return tempfile.TemporaryDirectory(prefix="packtrain-lesson-")


@contextlib.contextmanager
def _ranks(spec: LessonSpec, folder: Path) -> Iterator[list[_Rank]]:
    """The ranks' processes; none is left when the block is left."""
    # Read when torch is imported: one thread a rank, and gloo on the loopback whatever the host's name means.
    set_env("OMP_NUM_THREADS", "1")
    set_env("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks: list[_Rank] = []
    try:
        for number in range(spec.n_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(number, spec, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()


def _listen(ranks: list[_Rank], say: Callable[[str], None]) -> None:
    """Until every rank has said its last word; a part is shown once all ranks are past it."""
    n_shown = 0
    deadline_s: float | None = None
    while waiting := {rank.pipe: rank for rank in ranks if not rank.has_ended}:
        ready = wait(list(waiting), None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            _hear(waiting[pipe])
        if deadline_s is None and any(rank.failure for rank in ranks):
            deadline_s = time.monotonic() + GRACE_S
        n_past = min(len(rank.parts) - (not rank.has_ended) for rank in ranks)
        for part in range(n_shown, n_past):
            _show([rank.parts[part] for rank in ranks], say)
        n_shown = max(n_shown, n_past)
    failed = [f"rank {i}: {rank.failure}" for i, rank in enumerate(ranks) if rank.failure]
    if failed:
        raise PacktrainError("the lesson failed\n" + "\n".join(failed))


def _hear(rank: _Rank) -> None:
    """Take one message."""
    try:
        kind, value = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join(1.0)
        rank.failure = f"died with exit code {rank.process.exitcode}"
        return
    match kind:
        case "title":
            rank.parts.append((value, []))
        case "line":
            rank.parts[-1][1].append(value)
        case "findings":
            rank.findings = value
        case "failure":
            rank.failure = value


def _show(parts: list[tuple[str, list[str]]], say: Callable[[str], None]) -> None:
    """One part: its title, then the ranks' first lines in rank order, their second lines, and so on."""
    title = parts[0][0]
    if title:
        say("")
        say(f"-- {title}")
    for lines in zip_longest(*(lines for _, lines in parts)):
        for line in lines:
            if line is not None:
                say(line)


def _rank_main(number: int, spec: LessonSpec, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the starter ends us
    threading.Thread(target=_end_with_the_starter, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        # Plain pickle: multiprocessing's own would send tensors as handles that die with this process.
        pipe.send_bytes(pickle.dumps((kind, value)))

    try:
        send("findings", _lesson(number, spec, store, send))
    except Exception:
        send("failure", traceback.format_exc())
    pipe.close()


def _lesson(number: int, spec: LessonSpec, store: str, send: Callable[[str, str], None]) -> "list[Finding]":
    import torch
    from torch._C._distributed_c10d import FileStore

    from jobs.comm.groups import destroy_groups, init_groups
    from jobs.lessons.compare import run_rank

    torch.set_num_threads(1)
    meeting = FileStore(store, spec.n_ranks)
    groups = init_groups(spec.mesh, number, meeting, "gloo", COLLECTIVE_LIMIT_S)
    found = run_rank(spec, groups, send)
    destroy_groups(groups)
    return found


def _end_with_the_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os._exit(1)
