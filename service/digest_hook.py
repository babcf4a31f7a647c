"""Silent corruption in a run: replicas' digests every n steps, compared by rank 0 a moment later.

    every rank, after step n, 2n, ...   digests of its parameters -> board
    rank 0, after a later step          board -> vote -> finding; `digests` into the ledger, for a replay

No collective: a rank that is late holds up nobody.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jobs.comm.replicas import replica_digests
from jobs.engines.base import Engine
from jobs.events import EvalRecord, Progress, StepRecord
from jobs.mesh import Mesh
from ops.findings import Finding, of_digests
from ops.monitors.replica_digest import DigestVerdict, vote
from service.board import Board

TOPIC = "digests"
DIGESTS = "digests"
"""Kind of the ledger's event."""


class DigestHook:
    """Every rank posts; rank 0 compares."""

    def __init__(
        self,
        board: Board,
        mesh: Mesh,
        rank: int,
        every_steps: int,
        tell: Callable[[Finding], None],
        record: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Local.

        Args:
            board: this rank's.
            mesh: the layout.
            rank: this one.
            every_steps: digests are taken after each multiple.
            tell: takes what is found, on rank 0.
            record: takes ledger events, on rank 0.
        """
        self._board, self._mesh, self._rank, self._every_steps = board, mesh, rank, every_steps
        self._tell, self._record = tell, record
        self._is_first = rank == 0
        self._due: list[int] = []
        self._good_step = 0
        self._told: set[tuple[int, ...]] = set()

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """What was restored is equal on all replicas."""
        self._good_step = progress.step

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Post where it is due; on rank 0 compare what has come."""
        if record.step % self._every_steps == 0:
            weights = dict(engine.model.named_parameters())
            self._board.post(
                TOPIC, record.step, replica_digests(engine.chunks(), weights, self._mesh, self._rank)
            )
            if self._is_first:
                self._due.append(record.step)
        self._compare()

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing."""

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Compare what has come since."""
        self._compare()

    def _compare(self) -> None:
        for step in tuple(self._due):
            posted = self._board.collect(TOPIC, step)
            if posted is None:
                return
            self._due.remove(step)
            verdicts = votes(step, posted)
            self._record(DIGESTS, {"step": step, "digests": common_digests(posted)})
            if not verdicts:
                self._good_step = step
            for verdict in verdicts:
                self._find(verdict)

    def _find(self, verdict: DigestVerdict) -> None:
        who = verdict.odd_ranks or verdict.suspects
        if who in self._told:
            return
        self._told.add(who)
        for finding in of_digests(verdict, self._good_step, time.time()):
            self._tell(finding)


def votes(step: int, posted: list[dict[str, list[int]]]) -> list[DigestVerdict]:
    """The verdicts about all keys that two ranks or more have; empty where all replicas are equal.

    Args:
        step: completed steps when the digests were taken.
        posted: of each rank in order, digests by key.
    """
    by_key: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for rank, digests in enumerate(posted):
        for key, values in digests.items():
            by_key[key][rank] = values
    found = (vote(step, of_ranks) for of_ranks in by_key.values() if len(of_ranks) > 1)
    return [verdict for verdict in found if verdict is not None]


def common_digests(posted: list[dict[str, list[int]]]) -> dict[str, list[list[int]]]:
    """Each key's digests, every variant once, the one that most ranks have first."""
    counts: dict[str, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
    for digests in posted:
        for key, values in digests.items():
            counts[key][tuple(values)] += 1
    return {
        key: [list(values) for values, _ in sorted(of.items(), key=lambda item: -item[1])]
        for key, of in counts.items()
    }
