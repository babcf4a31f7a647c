"""Shared memory of a node: NCCL, gloo and data loaders die of a bus error where it is small or full.

Containers get 64 MiB where nobody asked for more. Does not delete what dead processes left there.
"""

import os
from collections.abc import Callable
from pathlib import Path

from ops.monitors.changes import States
from ops.signal import Entity, EntityKind, Signal


class ShmMonitor:
    """Watches the size and the use of /dev/shm."""

    name = "shm"

    def __init__(
        self,
        node: str,
        path: Path = Path("/dev/shm"),
        min_size_bytes: int = 1 << 30,
        min_free_frac: float = 0.1,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        """Remember the limits.

        Args:
            node: address of this node.
            path: where shared memory is mounted.
            min_size_bytes: a smaller one is told at the first check.
            min_free_frac: told below this share of free space.
            statvfs: as os.statvfs.
        """
        self._entity = Entity(EntityKind.NODE, node)
        self._path = path
        self._min_size_bytes = min_size_bytes
        self._min_free_frac = min_free_frac
        self._statvfs = statvfs
        self._states = States()

    def is_supported(self) -> bool:
        """It is mounted."""
        try:
            return self._statvfs(self._path).f_blocks > 0
        except OSError:
            return False

    def check(self, now: float) -> list[Signal]:
        """What turned: shm_small (bytes in all) or shm_full (bytes free), or the same with _cleared."""
        usage = self._statvfs(self._path)
        size_bytes, free_bytes = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
        # Once full, it takes a little more room to be taken as in order again.
        factor = 1.1 if self._states.is_bad("shm_full") else 1.0
        readings = (
            (
                "shm_small",
                size_bytes < self._min_size_bytes,
                size_bytes,
                f"{self._path} has {size_bytes} bytes, fewer than {self._min_size_bytes}; enlarge it",
            ),
            (
                "shm_full",
                free_bytes < factor * self._min_free_frac * size_bytes,
                free_bytes,
                f"{self._path}: {free_bytes} of {size_bytes} bytes are free",
            ),
        )
        found = []
        for kind, is_bad, value, text in readings:
            turned = self._states.turned(kind, is_bad)
            if turned is not None:
                told = kind if turned else f"{kind}_cleared"
                found.append(Signal(now, self.name, told, self._entity, value, text))
        return found
