"""What MLflow is told of a run besides its figures: parameters, tags, files, the end.

`settle` tells the end of a run whose driver is gone; tracking_feed.py is the live side.
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from jobs.spec.job import JobSpec
from ops.incident_rows import incident_table
from ops.ledger import METRICS_FILE, read_ledger
from ops.metric_values import Accounted
from ops.tracking.cursor import load_cursor
from ops.tracking.mlflow import embedded_uri, shown_uri
from ops.tracking.params import flatten_params, masked_spec
from ops.tracking.points import goodput_figures
from ops.tracking.pump import INCIDENTS_FILE, STATE_FILE, MlflowPump
from service.env import get_env, set_env
from service.run_follower import RunFollower

REQUEST_LIMIT_S = 30
"""Limit of one request while nobody waits for it."""
CLOSING_REQUEST_LIMIT_S = 5
"""Limit of one request once somebody waits for the end."""
ARTIFACTS = (
    "environment.json",
    "report.html",
    "report.json",
    "loss.png",
    "tracking/spec.json",
    "tracking/events.json",
    str(INCIDENTS_FILE),
)
QUIET_DEFAULTS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Nothing goes to MLflow's makers, and MLflow must not repeat requests by itself: its callers here do."""


def tracking_uri(run_dir: Path, spec: JobSpec) -> str:
    """The spec's MLflow URI, or that of the store embedded beside the run's folder."""
    return spec.tracking.mlflow_uri or embedded_uri(run_dir.parent)


def open_command(run_dir: Path, spec: JobSpec) -> str:
    """What the user opens or types to see this run in MLflow; empty where the run is not tracked."""
    uri = tracking_uri(run_dir, spec)
    if not spec.tracking.mlflow:
        return ""
    return shown_uri(uri) if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"


def new_pump(run_dir: Path, spec: JobSpec, request_limit_s: int) -> MlflowPump:
    """A pump for the run, with MLflow's environment set; contacts nobody yet."""
    for name, value in QUIET_DEFAULTS.items():
        if get_env(name) is None:
            set_env(name, value)
    limit_requests(request_limit_s)
    tracking = spec.tracking
    return MlflowPump(run_dir, tracking_uri(run_dir, spec), tracking.experiment, tracking.log_every_steps)


def limit_requests(timeout_s: int) -> None:
    """Limit every HTTP request that this process' MLflow client makes from now on."""
    set_env("MLFLOW_HTTP_REQUEST_TIMEOUT", str(timeout_s))


def open_run(pump: MlflowPump, run_dir: Path, spec: JobSpec, *, goes_on: bool) -> dict[str, str]:
    """Find or make the MLflow run of a run folder; nothing where the pump has it open.

    Args:
        pump: the run's pump.
        run_dir: the run's folder.
        spec: its resolved spec, which becomes the parameters.
        goes_on: mark the MLflow run as running again.

    Returns:
        Parameters and tags that the server refused, with its reason.

    Raises:
        TrackingUnavailableError, TrackingRefusedError
    """
    if pump.is_open:
        return {}
    created = [event.at for event in read_ledger(run_dir) if event.kind == "run_created"]
    return pump.open(
        run_name=run_dir.name,
        started_at=created[0] if created else time.time(),
        params=flatten_params(masked_spec(spec.model_dump(mode="json"))),
        tags=environment_tags(run_dir),
        goes_on=goes_on,
    )


def settle_run(pump: MlflowPump, run_dir: Path, spec: JobSpec, status: str) -> None:
    """Send the final status of a run, and its files (the spec without what may be secret).

    Raises:
        TrackingUnavailableError, TrackingRefusedError
    """
    events = read_ledger(run_dir)
    lines = [{"at": e.at, "kind": e.kind, "writer": e.writer, **e.fields} for e in events]
    names = dict(pump.cursor.mapped_names)
    accounted: Accounted | None = None
    with contextlib.suppress(OSError, SpecError):
        accounted = RunFollower(run_dir).accounted(time.time())
        table = json.dumps(incident_table(accounted.bills), indent=1)
        (run_dir / INCIDENTS_FILE).write_text(table)
    with contextlib.suppress(OSError):
        text = json.dumps({"events": lines, "mapped_metric_names": names}, indent=1)
        (run_dir / "tracking" / "events.json").write_text(text)
        shown = json.dumps(masked_spec(spec.model_dump(mode="json")), indent=2)
        (run_dir / "tracking" / "spec.json").write_text(shown)
    at = max((event.at for event in events), default=time.time())
    if accounted is not None:
        pump.send_bills(accounted.bills)
        pump.send_samples(goodput_figures(accounted), at)
    pump.finish(status, at, [run_dir / name for name in ARTIFACTS])


