"""The one place of a run where incidents become decisions: what is known is gathered here, and written down.

    Incident --> Decider: history (the ledger), nodes (the supervisor), book of nodes, other runs' ledgers
             --> ops.policy.decide --> strikes into the book of nodes, `incident` into the ledger --> Decision

The coordinator has one, for all that happens while it lives; where it is lost, the supervisor makes one for
that. Either knows the history from the ledger. Carries nothing out.
"""

import contextlib
import time
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from jobs.spec.job import ResilienceSection
from ops.blame import SIGHTINGS_WINDOW_S, Sighting, is_clean_elsewhere, sighting_of
from ops.checkpoint.layout import CHECKPOINTS_DIR, newest_committed_step
from ops.decision import Action, Decision
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import LEDGER_DIR, LedgerWriter, read_ledger
from ops.node_book import NodeBook, NodeBookError, strikes_of
from ops.policy import decide
from ops.quarantine import Cluster
from ops.replay import History, Remembered, incident_fields, incident_of
from ops.situation import Situation
from service.run_store import iter_runs, steps_of_ranks

CARRIED_OUT = frozenset(Action)
"""What supervisor, coordinator and shells can carry out between them."""


@dataclass(frozen=True)
class Nodes:
    """What the supervisor knows of the cluster."""

    of_attempt: frozenset[str] = frozenset()
    """Addresses of the nodes that the attempt runs on."""
    slots: dict[str, int] = field(default_factory=dict)
    """Ranks that each live node can hold, by address."""
    n_ranks: int = 0
    """Of the layout that the spec asks for."""
    can_shrink_to: int = 1
    """The fewest ranks that a legal layout has."""
    n_nodes: int = 1
    """Nodes of the cluster, those that are gone just now included."""


class Decider:
    """Decides about the incidents of one run. One at a time writes: the coordinator while there is one."""

    def __init__(self, run_dir: Path, budgets: ResilienceSection, ledger: LedgerWriter) -> None:
        """Reads the run's ledger: what was decided before bears on what comes.

        Args:
            run_dir: folder of the run.
            budgets: limits per kind of restart, and the detectors that only observe.
            ledger: takes the `incident` events.
        """
        self._run_dir = run_dir
        self._budgets = budgets
        self._ledger = ledger
        self._book = NodeBook(run_dir.parent)
        self._history = History(read_ledger(run_dir))
        self.nodes = Nodes()
        """The newest that is known of the cluster; who knows newer sets it."""

    def decide(
        self,
        incident: Incident,
        *,
        shells_alive: bool,
        still_trains: bool = False,
        available: Set[Action] = CARRIED_OUT,
    ) -> Decision:
        """What is done about an incident; it is in the ledger, and its strikes in the book, on return.

        Whatever cannot be read or written is left out of account: ranks must never lack a verdict.

        Args:
            incident: what happened; its generation, where known, keeps it from being acted on twice.
            shells_alive: every worker shell of the attempt still answers.
            still_trains: the ranks go on; nothing has to be done at once.
            available: what can be carried out.
        """
        committed: int | None = None
        with contextlib.suppress(OSError):
            committed = newest_committed_step(self._run_dir / CHECKPOINTS_DIR)
        committed_step = committed or 0
        situation = self._situation(incident, still_trains=still_trains)
        decision = decide(
            incident,
            self._history.past(committed_step),
            self._budgets,
            shells_alive=shells_alive,
            available=available,
            situation=situation,
        )
        self._history.add(
            Remembered(incident, decision.action, committed_step, decision.at_checkpoint, decision.in_place)
        )
        fields = incident_fields(
            incident,
            decision,
            shells_alive=shells_alive,
            committed_step=committed_step,
            available=available,
            situation=situation,
        )
        if refused := self._strike(decision, incident):
            fields["strikes_refused"] = refused
        self._ledger.write("incident", **fields)
        return decision

    def _situation(self, incident: Incident, *, still_trains: bool) -> Situation:
        nodes, ranks = self.nodes, incident.generation
        return Situation(
            still_trains=still_trains,
            good_steps=steps_of_ranks(self._run_dir, *ranks) if ranks is not None else None,
            nodes=nodes.of_attempt,
            n_ranks=nodes.n_ranks,
            slots=nodes.slots,
            can_shrink_to=nodes.can_shrink_to,
            fleet=self._book.fleet_if_readable(),
            cluster=Cluster(max(nodes.n_nodes, len(nodes.of_attempt))),
            sightings=self._sightings(incident),
            run=self._run_dir.name,
            observing=frozenset(self._budgets.observe),
            is_clean_elsewhere=self._is_clean_elsewhere(incident),
        )

    def _is_clean_elsewhere(self, incident: Incident) -> bool | None:
        """What a replay of the failed step has shown; only what is not finite asks for it."""
        if incident.failure_class is not FailureClass.NUMERICS:
            return None
        return is_clean_elsewhere(read_ledger(self._run_dir), incident.step, self.nodes.of_attempt)

    def _sightings(self, incident: Incident) -> tuple[Sighting, ...]:
        """Ambiguous faults of the storage's other runs within a week; only an ambiguous one asks for them."""
        if incident.nature is not Nature.AMBIGUOUS:
            return ()
        found: list[Sighting] = []
        since = time.time() - SIGHTINGS_WINDOW_S
        for run_dir in iter_runs(self._run_dir.parent):
            if run_dir != self._run_dir:
                found += _ambiguous_faults(run_dir, since)
        return tuple(found)

    def _strike(self, decision: Decision, incident: Incident) -> list[str]:
        """Write the decision's strikes into the book; what the breaker refused."""
        strikes = strikes_of(decision, incident, self._run_dir.name, len(self.nodes.of_attempt))
        if not strikes:
            return []
        try:
            return self._book.strike(strikes, Cluster(self.nodes.n_nodes))[1]
        except (NodeBookError, OSError) as error:
            return [str(error)]


def _ambiguous_faults(run_dir: Path, since: float) -> list[Sighting]:
    """Those in the ledger of a run whose coordinator wrote to it after `since` (unix seconds)."""
    ledger = run_dir / LEDGER_DIR / "coordinator.jsonl"
    with contextlib.suppress(OSError):
        if ledger.stat().st_mtime < since or b'"nature":"ambiguous"' not in ledger.read_bytes():
            return []
    incidents = [incident for event in read_ledger(run_dir) if (incident := incident_of(event)) is not None]
    sightings = [sighting_of(incident, run_dir.name) for incident in incidents]
    return [one for one in sightings if one is not None]
