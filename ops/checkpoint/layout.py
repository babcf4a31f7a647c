"""Names inside a checkpoint folder: which entries are checkpoints, in which order. Reads no contents.

checkpoints/
  step-00000020/                          a checkpoint if manifest.json is in it, else an unfinished save
    shard-00000-of-00002.safetensors      one file a rank
    shard-00001-of-00002.safetensors
    manifest.json                         written last: its appearance is the commit
  notes/  7/  ...                         not ours: never read, never removed
"""

import re
from pathlib import Path

CHECKPOINTS_DIR = "checkpoints"
"""Folder of checkpoint folders in a run's folder."""
MANIFEST = "manifest.json"

_STEP = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """Name of the folder of a step: `step-00000020`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint folder's name; None where the name is not exactly one that `folder_name` gives."""
    match = _STEP.fullmatch(name)
    if match is None or not name.isascii():
        return None
    step = int(match[1])
    return step if folder_name(step) == name else None


def shard_name(rank: int, world_size: int) -> str:
    """Name of the file that a rank writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def rng_name(rank: int) -> str:
    """Logical name of a rank's random state."""
    return f"rng/rank-{rank:05d}"


def is_rng(name: str) -> bool:
    """A random state belongs to a rank, not to the model: it is never resharded."""
    return name.startswith("rng/")


def list_steps(checkpoint_dir: Path) -> list[int]:
    """Steps of all folders with a checkpoint's name, committed or not, in ascending order of their number.

    A missing folder has no steps.
    """
    return sorted(_folders(checkpoint_dir))


def is_committed(path: Path) -> bool:
    """The folder holds a manifest. Whether its bytes are still right: see reader.find_newest."""
    return (path / MANIFEST).is_file()


def committed_steps(checkpoint_dir: Path) -> list[int]:
    """Steps whose save was finished, in ascending order of their number; contents are not verified."""
    return sorted(step for step, path in _folders(checkpoint_dir).items() if is_committed(path))


def newest_committed_step(checkpoint_dir: Path) -> int | None:
    """The last of `committed_steps`, or None."""
    return max(committed_steps(checkpoint_dir), default=None)


def foreign_entries(checkpoint_dir: Path) -> list[Path]:
    """Entries whose name is not a checkpoint's, and files that have such a name, sorted by name."""
    if not checkpoint_dir.is_dir():
        return []
    ours = set(_folders(checkpoint_dir).values())
    return sorted(entry for entry in checkpoint_dir.iterdir() if entry not in ours)


def _folders(checkpoint_dir: Path) -> dict[int, Path]:
    if not checkpoint_dir.is_dir():
        return {}
    found = {step_of(entry.name): entry for entry in checkpoint_dir.iterdir() if entry.is_dir()}
    return {step: path for step, path in found.items() if step is not None}
