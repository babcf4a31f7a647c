"""One reader of a run folder for all that look at a run again and again: metrics, messages, MLflow's summary.

Reads what is new, and keeps what the figures need of the rest. What needs a look at the whole run (time by
phase, ETTR, bills) takes longer with every step: a tenth of the time at most goes into it, so after a million
steps it may be minutes old, while all else is as new as the files. Never touches the run.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from ops.ledger import METRICS_FILE, Event, LedgerTail, Tail
from ops.metric_values import Accounted, RunFacts, StepTotals, account_run, run_samples, slim_line
from ops.metrics import Samples
from ops.node_book import NodeBook
from service.run_store import RUNNING, RunState, read_state

BUSY_FRAC = 0.1
"""Largest share of the time that may go into looks at the whole run."""


class RunFollower:
    """Follows one run. Safe between threads: one looks, the others wait."""

    def __init__(self, run_dir: Path) -> None:
        """Reads nothing yet.

        Args:
            run_dir: the run's folder.
        """
        self._dir = run_dir
        self._lock = threading.Lock()
        self._ledger = LedgerTail(run_dir)
        self._metrics = Tail(run_dir / METRICS_FILE)
        self._events: list[Event] = []
        self._lines: list[dict[str, Any]] = []
        self._totals = StepTotals()
        self._state: RunState | None = None
        self._accounted: Accounted | None = None
        self._account_after = 0.0
        """Monotonic seconds before which the whole run is not looked at again."""

    def samples(self, now: float) -> Samples:
        """The metrics of the run at `now` (Unix seconds).

        Raises:
            SpecError: there is no such run.
        """
        with self._lock:
            facts = self._look(now)
            accounted = self._account(facts)
            changes = NodeBook(self._dir.parent).changes()
            return run_samples(facts, self._events, self._totals, accounted, changes)

    def accounted(self, now: float) -> Accounted:
        """What a look at the whole run tells: goodput, lost steps, bills; may be older than `now`.

        Raises:
            SpecError: there is no such run.
        """
        with self._lock:
            return self._account(self._look(now))

    def _look(self, now: float) -> RunFacts:
        while events := self._ledger.read():
            self._events += events
        while lines := self._metrics.read():
            for line in lines:
                self._totals.feed(line)
                self._lines.append(slim_line(line))
        try:
            self._state = read_state(self._dir)
        except SpecError:
            if self._state is None:
                raise
        return RunFacts(
            run_id=self._state.run_id,
            status=self._state.current_status(self._dir),
            spec=_read_spec(self._dir),
            now=now,
            is_driver_alive=self._state.status == RUNNING and self._state.is_driver_alive(self._dir),
        )

    def _account(self, facts: RunFacts) -> Accounted:
        began = time.monotonic()
        if self._accounted is None or began >= self._account_after:
            self._accounted = account_run(facts, self._events, self._lines)
            ended = time.monotonic()
            self._account_after = ended + (ended - began) * (1 / BUSY_FRAC - 1)
        return self._accounted


def _read_spec(run_dir: Path) -> dict[str, Any]:
    try:
        spec = json.loads((run_dir / "spec.json").read_text())
    except (OSError, ValueError):
        return {}
    return spec if isinstance(spec, dict) else {}
