"""One MLflow run as a Tracker: the only file that imports mlflow (on first use: it takes seconds).

An MLflow run is opened once for all attempts and found again by a tag, so that a lost answer or a dead driver
never leaves two. Figures are cut to what servers take. Does not retry, wait or keep anything: see pump.py.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ops.incident_rows import handling_words
from ops.ledger import Event
from ops.losses import IncidentBill
from ops.tracking.base import Point, TrackingRefusedError, TrackingUnavailableError
from ops.tracking.params import accepted_name

if TYPE_CHECKING:
    from mlflow.entities import Run, RunTag
    from mlflow.tracking import MlflowClient

MAX_METRICS_PER_BATCH = 1000
"""The server's limit; with names of at most 250 characters a batch stays below its limit of 1 MB, too."""
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_CHARS = (6000, 500)
"""Limits of new and of old servers, tried in this order."""
MAX_TAG_CHARS = 5000
UID_TAG = "packtrain.run_uid"
TABLES_TAG = "mlflow.loggedArtifacts"
"""MLflow's own: which artifacts are tables."""

STATUSES = {"FINISHED": "FINISHED", "FAILED": "FAILED", "STOPPED": "KILLED", "PREEMPTED": "KILLED"}
"""Packtrain's final statuses in MLflow's words."""

_NEVER = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"})
"""Error codes of requests that would fail again."""

_T = TypeVar("_T")


def embedded_uri(storage: Path) -> str:
    """URI of the embedded store below a storage folder."""
    return f"sqlite:///{storage.resolve() / 'mlflow' / 'mlflow.db'}"


