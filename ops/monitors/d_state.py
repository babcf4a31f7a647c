"""Ranks that are stuck in the kernel (state D): a dead mount or a hung driver, and no signal will end them.

A thread that only waits for its disk sleeps and wakes: its switches are counted by the kernel, so it is told
only where it never ran between the checks. Does not kill.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.monitors.tree import read_text, subfolders
from ops.signal import Entity, EntityKind, Signal


@dataclass(frozen=True)
class _Stuck:
    """A thread that has not run since."""

    since: float
    n_checks: int
    is_told: bool


@dataclass(frozen=True, order=True)
class _Thread:
    """One thread at one reading; equal at two readings: it did not run."""

    pid: int
    tid: int
    started_ticks: str
    n_switches: int


class DStateMonitor:
    """Watches every thread of some processes."""

    name = "d_state"

    def __init__(
        self,
        node: str,
        rank_of_pid: Callable[[], Mapping[int, int]],
        n_checks: int = 3,
        proc_root: Path = Path("/proc"),
    ) -> None:
        """Remember whom to watch.

        Args:
            node: address of this node.
            rank_of_pid: process id -> rank, of those that run here now.
            n_checks: told at the check that finds it unmoved for the n-th time in a row.
            proc_root: root of a /proc.
        """
        self._node = node
        self._rank_of_pid = rank_of_pid
        self._n_checks = n_checks
        self._proc_root = proc_root
        self._stuck: dict[_Thread, _Stuck] = {}

    def is_supported(self) -> bool:
        """There is a /proc."""
        return (self._proc_root / "self" / "stat").exists()

    def check(self, now: float) -> list[Signal]:
        """New d_state (seconds since it was first seen so) and d_state_cleared."""
        ranks = dict(self._rank_of_pid())
        in_d_state = {thread for pid in ranks for thread in self._threads_in_d_state(pid)}
        found = []
        for thread, stuck in self._stuck.items():
            if stuck.is_told and thread not in in_d_state:
                found.append(self._signal("d_state_cleared", thread, stuck, ranks.get(thread.pid), now))
        seen: dict[_Thread, _Stuck] = {}
        for thread in sorted(in_d_state):
            before = self._stuck.get(thread, _Stuck(now, 0, False))
            stuck = _Stuck(
                before.since, before.n_checks + 1, before.is_told or before.n_checks + 1 >= self._n_checks
            )
            if stuck.is_told and not before.is_told:
                found.append(self._signal("d_state", thread, stuck, ranks[thread.pid], now))
            seen[thread] = stuck
        self._stuck = seen
        return found

    def _threads_in_d_state(self, pid: int) -> list[_Thread]:
        found = []
        for folder in subfolders(self._proc_root / str(pid) / "task"):
            # The name in brackets may hold blanks and brackets.
            fields = (read_text(folder / "stat") or "").rpartition(")")[2].split()
            if len(fields) > 19 and fields[0] == "D":
                found.append(_Thread(pid, int(folder.name), fields[19], _switches(folder / "status")))
        return found

    def _signal(self, kind: str, thread: _Thread, stuck: _Stuck, rank: int | None, now: float) -> Signal:
        folder = self._proc_root / str(thread.pid) / "task" / str(thread.tid)
        stack = (read_text(folder / "stack") or "").replace("\n", " ")  # For root only.
        where = stack or read_text(folder / "wchan") or "unknown"
        entity = (
            Entity(EntityKind.NODE, self._node)
            if rank is None
            else Entity(EntityKind.RANK, str(rank), self._node)
        )
        text = f"process {thread.pid}, thread {thread.tid}: waits in the kernel at {where}"
        return Signal(now, self.name, kind, entity, now - stuck.since, text)


def _switches(status: Path) -> int:
    """Both kinds of context switches of a thread; 0 where the kernel does not say."""
    lines = (read_text(status) or "").splitlines()
    counts = (line.partition(":")[2].strip() for line in lines if "ctxt_switches:" in line)
    return sum(int(count) for count in counts if count.isdigit())
