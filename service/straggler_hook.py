"""Stragglers in a run: each rank's pure compute times over a window of steps, judged by rank 0 in a thread.

    every rank, each step       passes and pauses of the step (jobs/compute_clock.py), the wait for its batch
    every rank, each window     a sample of them -> board
    rank 0, after a later step  board -> ops.monitors.straggler -> told when two windows in a row agree

One window proves nothing: a neighbour on the same core is gone in the next.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jobs.compute_clock import PassKind
from jobs.engines.base import Engine
from jobs.events import EvalRecord, Progress, StepRecord
from jobs.mesh import Mesh
from ops.findings import Finding, of_straggler
from ops.monitors.straggler import Cause, Pass, Pause, Straggler, find_stragglers
from service.board import Board

TOPIC = "passes"
MAX_PASSES = 50_000
"""Of all ranks in one window; with more, fewer steps and micro-batches of the window are looked at."""
TRUSTED = 0.5
"""Findings of less confidence are not told."""
SHORT_PAUSE_S = 0.010
"""In one step; a pause below is the turn of another process on the same core, and counts as none."""
_KINDS: tuple[PassKind, PassKind] = ("forward", "backward")

StepTimes = tuple[int, list[tuple[int, int, int, float]], float, float]
"""Step; (kind, stage, micro-batch, seconds) of each pass; seconds of waiting for data, measured as passes
are; of the collector."""


class StragglerHook:
    """Every rank measures and posts; rank 0 judges."""

    def __init__(
        self, board: Board, mesh: Mesh, rank: int, window_steps: int, tell: Callable[[Finding], None]
    ) -> None:
        """Local.

        Args:
            board: this rank's.
            mesh: the layout.
            rank: this one.
            window_steps: times are judged so many steps at a time.
            tell: takes what is found, on rank 0, from another thread.
        """
        self._board, self._mesh, self._rank, self._window_steps = board, mesh, rank, window_steps
        self._judge = StragglerJudge(mesh, tell)
        self._steps: list[StepTimes] = []
        self._due: list[int] = []

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Times are taken from the second step on: the first builds kernels."""
        self._clock = engine.clock

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Keep the step's times; at the end of a window post them."""
        clock = self._clock
        if not clock.is_on:
            clock.switch(on=True)
            return
        pause_s = clock.pause_s
        sums: dict[tuple[int, int, int], float] = {}
        for one in clock.take():
            place = (_KINDS.index(one.kind), one.stage, one.micro_batch)
            sums[place] = sums.get(place, 0.0) + one.compute_s
        # A wait is of the wall clock, and passes are not: it counts by its share of the step.
        waited_s = counted(record.data_time_s) / record.step_time_s * sum(sums.values())
        self._steps.append(
            (record.step, [(*place, s) for place, s in sums.items()], waited_s, counted(pause_s))
        )
        if record.step % self._window_steps == 0:
            kept = thinned(self._steps, MAX_PASSES // self._mesh.world_size)
            self._board.post(TOPIC, record.step, kept)
            self._steps.clear()
            if self._rank == 0:
                self._due.append(record.step)
        if self._due:
            self._collect(self._due[0])

    def after_evaluate(self, record: EvalRecord) -> None:
        """Passes of an evaluation are none of the next step."""
        self._clock.take()

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """No more times."""
        self._clock.switch(on=False)

    def _collect(self, step: int) -> None:
        posted = self._board.collect(TOPIC, step)
        if posted is not None:
            self._due.remove(step)
            threading.Thread(
                target=self._judge.judge, args=(step, posted), name="stragglers", daemon=True
            ).start()


def counted(pause_s: float) -> float:
    """A pause as it is judged."""
    return pause_s if pause_s >= SHORT_PAUSE_S else 0.0


class StragglerJudge:
    """From all ranks' times to what is told. Keeps what the last window showed."""

    def __init__(self, mesh: Mesh, tell: Callable[[Finding], None]) -> None:
        """Local.

        Args:
            mesh: the layout.
            tell: takes each finding once.
        """
        self._mesh, self._tell = mesh, tell
        self._before: set[Any] = set()
        self._told: set[Any] = set()

    def judge(self, step: int, posted: Sequence[Sequence[StepTimes]]) -> None:
        """One window.

        Args:
            step: its last.
            posted: what each rank kept of it, in rank order.
        """
        found = {
            _identity(one): one
            for one in find_stragglers(*times_of(posted, self._mesh))
            if one.confidence >= TRUSTED
        }
        for identity in (found.keys() & self._before) - self._told:
            self._tell(of_straggler(found[identity], step, time.time()))
            self._told.add(identity)
        self._before = set(found)


def thinned(steps: Sequence[StepTimes], n_kept: int) -> list[StepTimes]:
    """At most about so many passes: fewer micro-batches first, then fewer steps, evenly; never none.

    Micro-batches are the first ones, and the same on every rank: they are compared.
    """
    if not steps:
        return []
    n_batches = 1 + max((mb for _, passes, _, _ in steps for _, _, mb, _ in passes), default=0)
    per_batch = max(1, max(len(passes) for _, passes, _, _ in steps) // n_batches)
    n_steps = max(1, min(len(steps), n_kept // per_batch))
    n_batches = max(1, min(n_batches, n_kept // (per_batch * n_steps)))
    chosen = [steps[number * len(steps) // n_steps] for number in range(n_steps)]
    return [
        (
            step,
            [(kind, stage, mb, round(s, 7)) for kind, stage, mb, s in passes if mb < n_batches],
            data_s,
            pause_s,
        )
        for step, passes, data_s, pause_s in chosen
    ]


def times_of(posted: Sequence[Sequence[StepTimes]], mesh: Mesh) -> tuple[list[Pass], list[Pause]]:
    """What find_stragglers takes.

    Args:
        posted: of each rank in order.
        mesh: says which ranks see the same micro-batches.
    """
    passes: list[Pass] = []
    pauses: list[Pause] = []
    for rank, steps in enumerate(posted):
        replica = mesh.coordinates(rank)["dp"]
        for step, measured, data_s, pause_s in steps:
            for kind, stage, micro_batch, compute_s in measured:
                passes.append(Pass(step, rank, replica, stage, micro_batch, _KINDS[kind], compute_s))
            pauses.append(Pause(step, rank, "data", data_s))
            pauses.append(Pause(step, rank, "garbage_collection", pause_s))
    return passes, pauses


def _identity(found: Straggler) -> tuple[Cause, tuple[int, ...], int | None]:
    return found.cause, found.ranks, found.stage
