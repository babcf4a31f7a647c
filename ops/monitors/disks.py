"""Storage that the run needs: space, inodes, mounted read-only, unmounted, gone. Told when it turns.

A stat on a hung network mount blocks: who runs the monitors gives each its own time. Does not free anything.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ops.monitors.changes import States
from ops.monitors.tree import read_text
from ops.signal import Entity, EntityKind, Signal

StatVfs = Callable[[Path], os.statvfs_result]
MAX_LIMIT_FRAC = 0.2
"""Of a small disk a limit in bytes is at most this share."""
ROOM_AGAIN = 1.1
"""A disk at its limit is not to be told full and in order in turns."""
OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


class DiskMonitor:
    """Watches the file systems below some paths."""

    name = "disks"

    def __init__(
        self,
        paths: Sequence[Path],
        node: str,
        proc_root: Path = Path("/proc"),
        min_free_frac: float = 0.05,
        min_free_bytes: int = 1 << 30,
        statvfs: StatVfs = os.statvfs,
    ) -> None:
        """Remember what to watch.

        Args:
            paths: folders that are written to: checkpoints, data cache, temporary files.
            node: address of this node.
            proc_root: root of a /proc; self/mountinfo is read.
            min_free_frac: told below this share of free space, and of free inodes.
            min_free_bytes: told below this too, but not above MAX_LIMIT_FRAC of the disk.
            statvfs: as os.statvfs.
        """
        self._paths = list(paths)
        self._node = node
        self._proc_root = proc_root
        self._min_free_frac = min_free_frac
        self._min_free_bytes = min_free_bytes
        self._statvfs = statvfs
        self._states = States()
        self._mount_points: dict[Path, str] = {}

    def is_supported(self) -> bool:
        """There is a path to watch."""
        return bool(self._paths)

    def check(self, now: float) -> list[Signal]:
        """What turned: disk_full, inodes_full, read_only, mount_lost, storage_unreachable, or _cleared."""
        mounts = _mounts(self._proc_root / "self" / "mountinfo")
        return [signal for path in self._paths for signal in self._check_path(path, mounts, now)]

    def _check_path(self, path: Path, mounts: dict[str, bool], now: float) -> list[Signal]:
        entity = Entity(EntityKind.STORAGE, str(path), self._node)
        found: list[Signal] = []

        def tell(kind: str, is_bad: bool, value: float | None, text: str) -> None:
            turned = self._states.turned((path, kind), is_bad)
            if turned is not None:
                found.append(
                    Signal(now, self.name, kind if turned else f"{kind}_cleared", entity, value, text)
                )

        try:
            usage = self._statvfs(path)
        except OSError as error:
            tell("storage_unreachable", True, None, f"{path}: {os.strerror(error.errno or 0)}")
            return found
        tell("storage_unreachable", False, None, f"{path} answers again")
        free_bytes, size_bytes = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
        # Once full, it takes a little more room to be taken as in order again.
        factor = ROOM_AGAIN if self._states.is_bad((path, "disk_full")) else 1.0
        # A quota or a pseudo file system may show no size at all: nothing can be said.
        limit_bytes = max(
            self._min_free_frac * size_bytes, min(self._min_free_bytes, MAX_LIMIT_FRAC * size_bytes)
        )
        too_full = size_bytes > 0 and free_bytes < factor * limit_bytes
        tell("disk_full", too_full, free_bytes, f"{path}: {free_bytes} of {size_bytes} bytes are free")
        few_inodes = usage.f_files > 0 and usage.f_favail < self._min_free_frac * usage.f_files
        tell(
            "inodes_full",
            few_inodes,
            usage.f_favail,
            f"{path}: {usage.f_favail} of {usage.f_files} inodes are free",
        )
        mount_point = _mount_of(path, mounts)
        if mount_point is not None:
            # A path whose mount is gone is written to the disk below it, and nobody notices.
            own = max(mount_point, self._mount_points.get(path, ""), key=len)
            self._mount_points[path] = own
            tell("mount_lost", mount_point != own, None, f"{path}: lies on {mount_point}, lay on {own}")
            is_read_only = mounts[mount_point]
            state = "read-only" if is_read_only else "writable"
            tell("read_only", is_read_only, None, f"{path}: {mount_point} is mounted {state}")
        return found


def _mounts(mountinfo: Path) -> dict[str, bool]:
    """Mount point -> it is read-only, by its own options or the file system's (errors=remount-ro)."""
    found = {}
    for line in (read_text(mountinfo) or "").splitlines():
        mount, _, filesystem = line.partition(" - ")
        mount_fields, filesystem_fields = mount.split(), filesystem.split()
        if len(mount_fields) < 6 or len(filesystem_fields) < 3:
            continue
        options = {*mount_fields[5].split(","), *filesystem_fields[2].split(",")}
        point = OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), mount_fields[4])
        found[point] = "ro" in options  # Of two on one point the later one hides the first.
    return found


def _mount_of(path: Path, mounts: dict[str, bool]) -> str | None:
    """The mount point that a path lies on."""
    resolved = path.resolve()
    return next((str(p) for p in (resolved, *resolved.parents) if str(p) in mounts), None)
