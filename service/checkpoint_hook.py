"""When a run saves, and what it goes on from: the bridge from the trainer to ops/checkpoint.

    restore():  rank 0 names a checkpoint -> each rank verifies its share -> each rank loads -> go on
                          ^                              | trouble on any rank     |
                          +----- the next older one -----+-------------------------+
                          | none left: an error where there was a committed one, else step 0

Knows nothing of file formats. No Ray here.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.engines.base import Engine
from jobs.errors import CheckpointError
from jobs.events import EvalRecord, Progress, Ranges, StepRecord
from jobs.seeds import rng_state, set_rng_state
from jobs.spec.job import CheckpointSection
from jobs.state import Chunk
from ops.checkpoint.fingerprint import check_fingerprint
from ops.checkpoint.layout import folder_name, is_committed, is_rng, rng_name, step_of
from ops.checkpoint.manifest import CorruptCheckpointError, Identity, Manifest
from ops.checkpoint.reader import (
    CheckpointRef,
    check_shards,
    iter_candidates,
    listed,
    load_into,
    misfits,
    open_checkpoint,
    read_tensor,
)
from ops.checkpoint.retention import apply_retention
from ops.checkpoint.set_aside import set_aside
from ops.checkpoint.writer import AsyncWriter, Limits, Peers
from ops.durable import describe_os_error

_log = logging.getLogger(__name__)

Record = Callable[[str, dict[str, Any]], None]
"""Takes the kind and the fields of a ledger event; safe to call from any thread."""

_TEXT_BYTES = 1024
"""What a rank may say of its trouble to the others."""
_DECIDE_TIMEOUT_S = 30.0
"""For all ranks to enter a save while training goes on."""
_SETTLE_TIMEOUT_S = 30.0
"""For older checkpoints to be removed at the end; the next run of the folder removes what is left."""


class CheckpointHook:
    """Saves every n steps and at the end, and removes what is too old after each commit."""

    def __init__(
        self,
        section: CheckpointSection,
        checkpoint_dir: Path,
        identity: Identity,
        peers: Peers,
        record: Record,
        device: torch.device,
        blocking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Local.

        Args:
            section: when to save and how much to keep.
            checkpoint_dir: the run's folder of checkpoints, seen by all ranks.
            identity: what the checkpoints are of.
            peers: this rank and the store for saves, see ops.checkpoint.writer.Peers.
            record: takes ledger events, on every rank.
            device: this rank's: its random state is saved as well as the host's.
            blocking: entered where training waits for a save.
        """
        self._blocking = blocking
        self._section, self._checkpoint_dir, self._rank = section, checkpoint_dir, peers.rank
        self._device = device
        limits = Limits(
            commit_timeout_s=section.commit_timeout_s,
            decide_timeout_s=min(_DECIDE_TIMEOUT_S, section.commit_timeout_s),
        )
        self._writer = AsyncWriter(checkpoint_dir, identity, peers, record, limits, self._after_commit)
        self._is_due = False
        self._last_step: int | None = None
        self._skipped: Ranges = ()

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Allocate the host buffer. A restored step is not saved again."""
        self._last_step = progress.step
        self._skipped = progress.skipped_samples
        self._writer.prepare(engine.chunks(), self._extra())

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Save where it is due; while an earlier save is under way, after the next step that finds none."""
        every = self._section.every_steps
        if every is not None and record.step % every == 0:
            self._is_due = True
        if not self._is_due:
            return
        with self._blocking():
            self._save(
                engine, Progress(record.step, record.sample_ordinal, record.tokens_seen, self._skipped)
            )
            if not self._section.asynchronous:
                self._writer.wait(self._section.commit_timeout_s)

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing."""

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Save the last state, unless that is done, and wait for the commit. A failure is an event only.

        No later save makes up for this one, so a rank that is still busy with an earlier one is waited
        for as long as a commit may take.
        """
        timeout_s = self._section.commit_timeout_s
        with self._blocking():
            is_saved = self._writer.wait(timeout_s) and self._last_step == progress.step
            if not is_saved and progress.step > 0:
                self._save(engine, progress, decide_timeout_s=timeout_s)
                self._writer.wait(timeout_s)
            self._writer.settle(_SETTLE_TIMEOUT_S)

    def _save(self, engine: Engine, progress: Progress, decide_timeout_s: float | None = None) -> None:
        start = self._writer.save(engine.chunks(), progress, self._extra(), decide_timeout_s=decide_timeout_s)
        self._is_due = start == "busy"
        if start == "started":
            self._last_step = progress.step

    def _extra(self) -> dict[str, torch.Tensor]:
        return {rng_name(self._rank): rng_state(self._device)}

    def _after_commit(self, path: Path, manifest: Manifest) -> None:
        removed = apply_retention(
            self._checkpoint_dir, self._section.keep_last, pinned=(), newest_good=manifest.progress.step
        )
        for old in removed:
            _log.info("removed %s: keep_last=%d, newest is %s", old, self._section.keep_last, path.name)


