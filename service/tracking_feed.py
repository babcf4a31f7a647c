"""The driver's thread that tells MLflow about a run: it reads the run folder, so training never waits.

    start()            environment.json; the thread sleeps until there is something to tell
    every interval_s   new lines -> MLflow; after an error it waits, longer each time, and tries again
    flush()            all that is there now, within a limit
    close(status)      the rest, the report's files, the status, within a limit; one line if something is left

A run has one MLflow run over all its attempts and drivers. What a dead server missed is sent when it is back:
by this thread, by that of a resumed driver, or by tracking_run.settle for a run whose driver is gone.
"""

import contextlib
import json
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from jobs.spec.job import JobSpec
from ops.ledger import METRICS_FILE
from ops.tracking.base import TrackingRefusedError, TrackingUnavailableError
from ops.tracking.mlflow import shown_uri
from ops.tracking.points import goodput_figures
from ops.tracking.pump import MlflowPump
from service.provenance import collect_environment
from service.run_follower import RunFollower
from service.tracking_run import (
    CLOSING_REQUEST_LIMIT_S,
    REQUEST_LIMIT_S,
    left_line,
    limit_requests,
    new_pump,
    open_run,
    refused_line,
    settle_run,
    tracking_uri,
)

MAX_WAIT_S = 60.0
"""Longest pause between two tries while the server is down."""
CLOSING_WAIT_S = 1.0
"""Pause between two tries while the driver waits for the end."""
SAMPLES_EVERY_S = 15.0


class TrackingFeed:
    """Feeds one run to MLflow from a thread of its own. No method raises, none blocks beyond its limit."""

    def __init__(
        self,
        run_dir: Path,
        spec: JobSpec,
        say: Callable[[str], None],
        *,
        source_dir: Path | None = None,
        interval_s: float = 5.0,
        follower: RunFollower | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            run_dir: the run's folder.
            spec: the resolved spec; with tracking.mlflow off, nothing is ever sent.
            say: shows one line to the user; called from the thread.
            source_dir: folder whose git state is recorded; None takes the one that holds this package.
            interval_s: pause between two portions.
            follower: of the run; with it goodput is told on the way, too.
        """
        self._dir = run_dir
        self._spec = spec
        self._say = say
        self._source_dir = source_dir or Path(__file__).resolve().parent.parent
        self._interval_s = interval_s
        self._follower = follower
        self._shown_uri = shown_uri(tracking_uri(run_dir, spec))
        self._pump: MlflowPump | None = None
        self._wake = threading.Event()
        self._drained = threading.Condition()
        self._n_drains = 0
        self._is_asked = False
        self._final_status: str | None = None
        self._is_settled = False
        self._deadline_mono_s = float("inf")
        self._sampled_mono_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="tracking-feed", daemon=True)

    @property
    def mlflow_run_id(self) -> str | None:
        """Id of the MLflow run, once the server has given it."""
        return self._pump.cursor.mlflow_run_id if self._pump else None

    def start(self) -> None:
        """Write environment.json and start the thread, which contacts the server when there are figures."""
        with contextlib.suppress(OSError):
            facts = json.dumps(collect_environment(self._source_dir), indent=1)
            (self._dir / "environment.json").write_text(facts)
        if self._spec.tracking.mlflow:
            self._thread.start()

    def flush(self, timeout_s: float = 20.0) -> bool:
        """Send what is in the run folder now, waiting at most timeout_s; False when something is left."""
        if not self._thread.is_alive():
            return not self._spec.tracking.mlflow
        with self._drained:
            # The portion under way may have been read before the newest lines came: one more must follow.
            target = self._n_drains + 2
            self._is_asked = True
            self._wake.set()
            return self._drained.wait_for(lambda: self._n_drains >= target, timeout_s)

    def close(self, status: str, timeout_s: float = 20.0) -> None:
        """Send the rest and the report's files, and give the MLflow run its final status.

        Blocks for at most about timeout_s. What was not sent by then is told in one line with the place where
        it lies, and the thread is left to die with the process.
        """
        if not self._thread.is_alive():
            return
        limit_requests(CLOSING_REQUEST_LIMIT_S)
        self._deadline_mono_s = time.monotonic() + timeout_s
        self._final_status = status
        self._wake.set()
        self._thread.join(timeout_s + CLOSING_WAIT_S)
        if not self._is_settled:
            self._say(left_line(self._dir, self._spec))

    def _run(self) -> None:
        n_failures = 0
        while not self._is_settled and time.monotonic() < self._deadline_mono_s:
            try:
                if self._pump is None:
                    limit_s = CLOSING_REQUEST_LIMIT_S if self._final_status else REQUEST_LIMIT_S
                    self._pump = new_pump(self._dir, self._spec, limit_s)
                if self._final_status or self._is_asked or (self._dir / METRICS_FILE).exists():
                    self._work(self._pump)
                if n_failures and self._pump.is_open:
                    self._say(f"MLflow at {self._shown_uri} answers again and has been sent what it missed")
                    n_failures = 0
            except TrackingRefusedError as error:
                self._say(f"MLflow at {self._shown_uri} will not take this run: {error}")
                return
            except Exception as error:  # whatever happens here must not reach training
                n_failures += 1
                if n_failures == 1:
                    self._say(
                        f"MLflow at {self._shown_uri} takes no figures now ({error}); the run goes on, "
                        "they are kept in the run folder and sent later"
                    )
                if not isinstance(error, TrackingUnavailableError):
                    self._keep_traceback()
            self._pause(n_failures)

    def _work(self, pump: MlflowPump) -> None:
        refused = open_run(pump, self._dir, self._spec, goes_on=True)
        if refused:
            self._say(refused_line(self._shown_uri, refused))
        while pump.send_portion():
            if time.monotonic() > self._deadline_mono_s:
                return
        with self._drained:
            self._n_drains += 1
            is_asked, self._is_asked = self._is_asked, False
            self._drained.notify_all()
        if is_asked:
            self._wake.set()
        if self._final_status:
            settle_run(pump, self._dir, self._spec, self._final_status)
            self._is_settled = True
        elif time.monotonic() - self._sampled_mono_s > SAMPLES_EVERY_S:
            self._sampled_mono_s = time.monotonic()
            now, figures = time.time(), system_figures(self._dir)
            if self._follower is not None:
                accounted = self._follower.accounted(now)
                figures |= goodput_figures(accounted)
                pump.send_bills(accounted.bills)
            pump.send_samples(figures, now)

    def _pause(self, n_failures: int) -> None:
        """Until the next portion is due, or close or flush asks for it."""
        if self._final_status:
            if not self._is_settled:
                time.sleep(CLOSING_WAIT_S)
            return
        self._wake.wait(min(MAX_WAIT_S, self._interval_s * 2 ** min(n_failures, 10)))
        self._wake.clear()

    def _keep_traceback(self) -> None:
        with contextlib.suppress(OSError), (self._dir / "logs" / "tracking.log").open("a") as log:
            log.write(traceback.format_exc())


def system_figures(run_dir: Path) -> dict[str, float]:
    """Load of the driver's node: CPU since the last call, memory, and the disk under the run folder."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(run_dir))
    return {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/memory_used_gib": (memory.total - memory.available) / 2**30,
        "system/memory_percent": memory.percent,
        "system/disk_free_gib": disk.free / 2**30,
        "system/disk_percent": disk.percent,
    }
