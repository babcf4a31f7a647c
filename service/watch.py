"""What the coordinator knows of the ranks while they run: their newest boxes, and the signals of late.

    node agents --NodeReport, in intervals--> Watch --find_hang--> Hang | None
                                                     --signals-->   evidence, when ranks have died

Keeps values only: the coordinator acts. It learns from all generations of the run how long a phase takes.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ops.black_box import BoxReading
from ops.monitors.collective_hang import Hang, find_hang
from ops.monitors.heartbeat import Beat, PhaseTimes
from ops.signal import Signal
from service.monitor_runner import SwitchedOff

SIGNALS_WINDOW_S = 600.0
"""Older signals explain nothing that happens now."""
MAX_SIGNALS = 20_000
"""A flood pushes out the oldest."""
LOOK_EVERY_S = 1.0
REPORTS_A_SECOND = 200
"""That the coordinator takes without being busy with them: of more nodes, each reports less often."""
MAX_REPORT_INTERVAL_S = 10.0


def report_interval_s(n_nodes: int) -> float:
    """How often each of so many nodes reports: every second up to 200 nodes, every ten from 2,000 on."""
    return min(MAX_REPORT_INTERVAL_S, max(1.0, n_nodes / REPORTS_A_SECOND))


@dataclass(frozen=True)
class NodeReport:
    """What a node agent has seen since its last report."""

    attempt: int
    node: str
    """Address."""
    boxes: tuple[tuple[BoxReading, float], ...] = ()
    """Of the run's ranks on the node, with the time that each has been in its phase, seconds."""
    signals: tuple[Signal, ...] = ()
    switched_off: tuple[SwitchedOff, ...] = ()


@dataclass
class Watch:
    """The newest of every rank, and what has been seen lately. Mutable."""

    times: PhaseTimes = field(default_factory=PhaseTimes)
    reports_every_s: float = 1.0
    """Time between two reports of a node."""
    _beats: dict[int, Beat] = field(default_factory=dict)
    _signals: deque[Signal] = field(default_factory=lambda: deque(maxlen=MAX_SIGNALS))
    _looked_at: float = 0.0
    _heard_at: dict[str, float] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """Forget where the ranks of the attempt before were; what was learned and seen is kept."""
        self._beats.clear()
        self._heard_at.clear()

    def hear(self, report: NodeReport, stages: Mapping[int, int], now: float) -> None:
        """Take in a report.

        Args:
            report: of a node of the current attempt.
            stages: pipeline stage of each rank of the attempt; ranks that are not in it are not of it.
            now: the coordinator's wall clock, unix seconds: a node's own may be off.
        """
        self._heard_at[report.node] = now
        for box, age_s in report.boxes:
            rank = box.identity.rank
            if rank in stages and box.identity.attempt == report.attempt:
                self._beats[rank] = Beat(report.node, box, age_s, read_at=now, stage=stages[rank])
        self.add_signals(report.signals)

    def silent_nodes(self, now: float) -> frozenset[str]:
        """Addresses of nodes that reported in this attempt, and have missed a report (now: unix seconds)."""
        limit_s = 1.5 * self.reports_every_s
        return frozenset(node for node, at in self._heard_at.items() if now - at > limit_s)

    def add_signals(self, signals: Iterable[Signal]) -> None:
        """Keep them while they may explain something."""
        self._signals.extend(signals)

    def signals_since(self, since: float) -> list[Signal]:
        """Signals of the window, from an instant (unix seconds) on, in the order in which they came."""
        return [signal for signal in self._signals if signal.at >= since]

    def look(self, generation: tuple[int, int], n_ranks: int, now: float) -> Hang | None:
        """Whether these ranks hang: one look a second, however many reports come; None in between.

        Args:
            generation: attempt and generation that run now; older boxes say nothing of them.
            n_ranks: ranks of the generation.
            now: wall clock, unix seconds.
        """
        if 0.0 <= now - self._looked_at < LOOK_EVERY_S * 0.9:
            return None
        self._looked_at = now
        while self._signals and self._signals[0].at < now - SIGNALS_WINDOW_S:
            self._signals.popleft()
        beats = [beat for beat in self._beats.values() if _is_of(beat.box, generation)]
        self.times.observe(beats)
        return find_hang(beats, n_ranks, self.times, now, self.reports_every_s)


def _is_of(box: BoxReading, generation: tuple[int, int]) -> bool:
    return box.identity.generation == generation[1] and box.identity.attempt == generation[0]
