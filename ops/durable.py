"""Writing that survives a crash: fsync of files and folders, atomic replacement; OSErrors in plain words.

Meant for POSIX file systems that all ranks see. Knows nothing of what is written.
"""

import contextlib
import errno
import os
from pathlib import Path

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
    """Put a file in place of an older one, if any, so that after a crash either is there whole.

    Returns when the new one is durable, its name included. Processes that write the same file at once do
    not disturb each other: the last one stays.

    Raises:
        OSError: nothing was put in place, or it is in place and may not outlive a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(handle, memoryview(text.encode()))
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file on a full disk would only take room
            temporary.unlink()
        raise
    fsync_folder(path.parent)
