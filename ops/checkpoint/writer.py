"""Saving without stopping training: copy to the host, then a thread writes, reports, and rank 0 commits.

    training thread   all ranks come? -> copy to host -+-> next steps ...
    writer thread                                      +-> shard, fsync -> report -> [rank 0] manifest

No error leaves this module: each becomes an event. A rank that dies or stalls costs the others a bounded
wait. Killed at any moment, a save leaves either a committed checkpoint or a folder without a manifest.
Decides nothing about when to save or what to keep.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import HashStore, Store

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.state import Chunk
from ops.checkpoint.commit import commit_manifest
from ops.checkpoint.element_types import DTYPE_NAMES, DTYPES
from ops.checkpoint.layout import folder_name, is_committed, shard_name
from ops.checkpoint.manifest import Identity, Manifest, ShardEntry
from ops.checkpoint.removal import remove_checkpoint
from ops.checkpoint.rendezvous import COMMITTED, Rendezvous
from ops.checkpoint.shard import write_shard
from ops.checkpoint.staging import ExtraTensors, Staging
from ops.durable import describe_os_error

_log = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]
"""Takes a kind and its fields: checkpoint_blocked, _committed, _failed, _skipped.

Called from the training thread and from the writer thread. What concerns a save as a whole comes from
rank 0, or from the rank that found rank 0 missing.
"""

SaveStart = Literal["started", "busy", "refused"]
"""What became of the wish to save."""


@dataclass(frozen=True)
class Peers:
    """This rank among those that save together."""

    rank: int = 0
    world_size: int = 1
    store: Store | None = None
    """Shared by all ranks; None where there is one rank.

    Used for saves only (a PrefixStore) and new for each generation of ranks. Its own timeout bounds each
    look at it, so it should be short (a minute).
    """


@dataclass(frozen=True)
class Limits:
    """How long a save may take."""

    commit_timeout_s: float = 600.0
    """From the copy to the commit; then the save is given up and the ranks that did not report are named."""
    decide_timeout_s: float = 30.0
    """For all ranks to enter the save: the longest that an absent rank can hold up training."""


@dataclass
class _Save:
    progress: Progress
    path: Path
    meeting: Rendezvous
    deadline: float = 0.0
    """Monotonic seconds; known once the copy begins."""
    copy_error: str | None = None
    thread: threading.Thread | None = None
    is_over: threading.Event = field(default_factory=threading.Event)
    """This rank has no more part in the save; on rank 0 that is its end. Removing older ones comes after."""
    is_committed: bool = False
    was_called_stuck: bool = False


class AsyncWriter:
    """Writes checkpoints of one set of ranks. At most one save is under way."""

    def __init__(
        self,
        checkpoint_dir: Path,
        identity: Identity,
        peers: Peers,
        on_event: OnEvent,
        limits: Limits = Limits(),
        after_commit: Callable[[Path, Manifest], None] | None = None,
    ) -> None:
        """Local: touches no file.

        Args:
            checkpoint_dir: folder of the checkpoint folders, seen by all ranks.
            identity: what the checkpoints are of.
            peers: this rank and the store that all ranks share.
            on_event: takes what happened; should return at once.
            limits: how long a save may take.
            after_commit: called on rank 0 in the writer thread once all ranks can know of the commit
                (retention). It may be slow: nobody waits for it except in `settle`, and two never overlap.
        """
        self._checkpoint_dir, self._identity, self._limits = checkpoint_dir, identity, limits
        self._rank, self._world_size = peers.rank, peers.world_size
        self._store: Store = peers.store if peers.store is not None else HashStore()
        self._on_event, self._after_commit = on_event, after_commit
        self._staging = Staging(peers.rank, peers.world_size)
        self._n_tries: dict[int, int] = {}
        self._last: _Save | None = None
        self._told_busy_of: _Save | None = None
        self._after_commit_lock = threading.Lock()

    @property
    def is_pending(self) -> bool:
        """This rank is still at work on a save."""
        return self._last is not None and not self._last.is_over.is_set()

    def prepare(self, chunks: Sequence[Chunk], extra_tensors: ExtraTensors | None = None) -> None:
        """Allocate the host buffer ahead, so that the first save blocks no longer than the others. Local."""
        try:
            self._staging.prepare(chunks, extra_tensors or {})
        except Exception as error:  # the save itself will say so again; training goes on
            self._emit(
                "checkpoint_failed", step=0, path=str(self._checkpoint_dir), error=_text(error), n_bytes=0
            )

    def save(
        self,
        chunks: Sequence[Chunk],
        progress: Progress,
        extra_tensors: ExtraTensors | None = None,
        *,
        decide_timeout_s: float | None = None,
    ) -> SaveStart:
        """Start a save of the state as it is now. Every rank must call it after the same step.

        Blocks until all ranks have come, which are in step anyway, and this rank's chunks are copied.

        Args:
            chunks: this rank's state; those with is_writer are written.
            progress: where training is.
            extra_tensors: written by this rank only: `rng/rank-00000`.
            decide_timeout_s: limit of the wait for the other ranks, equal on all; None takes the one of
                the limits.

        Returns:
            The same on all ranks. "started"; "busy": some rank is still at work on an earlier save, ask
            again after the next step; "refused": a rank did not come.
        """
        started = time.monotonic()
        n_tries = self._n_tries.get(progress.step, 0)
        self._n_tries = {progress.step: n_tries + 1}
        path = self._checkpoint_dir / folder_name(progress.step)
        key = f"{progress.step}.{n_tries}"
        meeting = Rendezvous(self._store, key, self._rank, self._world_size)
        save = _Save(progress, path, meeting)
        try:
            start = self._decide(save, decide_timeout_s or self._limits.decide_timeout_s)
        except Exception as error:  # the store is gone: so is rank 0; its end is somebody else's to report
            self._fail(save, f"rank {self._rank} cannot reach the other ranks: {_text(error)}")
            return "refused"
        if start == "started":
            save.deadline = time.monotonic() + self._limits.commit_timeout_s
            try:
                self._staging.copy(chunks, extra_tensors or {})
            except Exception as error:  # the thread tells rank 0, so that all ranks give this save up
                save.copy_error = f"rank {self._rank} could not copy its state to the host: {_text(error)}"
            self._last = save
            save.thread = threading.Thread(target=self._run, args=(save,), name=f"save-{key}", daemon=True)
            try:
                save.thread.start()
            except RuntimeError as error:  # a limit on threads or memory
                self._give_up(save, f"rank {self._rank} could not start its writer thread: {error}")
        blocked_s = time.monotonic() - started
        if self._rank == 0 and (start == "started" or blocked_s > 1):
            self._emit("checkpoint_blocked", step=progress.step, blocked_s=blocked_s)
        return start

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last save has ended, on any rank. Removing older checkpoints is not waited for.

        Returns:
            It was committed. True where there was none.
        """
        save = self._last
        if save is None:
            return True
        deadline = time.monotonic() + timeout_s
        if not save.is_over.wait(timeout_s):
            self._call_stuck(save)
            return False
        if self._rank == 0 or save.is_committed:
            return save.is_committed
        try:
            outcome = save.meeting.outcome(deadline)
        except Exception:  # rank 0 has left, and the store with it: the folder itself can tell
            outcome = COMMITTED if is_committed(save.path) else None
        save.is_committed = outcome == COMMITTED
        return save.is_committed

    def settle(self, timeout_s: float) -> None:
        """Wait for what follows the last commit on this rank: on rank 0, older checkpoints are removed."""
        if self._last is not None and self._last.thread is not None and self._last.thread.ident is not None:
            self._last.thread.join(timeout_s)

    def _decide(self, save: _Save, timeout_s: float) -> SaveStart:
        last = self._last
        if last is not None and self.is_pending and time.monotonic() > last.deadline + 1:
            self._call_stuck(last)
        decision = save.meeting.decide(is_busy=self.is_pending, timeout_s=timeout_s)
        if decision.kind == "go":
            return "started"
        if decision.kind == "absent":
            if decision.is_mine:
                self._fail(save, decision.reason)
            return "refused"
        if decision.is_mine and (last is None or self._told_busy_of is not last):
            self._told_busy_of = last
            self._emit("checkpoint_skipped", path=str(save.path), reason=decision.reason)
        return "busy"

    def _run(self, save: _Save) -> None:
        try:
            if self._rank == 0:
                self._lead(save)
            else:
                self._follow(save)
        except Exception as error:  # a thread has nobody to raise to
            self._fail(save, f"rank {self._rank}: {_text(error)}")
        finally:
            save.is_over.set()

    def _give_up(self, save: _Save, error: str) -> None:
        """End this rank's part of a save that it cannot write, from the training thread."""
        try:
            if self._rank == 0:
                self._fail(save, error)
                save.meeting.close(f"failed: {error}")
            else:
                save.meeting.report({"error": error})
        except Exception as store_error:  # rank 0 is gone
            self._fail(save, f"{error}; and it cannot reach the other ranks: {_text(store_error)}")
        finally:
            save.is_over.set()

    def _follow(self, save: _Save) -> None:
        token = save.meeting.await_folder(save.deadline)
        if token is not None:
            save.meeting.report(self._write_own(save, token))

    def _lead(self, save: _Save) -> None:
        manifest, error = self._lead_to_manifest(save)
        if manifest is not None:
            save.is_committed = True
            save.meeting.close(COMMITTED)
            save.is_over.set()
            self._call_after_commit(save.path, manifest)
            return
        try:
            remove_checkpoint(save.path)
        except OSError as remove_error:
            error += f"; {save.path} could not be removed ({describe_os_error(remove_error)}) and is ignored"
        self._fail(save, error)
        save.meeting.close(f"failed: {error}")

    def _lead_to_manifest(self, save: _Save) -> tuple[Manifest | None, str]:
        """All of rank 0's part up to the commit; returns what was committed, or None and what went wrong."""
        started = time.monotonic()
        token = secrets.token_hex(8)
        try:
            # What an older attempt left of the same step is never mixed with this one.
            remove_checkpoint(save.path)
            save.path.mkdir(parents=True)
            (save.path / _marker(token)).touch()
        except OSError as error:
            return None, f"{save.path} could not be made: {describe_os_error(error)}"
        save.meeting.open_folder(token)
        save.meeting.report(self._write_own(save, token))
        reports, missing = save.meeting.await_reports(save.deadline)
        errors = [report["error"] for report in reports.values() if "error" in report]
        if errors:
            return None, "; ".join(errors)
        if missing:
            limit_s = self._limits.commit_timeout_s
            return None, f"ranks {missing} did not report their shards within {limit_s:g} s: dead or stalled"
        try:
            (save.path / _marker(token)).unlink()
            tensors = _merge(reports)
            shards = [ShardEntry.from_json(report["entry"]) for report in reports.values()]
            manifest = commit_manifest(
                save.path, save.progress, self._identity, tensors, shards, created_at=time.time()
            )
        except CheckpointError as error:
            return None, str(error)
        except OSError as error:
            return None, f"the manifest could not be written: {describe_os_error(error)}"
        self._emit(
            "checkpoint_committed",
            step=save.progress.step,
            n_bytes=manifest.n_bytes,
            write_s=time.monotonic() - started,
            path=str(save.path),
        )
        return manifest, ""

    def _write_own(self, save: _Save, token: str) -> dict[str, Any]:
        if save.copy_error is not None:
            return {"error": save.copy_error}
        name, plan = shard_name(self._rank, self._world_size), self._staging.plan
        try:
            # The folder is held open and known by its token: a rank of an older attempt that wakes up
            # late cannot write into a newer folder of the same name.
            folder = os.open(save.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.stat(_marker(token), dir_fd=folder)
                handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
                try:
                    entry = write_shard(handle, plan, self._staging.buffer, name, self._rank)
                finally:
                    os.close(handle)
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            return {
                "error": f"rank {self._rank} could not write {save.path / name} ({plan.n_bytes} bytes): "
                f"{describe_os_error(error)}{_room(save.path)}"
            }
        tensors = {
            n: [list(shape), DTYPE_NAMES[dtype]] for n, (shape, dtype) in self._staging.tensors.items()
        }
        return {"entry": entry.to_json(), "tensors": tensors}

    def _call_stuck(self, save: _Save) -> None:
        if not save.was_called_stuck:
            save.was_called_stuck = True
            self._fail(save, f"rank {self._rank} is still writing: the file system does not answer")

    def _call_after_commit(self, path: Path, manifest: Manifest) -> None:
        if self._after_commit is None:
            return
        try:
            with self._after_commit_lock:
                self._after_commit(path, manifest)
        except Exception:  # the checkpoint is committed whatever becomes of the older ones
            _log.exception("after the commit of %s", path)

    def _fail(self, save: _Save, error: str) -> None:
        n_bytes = self._staging.plan.n_bytes if self._staging.is_prepared else 0
        self._emit(
            "checkpoint_failed", step=save.progress.step, path=str(save.path), error=error, n_bytes=n_bytes
        )

    def _emit(self, kind: str, **fields: Any) -> None:
        try:
            self._on_event(kind, fields)
        except Exception:  # a full ledger disk must not end training either
            _log.exception("event %s %s was not taken", kind, fields)


def _marker(token: str) -> str:
    return f"saving-{token}"


def _room(path: Path) -> str:
    """What the file system says it has, for the reader of the message; a quota may allow less."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return ""
    return f"; the file system has {stats.f_bavail * stats.f_frsize} bytes free"


def _merge(reports: dict[int, dict[str, Any]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, report in reports.items():
        for name, (shape, dtype) in report["tensors"].items():
            value = (tuple(shape), DTYPES[dtype])
            if found.setdefault(name, value) != value:
                raise CheckpointError(
                    f"rank {rank} says that {name} is {dtype} of {shape}, another rank says {found[name]}"
                )
    return found


def _text(error: Exception) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
