"""A run's figures over HTTP for Prometheus, from its folder alone: by `packtrain metrics`, or by the driver.

Works while the run lives and after it, on any node that sees the storage, and never touches the run: it reads
files. Figures are worked out in a thread of their own, so that a scrape is answered at once, and one that
hangs holds nobody. Listens on loopback unless told otherwise. What the metrics are is in ops/metrics.py.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from jobs.errors import PacktrainError, SpecError
from ops.metrics import Samples, SamplesCollector, render
from service.run_follower import RunFollower

REFRESH_S = 5.0
"""Shortest time between two workings-out."""


class MetricsServer:
    """Serves /metrics of one run. Use as a context manager, or close() it."""

    def __init__(
        self, follower: RunFollower, host: str = "127.0.0.1", port: int = 0, refresh_s: float = REFRESH_S
    ) -> None:
        """Work out the figures once, then listen.

        Args:
            follower: of the run.
            host: address to listen on.
            port: 0 takes a free one.
            refresh_s: shortest time between two workings-out.

        Raises:
            SpecError: there is no such run.
            PacktrainError: the port is taken, or the address is not this machine's.
        """
        self._follower = follower
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
                f"metrics cannot be served on {host}:{port}: {error}; choose another port or host"
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
        self._server.server_close()  # a scrape that hangs keeps its own thread, which dies with the process
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
