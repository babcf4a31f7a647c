"""What a tracker is: four methods, one point, two kinds of refusal. Sends nothing itself (mlflow.py does)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ops.ledger import Event


class TrackingUnavailableError(Exception):
    """The server did not take it now: down, slow, cut off, without connections. It may work later."""


class TrackingRefusedError(Exception):
    """The server will never take it: a bad value, an unknown run. Sending it again is useless."""


@dataclass(frozen=True)
class Point:
    """One finite figure of a run."""

    name: str
    """With slashes and its unit: train/loss, perf/tokens_per_s, ops/save_stall_s."""
    value: float
    step: int
    at: float
    """Unix seconds at which it was true, however late it is sent."""


class Tracker(Protocol):
    """A place outside the run folder that is told about a run. Called by one thread of the driver.

    Every method may raise TrackingUnavailableError or TrackingRefusedError, and may be called again with the
    same arguments: doing it twice must leave what doing it once leaves.
    """

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Send points, any number."""

    def log_event(self, event: Event) -> None:
        """Send one event of the ledger."""

    def log_artifact(self, path: Path) -> None:
        """Send one file; an earlier one of its name is replaced."""

    def finish(self, status: str, at: float) -> None:
        """Close the run at Unix seconds with a status: FINISHED, FAILED, STOPPED or PREEMPTED."""
