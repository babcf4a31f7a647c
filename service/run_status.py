"""What `list` and `status` say of a run, from its folder alone: needs no cluster and no living driver."""

from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from ops.incident_rows import handling
from ops.ledger import read_ledger, read_metrics
from service.run_store import RunState, iter_runs, read_spec, read_state
from service.tracking_run import settle

UNREADABLE = "UNREADABLE"
"""Shown for a run whose run.json or spec.json is damaged; never stored."""


def told_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of one run; where its driver was killed, MLflow is told so first: it may take seconds."""
    state = read_state(run_dir)
    status = state.current_status(run_dir)
    if status != state.status:
        settle(run_dir, read_spec(run_dir), status)  # nobody else is left to do it
    return summary(run_dir)


def summary(run_dir: Path) -> dict[str, Any]:
    """State, progress and place of one run. Contacts nobody."""
    state, spec = read_state(run_dir), read_spec(run_dir)
    status = state.current_status(run_dir)
    steps = [record for record in read_metrics(run_dir) if "grad_norm" in record]
    last = steps[-1] if steps else None
    return {
        "run_id": state.run_id,
        "status": status,
        "layout": f"{spec.strategy.kind} {spec.strategy.mesh.factors}",
        "step": last["step"] if last else 0,
        "steps": spec.train.steps,
        "loss": last["loss"] if last else None,
        "tokens_per_s": last.get("tokens_per_s") if last else None,
        "attempts": state.attempts,
        **_told_by_ledger(run_dir),
        "error": _error(state, status),
        "run_dir": str(run_dir),
        "mlflow_run_id": state.mlflow_run_id,
    }


def _error(state: RunState, status: str) -> str:
    """The first line of why the run ended; of a driver that was killed nobody else can tell."""
    if status != state.status:
        return (
            f"the driver (process {state.driver_pid} on {state.driver_host}) is gone; "
            f"go on with packtrain resume {state.run_id}"
        )
    return state.error.splitlines()[0] if state.error else ""


def lines(row: dict[str, Any]) -> list[str]:
    """A summary for people, a line for each figure."""
    shown = dict(row)
    if last := shown.get("last_incident"):
        nodes = f", keeps off {', '.join(last['exclude'])}" if last["exclude"] else ""
        seen = f", seen by {last['detector']}" if last["detector"] else ""
        what = f"{last['class']}: {last['culprit']}, step {last['step']} -> {last['action']}"
        shown["last_incident"] = f"{what} ({last['reason']}){seen}{nodes}"
    if spares := shown.get("spares"):
        shown["spares"] = f"{len(spares['held'])} of {spares['wanted']}: {', '.join(spares['held'])}"
    return [f"{key:16} {value}" for key, value in shown.items()]


def _told_by_ledger(run_dir: Path) -> dict[str, Any]:
    """How many incidents, the last one (what, whose word, what was done about nodes), and the spares held."""
    events = read_ledger(run_dir)
    incidents = [event for event in events if event.kind == "incident"]
    last: dict[str, Any] | None = None
    if incidents:
        event = incidents[-1]
        named = {name: event.text(name) for name in ("class", "culprit", "action", "reason")}
        at = {"step": event.integer("step"), "detected_at": event.seconds("detected_at", event.at)}
        last = {**named, **at, **handling(event)}
    spares = [
        {"wanted": event.integer("wanted"), "held": list(event.fields.get("held", ()))}
        for event in events
        if event.kind == "spares"
    ]
    return {"incidents": len(incidents), "last_incident": last, "spares": spares[-1] if spares else None}


def summaries(storage: Path) -> list[dict[str, Any]]:
    """All runs below a storage folder, in name order; one whose files are damaged is UNREADABLE.

    Contacts nobody: many dead runs and a dead MLflow server must not make a list take minutes.
    """
    return [_summary_or_trouble(run_dir) for run_dir in iter_runs(storage)]


def _summary_or_trouble(run_dir: Path) -> dict[str, Any]:
    try:
        return summary(run_dir)
    except SpecError as error:
        nothing = {"layout": "", "step": 0, "steps": 0, "loss": None, "tokens_per_s": None, "attempts": 0}
        nothing |= {"incidents": 0, "last_incident": None, "spares": None}
        where = {"run_dir": str(run_dir), "mlflow_run_id": None}
        return {"run_id": run_dir.name, "status": UNREADABLE, **nothing, "error": str(error), **where}
