"""Removing a checkpoint in the safe order. Decides nothing about which may go: see retention.py."""

import shutil
from pathlib import Path

from ops.checkpoint.layout import MANIFEST
from ops.durable import fsync_folder


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint folder, its manifest first.

    Killed half-way, what is left is an unfinished save and never a committed one with holes. A missing
    folder is no error.

    Raises:
        OSError: something could not be removed.
    """
    if not path.is_dir():
        return
    manifest = path / MANIFEST
    if manifest.exists():
        manifest.unlink()
        fsync_folder(path)
    shutil.rmtree(path, ignore_errors=False)
    fsync_folder(path.parent)
