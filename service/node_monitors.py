"""The monitors that a node agent asks, with their intervals: all of ops/monitors/catalog.py.

What is expensive or slow to change is asked rarely; what says why a process died, once a second. Runs none.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ops.diagnosis.kernel_events import KernelLogReader
from ops.monitors.cgroup_memory import CgroupMemoryMonitor
from ops.monitors.clock_skew import ClockSkewMonitor
from ops.monitors.d_state import DStateMonitor
from ops.monitors.dcgm import DcgmMonitor
from ops.monitors.disks import DiskMonitor
from ops.monitors.gpu_health import GpuHealthMonitor
from ops.monitors.health_lines import HealthLinesMonitor
from ops.monitors.infiniband import InfinibandMonitor
from ops.monitors.kernel_log import KernelLogMonitor
from ops.monitors.nics import NicMonitor
from ops.monitors.nvidia_smi_xml import NvidiaSmiMonitor
from ops.monitors.shm import ShmMonitor
from service.monitor_runner import Scheduled


def node_monitors(
    node: str,
    storage: Path,
    rank_of_pid: Callable[[], Mapping[int, int]],
    kernel_log: Path,
    health_lines: Path | None = None,
) -> list[Scheduled]:
    """Every monitor of a node, whether it can work here or not.

    Args:
        node: address of this node.
        storage: folder that the run writes to.
        rank_of_pid: process id -> rank, of the run's ranks that are on this node now.
        kernel_log: /dev/kmsg, or a file that syslog writes.
        health_lines: a file that health checks of others write, where there is one.
    """
    reader = KernelLogReader(node)
    found = [
        Scheduled(KernelLogMonitor(kernel_log, reader.signal), 1.0, is_urgent=True),
        Scheduled(CgroupMemoryMonitor(node, rank_of_pid), 5.0, is_urgent=True),
        Scheduled(GpuHealthMonitor(node), 10.0, limit_s=30.0),
        Scheduled(NvidiaSmiMonitor(node), 60.0, limit_s=60.0, stands_in_for="gpu_health"),
        Scheduled(DcgmMonitor(node), 15.0, limit_s=30.0),
        Scheduled(DiskMonitor([storage, Path(tempfile.gettempdir())], node), 30.0, limit_s=60.0),
        Scheduled(ShmMonitor(node), 30.0),
        Scheduled(NicMonitor(node), 5.0),
        Scheduled(InfinibandMonitor(node), 5.0),
        Scheduled(ClockSkewMonitor(node), 60.0),
        Scheduled(DStateMonitor(node, rank_of_pid), 10.0),
    ]
    if health_lines is not None:
        found.append(Scheduled(HealthLinesMonitor(health_lines, node), 10.0))
    return found
