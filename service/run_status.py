"""What `list` and `status` say of a run, from its folder alone: needs no cluster and no living driver."""

from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from ops.ledger import read_metrics
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
        where = {"run_dir": str(run_dir), "mlflow_run_id": None}
        return {"run_id": run_dir.name, "status": UNREADABLE, **nothing, "error": str(error), **where}