def shown_uri(uri: str) -> str:
    """The URI without a user's password."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # a bracket that is not closed: no address, but it may hold a password all the same
        return uri.rpartition("@")[2]
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class MlflowTracker:
    """Talks to one MLflow run, from one thread. Calls block up to MLFLOW_HTTP_REQUEST_TIMEOUT."""

    def __init__(self, uri: str, experiment: str, run_uid: str) -> None:
        """Contacts nobody yet.

        Args:
            uri: tracking URI of any kind that MLflow knows.
            experiment: name of the experiment, made when it is not there.
            run_uid: what identifies the run on the server besides its id.
        """
        self._uri = uri
        self._experiment = experiment
        self._uid = run_uid
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._run_id = ""
        self.mapped_names: dict[str, str] = {}
        """Names that the server does not take, and what they are sent as."""

    def open(self, known_run_id: str | None, run_name: str, started_at: float) -> str:
        """Find the run by its id or its uid, or make it; returns its id.

        Raises:
            TrackingUnavailableError
            TrackingRefusedError: also where somebody has deleted the run there: it would refuse every figure.
        """
        client = self._get_client()
        if known_run_id:
            self._run = _translated(client.get_run, known_run_id)
        else:
            self._run = self._find_or_create(run_name, started_at)
        if self._run.info.lifecycle_stage == "deleted":
            raise TrackingRefusedError(
                f"its MLflow run {known_run_id} was deleted there; bring it back with `mlflow runs restore`"
            )
        self._run_id = self._run.info.run_id
        return self._run_id

    def mark_running(self) -> None:
        """Take back the final status that a dead driver's run was given."""
        if self._run is not None and self._run.info.status != "RUNNING":
            _translated(self._get_client().update_run, self._run_id, "RUNNING")

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
        """Give the run its parameters and tags; those that the server refuses are left out.

        A parameter that has another value on the server, where they never change, becomes a tag with both.

        Returns:
            What was refused, with the server's reason.

        Raises:
            TrackingUnavailableError: call again later.
        """
        there = dict(self._run.data.params) if self._run is not None else {}
        news = {accepted_name(key): value for key, value in params.items()}
        changed = {
            f"packtrain.changed.{key}"[:250]: f"{there[key]} -> {value}"
            for key, value in news.items()
            if key in there and not _is_same_text(there[key], value)
        }
        refused = self._send_params({key: value for key, value in news.items() if key not in there})
        return refused | self._send_accepted("tags", _tags({**tags, **changed}))

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Send points in batches; raises at the first batch that is not taken, those before it are sent."""
        from mlflow.entities import Metric

        metrics = [
            Metric(self._accepted(point.name), point.value, round(point.at * 1000), point.step)
            for point in points
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._log_batch(metrics=metrics[start : start + MAX_METRICS_PER_BATCH])

    def log_event(self, event: Event) -> None:
        """Incidents, attempts and the newest checkpoint become tags; all kinds are in the events artifact."""
        match event.kind:
            case "incident":
                self._send_tags({_incident_key(event): _incident_text(event)})
            case "attempt_started":
                self._send_tags({"packtrain.attempts": str(event.integer("attempt") + 1)})
            case "checkpoint_committed":
                self._send_tags(
                    {"packtrain.checkpoint": f"step {event.integer('step')}: {event.text('path')}"}
                )

    def log_bill(self, bill: IncidentBill) -> None:
        """The tag of an incident once more, now with what it cost."""
        cost = f"detect {bill.detect_s:.2f} s | restart {bill.restart_s:.2f} s | {bill.lost_steps} steps lost"
        self._send_tags({_incident_key(bill.event): _incident_text(bill.event, cost)})

    def log_artifact(self, path: Path) -> None:
        """Send one file to the root of the run's artifacts."""
        _translated(self._get_client().log_artifact, self._run_id, str(path))

    def name_table(self, path: str) -> None:
        """Say that the artifact at `path` is a table, so that MLflow's pages show it as one."""
        self._send_tags({TABLES_TAG: json.dumps([{"path": path, "type": "table"}])})

    def finish(self, status: str, at: float) -> None:
        """End the MLflow run, with Packtrain's own status as a tag."""
        self._send_tags({"packtrain.status": status})
        ended_ms = round(at * 1000)
        _translated(
            self._get_client().set_terminated,
            self._run_id,
            status=STATUSES.get(status, "FAILED"),
            end_time=ended_ms,
        )

    def _get_client(self) -> "MlflowClient":
        if self._client is None:
            if self._uri.startswith("sqlite:///"):
                _make_folder(Path(self._uri.removeprefix("sqlite:///")).parent)
            from mlflow.tracking import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.ERROR)
            self._client = _translated(MlflowClient, tracking_uri=self._uri)
        return self._client

    def _find_or_create(self, run_name: str, started_at: float) -> "Run":
        client = self._get_client()
        experiment = _translated(client.get_experiment_by_name, self._experiment)
        if experiment is None:
            experiment_id = _translated(
                client.create_experiment, self._experiment, artifact_location=self._artifact_location()
            )
        else:
            experiment_id = experiment.experiment_id
        found = _translated(
            client.search_runs, [experiment_id], filter_string=f"tags.`{UID_TAG}` = '{self._uid}'"
        )
        if found:
            return found[0]
        return _translated(
            client.create_run,
            experiment_id,
            start_time=round(started_at * 1000),
            tags={UID_TAG: self._uid},
            run_name=run_name,
        )

    def _artifact_location(self) -> str | None:
        """Beside an embedded database; None leaves it to a server."""
        if not self._uri.startswith("sqlite:///"):
            return None
        return (Path(self._uri.removeprefix("sqlite:///")).parent / "artifacts").as_uri()

    def _send_params(self, params: Mapping[str, str]) -> dict[str, str]:
        """Send parameters, those that are refused once more as an old server would take them."""
        from mlflow.entities import Param

        refused = dict.fromkeys(params, "")
        for limit in MAX_PARAM_CHARS:
            texts = [Param(key, _cut(params[key], limit)) for key in refused]
            refused = self._send_accepted("params", texts)
        return refused

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        self._log_batch(tags=_tags(tags))

    def _send_accepted(self, kind: str, entities: Sequence[Any]) -> dict[str, str]:
        """Send parameters or tags; halve what is refused until only single ones are left out: why, by key."""
        try:
            for start in range(0, len(entities), MAX_PARAMS_PER_BATCH):
                self._log_batch(**{kind: entities[start : start + MAX_PARAMS_PER_BATCH]})
        except TrackingRefusedError as error:
            if len(entities) == 1:
                return {entities[0].key: str(error)}
            half = len(entities) // 2
            return self._send_accepted(kind, entities[:half]) | self._send_accepted(kind, entities[half:])
        return {}

    def _log_batch(self, **entities: Sequence[Any]) -> None:
        _translated(self._get_client().log_batch, self._run_id, **entities)

    def _accepted(self, name: str) -> str:
        accepted = accepted_name(name)
        if accepted != name:
            self.mapped_names[name] = accepted
        return accepted


def _incident_key(event: Event) -> str:
    return f"packtrain.incident.{event.integer('attempt')}-{event.integer('generation')}-{event.at:.3f}"


def _incident_text(event: Event, cost: str = "") -> str:
    words = (
        event.text("class"),
        event.text("culprit"),
        event.text("action"),
        f"step {event.integer('step')}",
    )
    more = (cost, handling_words(event), event.text("evidence"))
    return " | ".join([*words, *(part for part in more if part)])


def _translated(call: Callable[..., _T], *args: Any, **named: Any) -> _T:
    """Call MLflow; whatever it raises becomes one of the two errors that trackers raise."""
    from mlflow.exceptions import MlflowException

    try:
        return call(*args, **named)
    except MlflowException as error:
        kind = TrackingRefusedError if error.error_code in _NEVER else TrackingUnavailableError
        raise kind(_first_line(error)) from error
    except Exception as error:  # of requests, sqlalchemy, json or the OS: MLflow lets all of them through
        raise TrackingUnavailableError(_first_line(error)) from error


def _tags(tags: Mapping[str, str]) -> "list[RunTag]":
    from mlflow.entities import RunTag

    return [RunTag(key, _cut(value, MAX_TAG_CHARS)) for key, value in tags.items()]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrackingUnavailableError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _is_same_text(there: str, ours: str) -> bool:
    """Equal, or equal up to where the server's copy was cut."""
    return any(there == _cut(ours, limit) for limit in MAX_PARAM_CHARS)
