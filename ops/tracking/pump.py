"""From the run folder to a tracking server: what is new, in small portions, with a cursor on disk.

One portion: read new lines -> points -> send -> keep the cursor. Whatever fails in between is sent again, and
sending twice leaves one (the server knows a point by name, step, instant and value). Has no thread and no
clock: the caller decides when, and how long to wait after an error.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ops.ledger import METRICS_FILE, LedgerTail, Tail
from ops.losses import IncidentBill
from ops.notify import awaits_cost
from ops.tracking.base import Point, TrackingRefusedError
from ops.tracking.cursor import Cursor, load_cursor, save_cursor
from ops.tracking.mlflow import MlflowTracker, shown_uri
from ops.tracking.points import points_of_event, points_of_lines

STATE_FILE = Path("tracking") / "mlflow.json"
"""The cursor's file in the run folder."""
INCIDENTS_FILE = Path("tracking") / "incidents.json"
"""The table of a run's incidents, in the run folder and, by its name alone, among the run's artifacts."""
PORTION_BYTES = 64_000
"""Of metrics.jsonl in one portion: some hundred lines, a few batches."""


class MlflowPump:
    """Sends one run to one MLflow server."""

    def __init__(self, run_dir: Path, uri: str, experiment: str, log_every_steps: int = 1) -> None:
        """Reads the cursor; contacts nobody."""
        self._dir = run_dir
        self._path = run_dir / STATE_FILE
        self._log_every_steps = log_every_steps
        self.cursor = load_cursor(self._path, shown_uri(uri))
        self.tracker = MlflowTracker(uri, experiment, self.cursor.run_uid)
        self._is_open = False
        self._billed: set[tuple[float, str]] = set()

    @property
    def is_open(self) -> bool:
        """The server knows the run, and this pump knows its id."""
        return self._is_open

    def open(
        self,
        run_name: str,
        started_at: float,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        *,
        goes_on: bool,
    ) -> dict[str, str]:
        """Find or make the MLflow run; nothing where it is open.

        A parameter or tag that the server refuses costs itself only: the figures come after it.

        Args:
            run_name: name for people.
            started_at: Unix seconds.
            params: names and texts, any number.
            tags: names and texts.
            goes_on: the run is driven: mark it as running again. False only adds to what is there.

        Returns:
            Parameters and tags that were refused, with the server's reason.

        Raises:
            TrackingUnavailableError, TrackingRefusedError
        """
        if self._is_open:
            return {}
        self._keep(self.cursor)  # the uid must be on disk before a run can carry it
        run_id = self.tracker.open(self.cursor.mlflow_run_id, run_name, started_at)
        settled = None if goes_on else self.cursor.settled_status
        self._keep(replace(self.cursor, mlflow_run_id=run_id, settled_status=settled))
        if goes_on:
            self.tracker.mark_running()
        refused = self.tracker.describe(params, tags)
        self._is_open = True
        return refused

    def send_portion(self) -> int:
        """Send the next portion; returns how many lines and events it held, 0 when all has been sent.

        Raises:
            TrackingUnavailableError: nothing is lost; call again later.
        """
        cursor = self.cursor
        tail = Tail(self._dir / METRICS_FILE, cursor.metrics_offset_bytes)
        ledger = LedgerTail(self._dir, cursor.ledger_offsets_bytes)
        lines, events = tail.read(PORTION_BYTES), ledger.read()
        points, counts = points_of_lines(lines, cursor.counts, self._log_every_steps)
        for event in events:
            more, counts = points_of_event(event, counts)
            points += more
        n_refused = cursor.n_refused + self._send(points)
        for event in events:
            try:
                self.tracker.log_event(event)
            except TrackingRefusedError:
                n_refused += 1
        moved = replace(
            cursor,
            metrics_offset_bytes=tail.offset_bytes,
            ledger_offsets_bytes=ledger.offsets_bytes,
            counts=counts,
            n_refused=n_refused,
            mapped_names={**cursor.mapped_names, **self.tracker.mapped_names},
        )
        if moved != cursor:
            self._keep(moved)
        return len(lines) + len(events)

    def send_samples(self, figures: Mapping[str, float], at: float) -> None:
        """Send figures of one moment (driver's node, goodput); their step is the number of samples before."""
        n = self.cursor.n_system_samples
        self._send([Point(name, value, n, at) for name, value in figures.items()])
        self._keep(replace(self.cursor, n_system_samples=n + 1))

    def send_bills(self, bills: Sequence[IncidentBill]) -> None:
        """Put what each incident cost into its tag, once it is known; each is sent once by this pump."""
        for bill in bills:
            key = (bill.event.at, bill.event.writer)
            if key not in self._billed and (bill.restart_s > 0 or not awaits_cost(bill.event)):
                with contextlib.suppress(TrackingRefusedError):
                    self.tracker.log_bill(bill)
                self._billed.add(key)

    def finish(self, status: str, at: float, artifacts: Sequence[Path]) -> None:
        """End the MLflow run, then send the files that exist.

        Raises:
            TrackingUnavailableError, TrackingRefusedError
        """
        self.tracker.finish(status, at)
        for path in artifacts:
            if path.is_file():
                self.tracker.log_artifact(path)
            if path.name == INCIDENTS_FILE.name and path.is_file():
                with contextlib.suppress(TrackingRefusedError):
                    self.tracker.name_table(path.name)
        self._keep(replace(self.cursor, settled_status=status))

    def unsent_lines(self) -> int:
        """Lines of metrics.jsonl after the cursor."""
        try:
            with (self._dir / METRICS_FILE).open("rb") as file:
                file.seek(self.cursor.metrics_offset_bytes)
                return file.read().count(b"\n")
        except OSError:
            return 0

    def _send(self, points: Sequence[Point]) -> int:
        """Send points; where the server refuses some, halve until only those are left out, and count them."""
        if not points:
            return 0
        try:
            self.tracker.log_metrics(points)
        except TrackingRefusedError:
            if len(points) == 1:
                return 1
            half = len(points) // 2
            return self._send(points[:half]) + self._send(points[half:])
        return 0

    def _keep(self, cursor: Cursor) -> None:
        """Move the cursor, in memory whatever the disk says: at worst the next driver sends points again."""
        self.cursor = cursor
        try:
            save_cursor(self._path, cursor)
        except OSError:
            return
