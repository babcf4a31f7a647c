"""Writing that survives a crash: fsync of files and folders, atomic replacement, removal in the safe order.

Knows files, not checkpoints' contents. Meant for POSIX file systems that all ranks see.
"""

import errno
import os
import shutil
from pathlib import Path

from ops.checkpoint.layout import MANIFEST

_CAUSES = {
    errno.ENOSPC: "no space left on the file system",
    errno.EDQUOT: "the disk quota of this user or project is used up (the file system itself may have room)",
    errno.EFBIG: "the file would be larger than the process or the file system allows",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EIO: "the device or server reported an input/output error",
    errno.ESTALE: "the network file system's handle is stale",
}


def describe_os_error(error: OSError) -> str:
    """One phrase for what the operating system said, the number and its own text included.

    A full disk and an exhausted quota are told apart ("open-mmlab/mmdetection#12069").
    """
    code = error.errno
    if code is None:
        return str(error)
    own = f"errno {code}: {os.strerror(code)}"
    cause = _CAUSES.get(code)
    return f"{cause} ({own})" if cause else own


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: memoryview) -> None:
    """Write every byte: a single write may stop short (signals, 2 GiB limit, almost full disk)."""
    while data:
        data = data[os.write(handle, data) :]


def write_atomically(path: Path, text: str) -> None:
    """Put a file in place so that after a crash it is there whole or not at all.

    Raises:
        OSError: nothing was put in place.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(handle, memoryview(text.encode()))
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.rename(path)
    fsync_folder(path.parent)


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
