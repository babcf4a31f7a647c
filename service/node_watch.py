"""The nodes of a running attempt, looked at every few seconds by the supervisor.

    what the coordinator has to know of the cluster when it decides   -> tell_nodes
    a node of the attempt that Ray drains                              -> an incident, once: PREEMPTION
    room for the full layout again while a smaller one runs            -> the ranks save and leave
    nodes beyond those of the attempt, as many spares as are wanted    -> held for the run

A thread of its own: Ray's control store may be away for a while, and training does not notice. What cannot
be asked or told now is so at the next look.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from ops.checkpoint.layout import CHECKPOINTS_DIR, newest_committed_step
from ops.incident import FailureClass, Incident
from ops.node_book import NodeBook
from ops.quarantine import Fleet
from ops.signal import Entity, EntityKind
from ops.situation import decide_growth
from service.decisions import Nodes
from service.room import Place, Room, live_places
from service.run_store import last_step
from service.spare_nodes import SpareNodes

FREE_LIMIT_S = 2.0
LOOK_S = 2.0
N_LOOKS_BEFORE_GROWTH = 3
"""Nodes have to be there so many looks in a row: one that comes and goes is no room."""


class NodeWatch:
    """Watches for one attempt."""

    def __init__(
        self,
        coordinator: Any,
        room: Room,
        attempt: int,
        n_ranks: int,
        run_dir: Path,
        note: Callable[..., None],
    ) -> None:
        """Tells the coordinator what the cluster is now.

        Args:
            coordinator: handle of the actor.
            room: of the run.
            attempt: its number.
            n_ranks: of the attempt.
            run_dir: folder of the run.
            note: writes an event to the ledger.
        """
        self._coordinator = coordinator
        self._room = room
        self._attempt, self._n_ranks = attempt, n_ranks
        self._run_dir = run_dir
        self._note = note
        self._book = NodeBook(run_dir.parent)
        self._ranks_on: Counter[str] = Counter()
        """Ranks by Ray node id, once all of them are there."""
        self._spares = SpareNodes(room.spec, note)
        self._told: Nodes | None = None
        self._end = threading.Event()
        self._n_looks_with_room = 0
        self._is_growing = False
        self._committed_then = 0
        with contextlib.suppress(OSError):
            self._committed_then = newest_committed_step(run_dir / CHECKPOINTS_DIR) or 0
        self.draining: set[str] = set()
        """Addresses of the attempt's nodes of which Ray said that they go."""
        self.tell()

    def tell(self) -> Sequence[Place]:
        """Tell the coordinator what the cluster is now, where that is new; returns the live nodes."""
        have = live_places(self._room.spec.resources)
        nodes = self._room.nodes(have, self._ranks_on + self._spares.places)
        if nodes != self._told:
            self._told = nodes
            self._coordinator.tell_nodes.remote(nodes)
        return have

    def tell_when_free(self) -> None:
        """As tell, when the attempt is over and Ray counts its places as free, or after FREE_LIMIT_S.

        Ray moves the places that a run holds on a lost node to another, and gives them back a moment later.
        """
        deadline = time.monotonic() + FREE_LIMIT_S
        while time.monotonic() < deadline:
            room = self._room.nodes(
                live_places(self._room.spec.resources), self._ranks_on + self._spares.places
            )
            if sum(room.slots.values()) >= room.n_ranks:
                break
            time.sleep(0.1)
        self.tell()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look every few seconds for the length of a with-block."""
        thread = threading.Thread(target=self._run, name="node watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join(LOOK_S)

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            with contextlib.suppress(Exception):  # of Ray, or of the book's file system
                self._look()

    def _look(self) -> None:
        if not self._ranks_on:
            ranks = ray.get(self._coordinator.processes.remote())
            if len(ranks) == self._n_ranks:
                self._ranks_on = Counter(rank["node_id"] for rank in ranks.values())
        have = self.tell()
        if self._end.is_set():
            return  # Ray was slow to answer, and the attempt is over
        if self._ranks_on:
            self._report_drains(have)
            fleet = self._book.fleet()
            self._grow(have, fleet)
            if self._n_ranks == self._room.spec.world_size:
                self._spares.hold(have, self._ranks_on, fleet.out_of_service)

    def _report_drains(self, have: Sequence[Place]) -> None:
        leaving = {p.address for p in have if p.is_leaving and p.node_id in self._ranks_on}
        for address in sorted(leaving - self.draining):
            self.draining.add(address)
            now = time.time()
            incident = Incident(
                failure_class=FailureClass.PREEMPTION,
                culprit=f"node {address}",
                evidence=f"Ray drains node {address}",
                step=last_step(self._run_dir),
                failed_at=now,
                detected_at=now,
                entity=Entity(EntityKind.NODE, address),
                symptom="drain",
                detector="node_watch",
            )
            self._coordinator.report_finding.remote(incident)

    def _grow(self, have: Sequence[Place], fleet: Fleet) -> None:
        if self._is_growing or self._n_ranks >= self._room.spec.world_size:
            return
        newest = newest_committed_step(self._run_dir / CHECKPOINTS_DIR) or 0
        situation = self._room.growth(
            have, self._ranks_on, fleet, has_progressed=newest > self._committed_then
        )
        decision = decide_growth(self._n_ranks, situation)
        self._n_looks_with_room = self._n_looks_with_room + 1 if decision is not None else 0
        if decision is not None and self._n_looks_with_room >= N_LOOKS_BEFORE_GROWTH:
            self._is_growing = True
            self._note("growth", reason=decision.reason, n_ranks=situation.n_ranks)
            self._coordinator.renew.remote(self._attempt, decision)