def settle(run_dir: Path, spec: JobSpec, status: str, timeout_s: float = 15.0) -> str | None:
    """Tell MLflow the end of a run that nobody drives any more: the rest of its figures and its final status.

    For report and status: costs nothing where MLflow knows already, and never raises.

    Args:
        run_dir: the run's folder.
        spec: its resolved spec.
        status: its final status; a run whose driver was killed is FAILED.
        timeout_s: limit of the whole.

    Returns:
        A line for the user where MLflow could not be told, None where all is well.
    """
    cursor = load_cursor(run_dir / STATE_FILE, shown_uri(tracking_uri(run_dir, spec)))
    never_began = cursor.mlflow_run_id is None and not (run_dir / METRICS_FILE).exists()
    if not spec.tracking.mlflow or cursor.settled_status == status or never_began:
        return None
    problem: list[str] = []
    thread = threading.Thread(
        target=_settle_in_thread, args=(run_dir, spec, status, problem), name="tracking-settle", daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        problem.append(f"no answer within {timeout_s:g} s")
    return f"{left_line(run_dir, spec)} ({problem[0]})" if problem else None


def _settle_in_thread(run_dir: Path, spec: JobSpec, status: str, problem: list[str]) -> None:
    try:
        pump = new_pump(run_dir, spec, CLOSING_REQUEST_LIMIT_S)
        open_run(pump, run_dir, spec, goes_on=False)
        while pump.send_portion():
            pass
        settle_run(pump, run_dir, spec, status)
    except Exception as error:  # whatever MLflow does, the verb that asked must get its answer
        problem.append(str(error))


def refused_line(uri: str, refused: Mapping[str, str]) -> str:
    """One line: which parameters and tags the server at `uri` (without a password) did not take, and why."""
    names = ", ".join([*list(refused)[:5], *(["..."] if len(refused) > 5 else [])])
    return (
        f"MLflow at {uri} refused {len(refused)} of this run's parameters and tags, figures are sent all the "
        f"same: {names} ({next(iter(refused.values()))})"
    )


def left_line(run_dir: Path, spec: JobSpec) -> str:
    """One line: how much MLflow has not been given, where it lies, and how it gets there."""
    uri = tracking_uri(run_dir, spec)
    n = MlflowPump(run_dir, uri, spec.tracking.experiment).unsent_lines()
    what = f"{n} lines of figures were not sent" if n else "the end of the run was not sent"
    return (
        f"MLflow at {shown_uri(uri)}: {what}; they lie in {run_dir / METRICS_FILE}, and "
        f"`packtrain report {run_dir.name}` sends them once it answers"
    )


def environment_tags(run_dir: Path) -> dict[str, str]:
    """The run's environment.json as MLflow tags."""
    try:
        facts: dict[str, Any] = json.loads((run_dir / "environment.json").read_text())
    except (OSError, ValueError):
        facts = {}
    git: Mapping[str, Any] = facts.get("git") or {}
    versions: Mapping[str, str] = facts.get("versions") or {}
    tags = {"packtrain.run_dir": str(run_dir), "packtrain.host": str(facts.get("host", ""))}
    tags |= {f"packtrain.version.{name}": version for name, version in versions.items()}
    if git:
        tags["mlflow.source.git.commit"] = str(git.get("commit", ""))
        tags["mlflow.source.git.branch"] = str(git.get("branch", ""))
        tags["packtrain.git.is_dirty"] = str(bool(git.get("is_dirty"))).lower()
    return {key: value for key, value in tags.items() if value}