def restore(
    engine: Engine,
    checkpoint_dir: Path,
    groups: Groups,
    fingerprint: str,
    lr_of_step: Callable[[int], float],
    record: Record,
    device: torch.device,
    before: int | None = None,
) -> Progress:
    """Fill the engine from the newest checkpoint that every rank can read whole.

    Collective over groups.control. Bytes are verified once, each rank taking its share of the files,
    before any state is touched. Random state comes back where the checkpoint was written by as many
    ranks on the same kind of device; else each rank keeps the state that it has, and the log says so.

    Args:
        engine: built, with any weights.
        checkpoint_dir: the run's folder of checkpoints; may be missing.
        groups: all ranks.
        fingerprint: of this run's model.
        lr_of_step: learning rate of the step that follows so many completed ones.
        record: takes ledger events (checkpoint_skipped, restored); called on rank 0 only.
        device: this rank's.
        before: newest step that may be restored, after a rollback; None allows every one.

    Returns:
        Where to go on; step 0 where no save was ever finished, and the engine is untouched.

    Raises:
        CheckpointError: on all ranks. The newest whole checkpoint is of another model or has other tensors.
        CorruptCheckpointError: on all ranks. A save was finished and none can be read to its end: whether
            to begin anew, over what is there, is the user's choice.
    """
    started = time.monotonic()
    chunks = engine.chunks()
    lost: list[str] = []
    """On rank 0: the committed ones that were passed over, and why."""
    bad: list[Path] = []
    """On rank 0: their folders."""

    def skip(path: Path, reason: str) -> None:
        _log.warning("passed over %s: %s", path, reason)
        record("checkpoint_skipped", {"path": str(path), "reason": reason})
        if step_of(path.name) is not None and _may_be_committed(path):
            lost.append(f"{path.name}: {reason}")
            bad.append(path)

    candidates = iter_candidates(checkpoint_dir, skip) if groups.rank == 0 else iter(())
    if before is not None:
        candidates = (found for found in candidates if found.step <= before)
    while (step := _broadcast_step(_next_of(candidates, lost), groups)) is not None:
        path = checkpoint_dir / folder_name(step)
        found, problems = _verify_together(path, groups)
        if found is not None and not problems:
            _refuse_misfits(found, chunks, fingerprint, groups)
            problems = _load_together(found, chunks, groups)
        if found is not None and not problems:
            progress = found.manifest.progress
            engine.after_load(lr_of_step(progress.step))
            _restore_rng(found, groups, device)
            if groups.rank == 0:
                load_s = time.monotonic() - started
                record("restored", {"step": progress.step, "load_s": load_s, "path": str(path)})
                _keep_away(bad, record)
            return progress
        if groups.rank == 0:
            skip(path, "; ".join(problems))
    reasons = _broadcast_text(listed(lost), groups)
    if reasons:
        raise CorruptCheckpointError(
            f"no checkpoint in {checkpoint_dir} can be read whole: {reasons}. Repair the storage or the "
            f"folders named and resume; to go on without them, to step 0 where nothing else is left, "
            f"remove them or move them elsewhere first."
        )
    return Progress()


def _keep_away(bad: Sequence[Path], record: Record) -> None:
    """Move what was passed over to where no restart finds it, and no save of the same step removes it."""
    for path in bad:
        step = step_of(path.name)
        try:
            moved = set_aside(path.parent, [] if step is None else [step])
        except OSError as error:
            _log.warning("%s could not be set aside: %s", path, describe_os_error(error))
            continue
        for target in moved:
            record("checkpoint_set_aside", {"step": step, "path": str(path), "kept_as": str(target)})


