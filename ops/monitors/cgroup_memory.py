"""Memory of the ranks' control groups: kills by the out-of-memory killer, limits hit; version 2 and 1.

A kill by SIGKILL leaves nothing else behind. Which process was killed stands in the kernel's log, not here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.monitors.changes import Counters, States
from ops.monitors.tree import read_int, read_keyed_ints, read_text
from ops.signal import Entity, EntityKind, Signal

NO_LIMIT_BYTES = 1 << 60
"""Version 1 shows "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class _Group:
    """One control group with its memory controller."""

    folder: Path
    is_v2: bool


class CgroupMemoryMonitor:
    """Watches the control groups that the ranks, and this process, are in."""

    name = "cgroup_memory"

    def __init__(
        self,
        node: str,
        rank_of_pid: Callable[[], Mapping[int, int]],
        proc_root: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        high_frac: float = 0.95,
    ) -> None:
        """Remember whom to watch.

        Args:
            node: address of this node.
            rank_of_pid: process id -> rank, of those that run here now. Their groups stay watched.
            proc_root: root of a /proc.
            cgroup_root: where control groups are mounted.
            high_frac: told when memory that cannot be given back exceeds this share of the limit.
        """
        self._node = node
        self._rank_of_pid = rank_of_pid
        self._proc_root = proc_root
        self._cgroup_root = cgroup_root
        self._high_frac = high_frac
        self._ranks: dict[_Group, set[int]] = {}
        self._counters = Counters()
        self._states = States()

    def is_supported(self) -> bool:
        """This process is in a group whose kills are counted, or the machine counts them."""
        group = self._group_of("self")
        return (group is not None and _n_kills(group) is not None) or "oom_kill" in self._vmstat()

    def check(self, now: float) -> list[Signal]:
        """New oom_kill, host_oom_kill (how many); memory_limit_hit, memory_high (or these with _cleared)."""
        own = self._group_of("self")
        if own is not None:
            self._ranks.setdefault(own, set())
        for pid, rank in self._rank_of_pid().items():
            group = self._group_of(str(pid))
            if group is not None:
                self._ranks.setdefault(group, set()).add(rank)
        found = [
            signal for group, ranks in self._ranks.items() for signal in self._check_group(group, ranks, now)
        ]
        n_host_kills = self._counters.rise("vmstat", self._vmstat().get("oom_kill", 0))
        if n_host_kills:
            # Of the whole machine, so perhaps in somebody else's container.
            text = f"oom_kill of /proc/vmstat rose by {n_host_kills:.0f}"
            node = Entity(EntityKind.NODE, self._node)
            found.append(Signal(now, self.name, "host_oom_kill", node, n_host_kills, text))
        return found

    def _check_group(self, group: _Group, ranks: set[int], now: float) -> list[Signal]:
        is_of_one = len(ranks) == 1
        entity = (
            Entity(EntityKind.RANK, str(min(ranks)), self._node)
            if is_of_one
            else Entity(EntityKind.NODE, self._node)
        )
        found = []
        n_kills = _n_kills(group)
        n_new = 0.0 if n_kills is None else self._counters.rise((group, "oom_kill"), n_kills)
        if n_new:
            text = f"{group.folder}: oom_kill rose by {n_new:.0f} to {n_kills}"
            found.append(Signal(now, self.name, "oom_kill", entity, n_new, text))
        n_hits = _n_limit_hits(group)
        n_new_hits = 0.0 if n_hits is None else self._counters.rise((group, "limit"), n_hits)
        used_bytes, limit_bytes = _used_bytes(group), _limit_bytes(group)
        # Once high, it has to fall a little further to be taken as in order again.
        high_frac = self._high_frac - (0.05 if self._states.is_bad((group, "memory_high")) else 0.0)
        is_high = used_bytes is not None and limit_bytes is not None and used_bytes > high_frac * limit_bytes
        readings = (
            # The page cache hits the limit all the time and gives way: an episode is told, not each hit.
            ("memory_limit_hit", n_new_hits > 0, n_new_hits, f"the limit was hit {n_new_hits:.0f} times"),
            ("memory_high", is_high, used_bytes, f"{used_bytes} of {limit_bytes} bytes are used"),
        )
        for kind, is_bad, value, text in readings:
            turned = self._states.turned((group, kind), is_bad)
            if turned is not None:
                told = kind if turned else f"{kind}_cleared"
                found.append(Signal(now, self.name, told, entity, value, f"{group.folder}: {text}"))
        return found

    def _group_of(self, pid: str) -> _Group | None:
        lines = (read_text(self._proc_root / pid / "cgroup") or "").splitlines()
        unified = None
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if "memory" in controllers.split(","):
                return self._existing(self._cgroup_root / "memory", path, is_v2=False)
            if not controllers:
                unified = path
        return None if unified is None else self._existing(self._cgroup_root, unified, is_v2=True)

    def _existing(self, mount: Path, path: str, is_v2: bool) -> _Group | None:
        """In a container the path may be the host's while the group is mounted as the root."""
        for folder in (mount / path.strip("/"), mount):
            group = _Group(folder, is_v2)
            if ".." not in folder.parts and _n_kills(group) is not None:
                return group
        return None

    def _vmstat(self) -> dict[str, int]:
        return read_keyed_ints(self._proc_root / "vmstat")


def _n_kills(group: _Group) -> int | None:
    # Of this group and those below it: also of a group that a rank made for itself.
    file = "memory.events" if group.is_v2 else "memory.oom_control"
    return read_keyed_ints(group.folder / file).get("oom_kill")


def _n_limit_hits(group: _Group) -> int | None:
    if group.is_v2:
        return read_keyed_ints(group.folder / "memory.events").get("max")
    return read_int(group.folder / "memory.failcnt")


def _limit_bytes(group: _Group) -> int | None:
    limit_bytes = read_int(group.folder / ("memory.max" if group.is_v2 else "memory.limit_in_bytes"))
    return None if limit_bytes is None or limit_bytes > NO_LIMIT_BYTES else limit_bytes


def _used_bytes(group: _Group) -> int | None:
    """Without the page cache that is not in use, which the kernel takes back first."""
    used_bytes = read_int(group.folder / ("memory.current" if group.is_v2 else "memory.usage_in_bytes"))
    if used_bytes is None:
        return None
    stat = read_keyed_ints(group.folder / "memory.stat")
    return used_bytes - stat.get("inactive_file" if group.is_v2 else "total_inactive_file", 0)
