"""Checkpoints that must never be restored again: moved out of the way, whole, and kept until somebody looks.

    <run>/checkpoints/step-00000020            ->  <run>/set_aside/step-00000020-001

Retention does not see them, so nothing of them is deleted; the run may save the same step again.
"""

from collections.abc import Iterable
from pathlib import Path

from ops.checkpoint.layout import folder_name
from ops.durable import fsync_folder

SET_ASIDE_DIR = "set_aside"
"""Folder beside the folder of checkpoints."""


def set_aside(checkpoint_dir: Path, steps: Iterable[int]) -> list[Path]:
    """Move the checkpoints of these steps away. Call on one process, while nobody saves.

    Returns:
        Where they are now, in the order given; one that is not there is left out.

    Raises:
        OSError: one could not be moved; those before it are away.
    """
    folder = checkpoint_dir.parent / SET_ASIDE_DIR
    moved = []
    for step in steps:
        source = checkpoint_dir / folder_name(step)
        if not source.is_dir():
            continue
        folder.mkdir(exist_ok=True)
        number = 1 + max((_number(path) for path in folder.glob(f"{source.name}-*")), default=0)
        target = folder / f"{source.name}-{number:03d}"
        source.rename(target)
        moved.append(target)
    if moved:
        fsync_folder(checkpoint_dir)
        fsync_folder(folder)
    return moved


def _number(path: Path) -> int:
    last = path.name.rpartition("-")[2]
    return int(last) if last.isdecimal() else 0
