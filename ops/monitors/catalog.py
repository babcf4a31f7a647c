"""Every monitor of a node, with a line on what it tells. Runs none.

The names here are those of the signals' sources. What a signal's kind means stands at each monitor's check.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ops.monitors.base import Monitor

LOGGER = logging.getLogger(__name__)

CATALOG = {
    "kernel_log": "new lines of /dev/kmsg or a syslog file: Xids, SXids, memory kills, disks, machine checks",
    "gpu_health": "by NVML: memory errors, heat, throttling, power, PCIe, NVLink, lost, foreign processes",
    "nvidia_smi": "the same by the tool nvidia-smi, where NVML cannot be used",
    "dcgm": "the same by a dcgm-exporter on this node, and Xids where the kernel's log may not be read",
    "health_lines": "what health checks of others (SuperBench, gcm) write as JSON lines",
    "cgroup_memory": "kills for lack of memory and limits hit, in the control groups of the ranks",
    "disks": "storage of the run: full, out of inodes, read-only, gone",
    "shm": "/dev/shm too small or full",
    "nics": "network interfaces down, flapping, with errors, gone",
    "infiniband": "InfiniBand and RoCE ports down, flapping, slower, with errors, gone",
    "clock_skew": "the clock: off, jumped, not synchronised",
    "d_state": "threads of the ranks that are stuck in the kernel",
}
"""Name -> what it tells."""


@dataclass(frozen=True)
class Supported:
    """Which monitors can work on this node."""

    monitors: tuple[Monitor, ...]
    absent: tuple[str, ...]
    """Names of those that cannot: not applicable, which is no fault."""


def supported(monitors: Iterable[Monitor]) -> Supported:
    """Ask each monitor once. One that raises instead of answering is absent, and the log says why."""
    working, absent = [], []
    for monitor in monitors:
        try:
            is_supported = monitor.is_supported()
        except Exception:  # A monitor's fault is never training's.
            LOGGER.exception(
                "monitor %s could not say whether it can work here: it is left out", monitor.name
            )
            is_supported = False
        if is_supported:
            working.append(monitor)
        else:
            absent.append(monitor.name)
    return Supported(tuple(working), tuple(absent))
