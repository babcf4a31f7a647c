"""Which checkpoints may go.

The plan is pure; applying it removes folders that are ours by name and nothing else.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from ops.checkpoint.layout import committed_steps, folder_name, list_steps
from ops.checkpoint.removal import remove_checkpoint


def plan_retention(
    steps: Iterable[int], keep_last: int, pinned: Collection[int], newest_good: int | None
) -> list[int]:
    """Steps to delete, by number and never by text ("huggingface/transformers#27138").

    Kept are the newest good one always, the `keep_last` highest up to it, what is pinned, and everything
    above it: those are not this run's past (a run that began in a used folder, or went back), so their
    age says nothing. With no good one known nothing is deleted.

    Args:
        steps: committed checkpoints.
        keep_last: how many to keep, the newest good one counted.
        pinned: steps that are never deleted.
        newest_good: the newest one known to be whole.

    Returns:
        Steps in ascending order.
    """
    if newest_good is None:
        return []
    past = sorted({step for step in steps if step <= newest_good})
    kept = {newest_good, *past[-max(keep_last, 1) :], *pinned}
    return [step for step in past if step not in kept]


def apply_retention(
    checkpoint_dir: Path, keep_last: int, pinned: Collection[int], newest_good: int
) -> list[Path]:
    """Remove what the plan says, and unfinished saves older than the newest good one. Call on one rank.

    Returns:
        The folders removed.

    Raises:
        OSError: a folder could not be removed; those before it are gone.
    """
    committed = committed_steps(checkpoint_dir)
    unfinished = {step for step in list_steps(checkpoint_dir) if step < newest_good} - set(committed)
    doomed = sorted({*plan_retention(committed, keep_last, pinned, newest_good), *(unfinished - set(pinned))})
    paths = [checkpoint_dir / folder_name(step) for step in doomed]
    for path in paths:
        remove_checkpoint(path)
    return paths
