"""Rollbacks of a run carried out: between two sets of ranks, while nobody reads or writes checkpoints.

Decided by service/decisions.py; where the run goes back to is ops/rollback.py's. What was decided by a driver
that has died since is carried out by the next one: it is in the ledger.
"""

from pathlib import Path

from jobs.errors import CheckpointError
from ops.checkpoint.layout import CHECKPOINTS_DIR, committed_steps, folder_name
from ops.checkpoint.manifest import read_manifest
from ops.checkpoint.set_aside import SET_ASIDE_DIR, set_aside
from ops.decision import Decision
from ops.durable import describe_os_error
from ops.incident import Incident
from ops.ledger import LedgerWriter, read_ledger
from ops.rollback import ROLLED_BACK, due_rollback, merged, plan_rollback, skipped_so_far, still_due
from service.orders import StartPoint
from service.run_store import next_sample


class GoingBack:
    """What a run still has to go back for, and what it passes over."""

    def __init__(self, run_dir: Path, ledger: LedgerWriter) -> None:
        """Reads the run's ledger.

        Args:
            run_dir: folder of the run.
            ledger: takes the `rolled_back` events.
        """
        self._run_dir = run_dir
        self._ledger = ledger
        events = read_ledger(run_dir)
        self._due = still_due(events)
        self._skipped = skipped_so_far(events)

    def expect(self, incident: Incident, decision: Decision) -> None:
        """Remember what a decision asks for; one that is no rollback changes nothing."""
        self._due = due_rollback(incident, decision) or self._due

    def start_point(self, attempt: int, generation: int) -> StartPoint:
        """Carry out what is due, and say where these ranks begin. Call while no rank lives.

        A checkpoint that cannot be moved away is still not restored by these ranks.
        """
        due, self._due = self._due, None
        if due is None:
            return StartPoint(None, self._skipped)
        folder = self._run_dir / CHECKPOINTS_DIR
        error = ""
        committed: list[int] = []
        try:
            committed = committed_steps(folder)
        except OSError as failure:
            error = describe_os_error(failure)
        plan = plan_rollback(due, committed, self._ordinal_at, next_sample(self._run_dir))
        moved: list[Path] = []
        try:
            moved = set_aside(folder, plan.set_aside)
        except OSError as failure:
            error = f"into {SET_ASIDE_DIR}: {describe_os_error(failure)}"
        if error:
            self._due = due  # for the next ranks as well: what could not be moved is still not to be trusted
        self._skipped = merged([*self._skipped, *plan.skipped])
        self._ledger.write(
            ROLLED_BACK,
            attempt=attempt,
            generation=generation,
            step=plan.restore_before,
            skip_samples=[list(range_) for range_ in plan.skipped],
            set_aside=[str(path) for path in moved],
            error=error,
        )
        return StartPoint(plan.restore_before, self._skipped)

    def _ordinal_at(self, step: int) -> int | None:
        try:
            return read_manifest(self._run_dir / CHECKPOINTS_DIR / folder_name(step)).progress.sample_ordinal
        except (CheckpointError, OSError):
            return None
