"""Ranks that train in simulated time and write real black boxes: to judge the detectors of hangs.

All ranks meet at the end of every step; between steps they save and evaluate now and then. A hang stops one
rank for good; the others go on as far as they can without it, and wait.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ops.black_box import BlackBox, BoxReading, Identity, Phase, PhaseSums, box_path, read_box
from ops.monitors.heartbeat import Beat

WALL_OFFSET = 1_700_000_000.0
"""Wall clock less monotonic clock of all simulated nodes."""
BOOT = "00000000-0000-0000-0000-000000000001"
Write = Callable[[BlackBox, float], None]


@dataclass(frozen=True)
class Habits:
    """How a simulated run behaves."""

    step_s: float = 1.0
    jitter_frac: float = 0.3
    """Largest addition to a rank's step, as a share; one step in fifty takes twice as long besides."""
    first_step_s: float = 120.0
    n_micro_batches: int = 4
    save_every: int = 40
    save_s: tuple[float, float] = (1.0, 90.0)
    evaluate_every: int = 100
    evaluate_s: float = 45.0
    tells_waiting: bool = True
    tells_micro_batches: bool = True


@dataclass
class SimulatedRanks:
    """Writes the boxes of one generation as time goes on."""

    folder: Path
    n_ranks: int
    habits: Habits
    seed: int
    attempt: int = 0
    began_at: float = 0.0
    hang_rank: int = -1
    hang_at: float = float("inf")
    """Simulated seconds: from here on hang_rank does nothing any more."""
    _boxes: list[BlackBox] = field(init=False)
    _queue: list[tuple[float, int, int, Write]] = field(init=False, default_factory=list)
    _count: int = field(init=False, default=0)
    _is_stuck: bool = field(init=False, default=False)
    _planned_until: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._boxes = [
            BlackBox(
                box_path(self.folder, rank),
                Identity(self.attempt, 0, rank, 1000 + rank, BOOT),
                self.began_at,
                WALL_OFFSET + self.began_at,
            )
            for rank in range(self.n_ranks)
        ]
        self._story = self._rounds()

    def run_until(self, now: float) -> None:
        """All writes up to `now`, in the order of time."""
        while self._planned_until <= now:
            self._planned_until = next(self._story, float("inf"))
        while self._queue and self._queue[0][0] <= now:
            at, _, rank, write = heapq.heappop(self._queue)
            write(self._boxes[rank], at)

    def look(self, now: float) -> list[Beat]:
        """What the node agents read of all ranks at `now`."""
        readings = [read_box(box_path(self.folder, rank)) for rank in range(self.n_ranks)]
        return [
            Beat(f"10.0.0.{1 + box.identity.rank}", box, box.age_s(now), read_at=WALL_OFFSET + now)
            for box in readings
        ]

    def close(self) -> None:
        """Unmap all boxes."""
        for box in self._boxes:
            box.close()

    def _put(self, at: float, rank: int, write: Write) -> bool:
        """Plan a write; False where the rank hangs before it."""
        if rank == self.hang_rank and at >= self.hang_at:
            self._is_stuck = True
            return False
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, rank, write))
        return True

    def _everybody(self, times: list[float], write: Write) -> bool:
        done = [self._put(at, rank, write) for rank, at in enumerate(times)]
        return all(done)

    def _rounds(self) -> Iterator[float]:
        """Plans one step after another, and says up to when; ends where somebody hangs."""
        habits = self.habits
        now = self.began_at
        for phase, stay_s in ((Phase.LOAD, 20.0), (Phase.STEP, 30.0)):
            times = [now + stay_s * self._random.uniform(1.0, 1.5) for _ in range(self.n_ranks)]
            if not self._everybody(times, _enter(phase)):
                return
            now = max(times)
        step = 0
        while True:
            step += 1
            yield now
            finished_at = self._plan_step(step, now)
            if finished_at is None:
                return
            now = finished_at
            if step % habits.save_every == 0:
                ends = [now + self._random.uniform(*habits.save_s) for _ in range(self.n_ranks)]
                begun = self._everybody([now + 0.01] * self.n_ranks, _enter(Phase.CHECKPOINT))
                if not begun or not self._everybody(ends, _enter(Phase.STEP)):
                    return
                now = max(ends)
            if step % habits.evaluate_every == 0:
                end = now + habits.evaluate_s * self._random.uniform(0.7, 1.5)
                begun = self._everybody([now + 0.01] * self.n_ranks, _enter(Phase.EVALUATE))
                if not begun or not self._everybody([end] * self.n_ranks, _enter(Phase.STEP)):
                    return
                now = end

    def _plan_step(self, step: int, now: float) -> float | None:
        """One step of all ranks: when it is finished; None where it never is."""
        habits, rand = self.habits, self._random
        base_s = habits.first_step_s if step == 1 else habits.step_s * (2.0 if rand.random() < 0.02 else 1.0)
        ends = [now + base_s * (1.0 + rand.random() * habits.jitter_frac) for _ in range(self.n_ranks)]
        for rank, end in enumerate(ends):
            for micro_batch in range(habits.n_micro_batches):
                at = now + (end - now) * (micro_batch + 0.05) / habits.n_micro_batches
                number = micro_batch + 1 if habits.tells_micro_batches else None
                waits = False if habits.tells_waiting else None
                self._put(at, rank, _mark(number, waits))
            if habits.tells_waiting:
                self._put(end, rank, _mark(None, True))
        last = max(ends) + 0.02
        if self._is_stuck or (self.hang_rank >= 0 and last >= self.hang_at):
            self._is_stuck = True
            return None
        self._everybody([last] * self.n_ranks, _finish(step))
        return last


def _enter(phase: Phase) -> Write:
    def write(box: BlackBox, at: float) -> None:
        box.enter(phase, at, WALL_OFFSET + at)

    return write


def _mark(micro_batch: int | None, waits: bool | None) -> Write:
    def write(box: BlackBox, at: float) -> None:
        box.mark(at, micro_batch=micro_batch, is_waiting=waits)

    return write


def _finish(step: int) -> Write:
    def write(box: BlackBox, at: float) -> None:
        box.finish_step(step, 1.0, 8 * step, at, WALL_OFFSET + at)

    return write


def box(rank=0, attempt=0, generation=0, phase=Phase.STEP, first_step_s=math.nan, **changed) -> BoxReading:
    """A record as it could be read; a step under way unless told otherwise."""
    reading = BoxReading(
        identity=Identity(attempt, generation, rank, 100 + rank, "boot"),
        sequence=1,
        phase=phase,
        entered_at_mono_s=0.0,
        entered_at=0.0,
        written_at_mono_s=0.0,
        step=5,
        micro_batch=-1,
        collective=-1,
        sample_ordinal=0,
        loss=1.0,
        has_ended=False,
        is_waiting=None,
        first_step_s=first_step_s,
        sums=(PhaseSums(),) * len(Phase),
    )
    return replace(reading, **changed)