def _may_be_committed(path: Path) -> bool:
    """A manifest is there, or cannot be looked for: only its certain absence says that a save was cut off."""
    try:
        return is_committed(path)
    except OSError:
        return True


def _next_of(candidates: Iterator[CheckpointRef], lost: list[str]) -> CheckpointRef | None:
    """The next one; a folder that cannot be listed has none, and is not taken for an empty one."""
    try:
        return next(candidates, None)
    except OSError as error:
        lost.append(f"the folder cannot be listed: {describe_os_error(error)}")
        return None


def _verify_together(path: Path, groups: Groups) -> tuple[CheckpointRef | None, list[str]]:
    found, trouble = None, ""
    try:
        found = open_checkpoint(path)
        check_shards(found, range(groups.rank, found.manifest.world_size, groups.world_size))
    except CheckpointError as error:
        trouble = str(error)
    return found, _gather_troubles(trouble, groups)


def _refuse_misfits(found: CheckpointRef, chunks: Sequence[Chunk], fingerprint: str, groups: Groups) -> None:
    """Names are strict over all ranks together: one rank may hold only part of them."""
    check_fingerprint(found.manifest.identity.fingerprint, fingerprint, str(found.path))
    names = sorted(name for name in found.manifest.tensors if not is_rng(name))
    own = {chunk.name for chunk in chunks}
    is_wanted = torch.tensor([name in own for name in names], dtype=torch.uint8)
    dist.all_reduce(is_wanted, dist.ReduceOp.MAX, group=groups.control)
    unexpected = [
        f"{name} is in the checkpoint and nothing expects it"
        for name, wanted in zip(names, is_wanted.tolist(), strict=True)
        if not wanted
    ]
    problems = misfits(found.manifest, chunks)
    others = _gather_troubles(listed(problems), groups)
    if unexpected or others:
        raise CheckpointError(f"{found.path} does not fit: {listed(unexpected + others)}")


def _load_together(found: CheckpointRef, chunks: Sequence[Chunk], groups: Groups) -> list[str]:
    trouble = ""
    try:
        load_into(found, chunks, strict=False, verify=False)
    except CheckpointError as error:
        trouble = str(error)
    return _gather_troubles(trouble, groups)


def _restore_rng(found: CheckpointRef, groups: Groups, device: torch.device) -> None:
    saved = found.manifest.world_size
    name = rng_name(groups.rank)
    reason = ""
    if saved != groups.world_size or name not in found.manifest.tensors:
        reason = f"was written by {saved} ranks, these are {groups.world_size}"
    else:
        state = read_tensor(found, name)
        if len(state) == len(rng_state(device)):
            set_rng_state(state, device)
        else:
            reason = f"was written on another kind of device than {device.type}"
    if reason and groups.rank == 0:
        _log.warning("%s %s: random states are not restored", found.path, reason)


def _broadcast_step(candidate: CheckpointRef | None, groups: Groups) -> int | None:
    """Rank 0's candidate on all ranks. Collective over groups.control."""
    step = torch.tensor([-1 if candidate is None else candidate.step], dtype=torch.int64)
    dist.broadcast(step, 0, group=groups.control)
    return None if step.item() < 0 else int(step.item())


def _broadcast_text(text: str, groups: Groups) -> str:
    """Rank 0's text on all ranks. Collective over groups.control."""
    data = text.encode("ascii", "replace")
    n_bytes = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(n_bytes, 0, group=groups.control)
    if not n_bytes.item():
        return ""
    row = torch.tensor(list(data.ljust(int(n_bytes.item()))), dtype=torch.uint8)
    dist.broadcast(row, 0, group=groups.control)
    return bytes(row.tolist()).decode("ascii")


def _gather_troubles(own: str, groups: Groups) -> list[str]:
    """What every rank has to say, the ranks without trouble left out. Collective over groups.control."""
    flag = torch.tensor([bool(own)], dtype=torch.uint8)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=groups.control)
    if not flag.item():
        return []
    data = own.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    padded = torch.tensor(list(data), dtype=torch.uint8)
    all_padded = [torch.empty_like(padded) for _ in range(groups.world_size)]
    dist.all_gather(all_padded, padded, group=groups.control)
    texts = [bytes(row.tolist()).decode("ascii").rstrip() for row in all_padded]
    return list(dict.fromkeys(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
