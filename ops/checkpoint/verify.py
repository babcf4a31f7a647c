"""What `packtrain checkpoint ls` and `packtrain checkpoint verify` show. Changes nothing."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.errors import CheckpointError
from ops.checkpoint.layout import committed_steps, folder_name, is_committed, list_steps
from ops.checkpoint.manifest import CorruptCheckpointError, read_manifest
from ops.checkpoint.reader import check_shards, open_checkpoint, read_tensor


@dataclass(frozen=True)
class Verification:
    """What a look at every byte of one checkpoint found."""

    path: Path
    step: int | None
    """None where the manifest could not be read."""
    n_tensors: int
    n_bytes: int
    problems: tuple[str, ...]
    """One line each; empty means whole and finite."""

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, `ok` included."""
        return {**asdict(self), "path": str(self.path), "problems": list(self.problems), "ok": self.ok}


@dataclass(frozen=True)
class CheckpointRow:
    """One line of the list."""

    step: int
    path: Path
    is_committed: bool
    n_bytes: int
    world_size: int
    engine: str
    attempt: int
    created_at: float
    """Wall clock, seconds since 1970; 0 where not committed."""
    note: str
    """Why it is no restart point; empty where it may be one (bytes are not compared here)."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "path": str(self.path)}


def verify(path: Path) -> Verification:
    """Compare sizes and checksums of all files, then look for values that are not finite.

    All damaged shards are named, not only the first.
    """
    try:
        ref = open_checkpoint(path)
    except CorruptCheckpointError as error:
        return Verification(path, _step_stated(path), 0, 0, (str(error),))
    problems: list[str] = []
    for shard in ref.manifest.shards:
        try:
            check_shards(ref, [shard.rank])
        except CorruptCheckpointError as error:
            problems.append(str(error))
    if not problems:
        for name in sorted(ref.manifest.tensors):
            tensor = read_tensor(ref, name)
            n_bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if n_bad:
                problems.append(f"{name} has {n_bad} of {tensor.numel()} values that are not finite")
    manifest = ref.manifest
    return Verification(path, ref.step, len(manifest.tensors), manifest.n_bytes, tuple(problems))


def verify_all(checkpoint_dir: Path) -> list[Verification]:
    """`verify` of every committed checkpoint, in ascending order of their step.

    Unfinished saves are left out: a killed run has one, and nothing is wrong with that.
    """
    return [verify(checkpoint_dir / folder_name(step)) for step in committed_steps(checkpoint_dir)]


def list_checkpoints(checkpoint_dir: Path) -> list[CheckpointRow]:
    """All folders with a checkpoint's name, in ascending order of their step.

    Raises:
        CheckpointError: the folder does not exist.
    """
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"{checkpoint_dir} is no folder")
    rows = []
    for step in list_steps(checkpoint_dir):
        path = checkpoint_dir / folder_name(step)
        try:
            m = open_checkpoint(path).manifest
        except CorruptCheckpointError as error:
            rows.append(CheckpointRow(step, path, is_committed(path), 0, 0, "", 0, 0.0, str(error)))
        else:
            origin = m.identity
            rows.append(
                CheckpointRow(
                    step=step,
                    path=path,
                    is_committed=True,
                    n_bytes=m.n_bytes,
                    world_size=m.world_size,
                    engine=origin.engine,
                    attempt=origin.attempt,
                    created_at=m.created_at,
                    note="",
                )
            )
    return rows


def _step_stated(path: Path) -> int | None:
    try:
        return read_manifest(path).progress.step
    except CorruptCheckpointError:
        return None
