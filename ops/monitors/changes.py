"""Memory of a monitor: by how much a counter rose, whether a state turned, how often in a window.

So each monitor tells a change and not the standing value. Reads nothing, makes no signals.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counters that only rise, each known by a key."""

    last: dict[Hashable, float] = field(default_factory=dict)

    def rise(self, key: Hashable, value: float) -> float:
        """By how much it rose since the last reading; 0 for the first one.

        A counter that fell was set back (driver reloaded, machine restarted): what it shows now is new.
        """
        before = self.last.get(key)
        self.last[key] = value
        if before is None:
            return 0.0
        return value if value < before else value - before


@dataclass
class States:
    """Things that are in order or not, each known by a key."""

    last: dict[Hashable, bool] = field(default_factory=dict)

    def is_bad(self, key: Hashable) -> bool:
        """How it was at the last reading."""
        return self.last.get(key, False)

    def turned(self, key: Hashable, is_bad: bool, first_counts: bool = True) -> bool | None:
        """True where it went bad, False where it is in order again, None where nothing changed.

        Args:
            key: what.
            is_bad: how it is now.
            first_counts: bad at the first reading is told too. Without it what was bad before we came (a port
                without a cable) stays untold until it was in order once.
        """
        before = self.last.get(key)
        self.last[key] = is_bad
        if before is None:
            return True if is_bad and first_counts else None
        return is_bad if is_bad != before else None


@dataclass
class Flaps:
    """How often each thing went down within a window."""

    window_s: float = 300.0
    limit: int = 2
    """That many within the window is flapping; one flap is tolerated."""
    seen: dict[Hashable, deque[float]] = field(default_factory=dict)

    def went_down(self, key: Hashable, n_times: int, now: float) -> int:
        """Note it. Returns how often within the window where that is flapping, else 0.

        What made it flapping is then forgotten: the next one is told after as many again.
        """
        times = self.seen.setdefault(key, deque())
        times.extend([now] * n_times)
        while times and times[0] < now - self.window_s:
            times.popleft()
        if len(times) < self.limit:
            return 0
        n_seen = len(times)
        times.clear()
        return n_seen
