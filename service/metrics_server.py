"""`packtrain metrics`: a run's figures over HTTP for Prometheus, from its folder alone.

Works while the run lives and after it, on any node that sees the storage, and never touches the run: it reads
files. Figures are worked out in a thread of their own, so that a scrape is answered at once. What needs a
look at the whole run (time by phase, ETTR, bills) takes longer with every step: a tenth of the thread's time
at most, so after a million steps it may be minutes old, while all else is seconds old. Listens on loopback
unless told otherwise. What the metrics are is in ops/metrics.py.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from jobs.errors import PacktrainError, SpecError
from ops.ledger import METRICS_FILE, Event, LedgerTail, Tail
from ops.metric_values import Accounted, RunFacts, StepTotals, account_run, run_samples, slim_line
from ops.metrics import Samples, SamplesCollector, render
from ops.node_book import NodeBook
from service.run_store import RUNNING, RunState, read_state

REFRESH_S = 5.0
"""Shortest time between two workings-out."""
BUSY_FRAC = 0.1
"""Largest share of its time that the thread may spend on looks at the whole run."""


class RunFollower:
    """Reads what is new in a run folder and keeps what the metrics need of the rest."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
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
        """The metrics of the run at `now` (Unix seconds)."""
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
        is_alive = self._state.status == RUNNING and self._state.is_driver_alive(self._dir)
        facts = RunFacts(
            run_id=self._state.run_id,
            status=self._state.current_status(self._dir),
            spec=_read_spec(self._dir),
            now=now,
            is_driver_alive=is_alive,
        )
        began = time.monotonic()
        if self._accounted is None or began >= self._account_after:
            self._accounted = account_run(facts, self._events, self._lines)
            ended = time.monotonic()
            self._account_after = ended + (ended - began) * (1 / BUSY_FRAC - 1)
        changes = NodeBook(self._dir.parent).changes()
        return run_samples(facts, self._events, self._totals, self._accounted, changes)


class MetricsServer:
    """Serves /metrics of one run. Use as a context manager, or close() it."""

    def __init__(
        self, run_dir: Path, host: str = "127.0.0.1", port: int = 0, refresh_s: float = REFRESH_S
    ) -> None:
        """Work out the figures once, then listen.

        Args:
            run_dir: the run's folder.
            host: address to listen on.
            port: 0 takes a free one.
            refresh_s: shortest time between two workings-out.

        Raises:
            SpecError: there is no such run.
            PacktrainError: the port is taken, or the address is not this machine's.
        """
        self._follower = RunFollower(run_dir)
        self._refresh_s = refresh_s
        self._samples = self._follower.samples(time.time())
        self._stop = threading.Event()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Latest(lambda: self._samples))
        self._server: WSGIServer
        try:
            self._server, self._http_thread = start_http_server(port, host, registry)
        except OSError as error:
            raise PacktrainError(
                f"metrics cannot be served on {host}:{port}: {error}; choose another --port or --host"
            ) from error
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._refresh_on, name="metrics-refresh", daemon=True)
        self._thread.start()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def wait(self) -> None:
        """Serve until close(), or until KeyboardInterrupt."""
        self._stop.wait()

    def close(self) -> None:
        """Stop listening and end both threads."""
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._http_thread.join()

    def _refresh_on(self) -> None:
        while not self._stop.wait(self._refresh_s):
            # Where the storage is away, the snapshot's timestamp says how old the figures are.
            with contextlib.suppress(SpecError, OSError):
                self._samples = self._follower.samples(time.time())


def metrics_text(run_dir: Path) -> str:
    """The text exposition of a run, once.

    Raises:
        SpecError: there is no such run.
    """
    return render([RunFollower(run_dir).samples(time.time())])


class _Latest:
    """A collector of whatever the newest samples are."""

    def __init__(self, newest: Callable[[], Samples]) -> None:
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        return SamplesCollector([self._newest()]).collect()


def _read_spec(run_dir: Path) -> dict[str, Any]:
    try:
        spec = json.loads((run_dir / "spec.json").read_text())
    except (OSError, ValueError):
        return {}
    return spec if isinstance(spec, dict) else {}
