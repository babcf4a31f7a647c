"""What became of a run, from its folder alone: losses, attempts, incidents with their bill, goodput by phase.

Reads the run folder and gives values; draws nothing (service/report_html.py, service/report_text.py) and asks
no process whether it lives (the caller says so).
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.mesh import SIZES, Mesh
from ops.checkpoint.layout import CHECKPOINTS_DIR, folder_name, newest_committed_step
from ops.ettr import EttrPoint, sliding_ettr
from ops.goodput import Goodput, account
from ops.incident_rows import incident_row
from ops.ledger import Event, number, plain_value, read_ledger, read_metrics
from ops.losses import IncidentBill, StepLine, bill_incidents, judge_steps

RUNNING = "RUNNING"
FAILED = "FAILED"
TRACKING_STATE_FILE = "tracking/mlflow.json"
"""Where the tracking feed keeps what it knows of its server, below the run folder."""


@dataclass(frozen=True)
class CurvePoint:
    """One point of a curve."""

    step: int
    at: float
    """Unix seconds."""
    value: float


@dataclass(frozen=True)
class CheckpointNote:
    """A checkpoint as the ledger tells of it."""

    step: int
    at: float
    path: str
    n_bytes: int
    write_s: float
    outcome: str
    """committed, failed or skipped."""
    note: str
    """Error or reason; empty for a committed one."""


@dataclass(frozen=True)
class Report:
    """All that is known of one run."""

    run_id: str
    status: str
    steps: int
    """The last step that counted."""
    total_steps: int | None
    """Steps that the spec asks for; None where there is no spec."""
    first_loss: float | None
    final_loss: float | None
    final_eval_loss: float | None
    attempts: int
    restarts: int
    """Times that ranks were restarted in place."""
    lost_steps: int
    skipped_steps: int
    """Kept steps whose gradient was not finite: nothing was updated."""
    tokens_seen: int
    tokens_per_s: float | None
    """Median over kept steps; padding does not count."""
    mfu_frac: float | None
    """Median over kept steps."""
    error: str
    notes: tuple[str, ...]
    """Sentences that the reader should see: the driver is dead, figures are missing."""
    mlflow_run_id: str | None
    mlflow_uri: str | None
    mlflow_unsent: int | None
    """Lines of metrics that the tracking server has not been given yet."""
    run_dir: str
    checkpoint_dir: str | None
    """The newest committed checkpoint; None before the first."""
    goodput: Goodput
    ettr_hours: tuple[EttrPoint, ...]
    """ETTR over the hour before each of up to 240 moments, the last one the end."""
    bills: tuple[IncidentBill, ...]
    losses: tuple[CurvePoint, ...]
    """Kept training loss of each step, in order."""
    eval_losses: tuple[CurvePoint, ...]
    lost: tuple[StepLine, ...]
    checkpoints: tuple[CheckpointNote, ...]
    events: tuple[Event, ...]
    spec: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def ettr_worst_hour_frac(self) -> float | None:
        """The lowest of the full hours' ETTR; None where no hour is full."""
        full = [point.frac for point in self.ettr_hours if point.is_full and point.frac is not None]
        return min(full, default=None)

    def to_json(self) -> dict[str, Any]:
        """The --json contract: plain values, non-finite figures as "nan", "inf", "-inf"; curves left out."""
        goodput = self.goodput
        values = {
            "run_id": self.run_id,
            "status": self.status,
            "steps": self.steps,
            "total_steps": self.total_steps,
            "first_loss": self.first_loss,
            "final_loss": self.final_loss,
            "final_eval_loss": self.final_eval_loss,
            "attempts": self.attempts,
            "restarts": self.restarts,
            "lost_steps": self.lost_steps,
            "skipped_steps": self.skipped_steps,
            "tokens_seen": self.tokens_seen,
            "tokens_per_s": self.tokens_per_s,
            "mfu_frac": self.mfu_frac,
            "goodput_frac": goodput.goodput_frac,
            "ettr_frac": goodput.ettr_frac,
            "ettr_last_hour_frac": self.ettr_hours[-1].frac if self.ettr_hours else None,
            "ettr_worst_hour_frac": self.ettr_worst_hour_frac,
            "wall_s": goodput.wall_us / 1e6,
            "started_at": goodput.start_us / 1e6,
            "ended_at": goodput.end_us / 1e6,
            "phases_s": {phase.value: us / 1e6 for phase, us in goodput.phases_us.items()},
            "incidents": [incident_row(bill) for bill in self.bills],
            "checkpoints": [
                {"step": note.step, "outcome": note.outcome, "path": note.path, "n_bytes": note.n_bytes}
                for note in self.checkpoints
            ],
            "error": self.error,
            "notes": list(self.notes),
            "mlflow_run_id": self.mlflow_run_id,
            "mlflow_uri": self.mlflow_uri,
            "mlflow_unsent": self.mlflow_unsent,
            "run_dir": self.run_dir,
            "checkpoint_dir": self.checkpoint_dir,
        }
        plain: dict[str, Any] = plain_value(values)
        return plain


def build_report(
    run_dir: str | os.PathLike[str], *, now: float | None = None, is_driver_alive: bool = False
) -> Report:
    """Sum up a run from its folder. Reads files only; a torn or missing one shortens the report.

    Args:
        run_dir: the run's folder.
        now: Unix seconds, up to which the time of a living run is counted; needed where is_driver_alive.
        is_driver_alive: the process that drives the run still lives. RUNNING without one means that it died.
    """
    folder = Path(run_dir).resolve()
    state, spec = _read_json(folder / "run.json"), _read_json(folder / "spec.json")
    tracking = _read_json(folder / TRACKING_STATE_FILE)
    events, lines = read_ledger(folder), read_metrics(folder)
    steps = judge_steps(events, lines)
    status, notes = _status(state, events, is_driver_alive)
    goodput = account(events, lines, now if is_driver_alive and status == RUNNING else None, steps)
    kept = _kept_lines(steps, lines)
    losses = _curve(kept, "loss")
    evals = _curve(_last_by_step([line for line in lines if line.get("kind") == "eval"]), "loss")
    checkpoints = _checkpoints(events)
    train = spec.get("train")
    return Report(
        run_id=str(state.get("run_id") or folder.name),
        status=status,
        steps=max((int(line["step"]) for line in kept), default=0),
        total_steps=train.get("steps") if isinstance(train, dict) else None,
        first_loss=losses[0].value if losses else None,
        final_loss=losses[-1].value if losses else None,
        final_eval_loss=evals[-1].value if evals else None,
        attempts=len({event.integer("attempt") for event in events if event.kind == "attempt_started"}),
        restarts=sum(event.kind == "ranks_started" and event.integer("generation") > 0 for event in events),
        lost_steps=sum(not step.is_kept for step in steps),
        skipped_steps=sum(bool(line.get("skipped")) for line in kept),
        tokens_seen=max((int(number(line.get("tokens_seen")) or 0) for line in kept), default=0),
        tokens_per_s=_median(kept, "tokens_per_s"),
        mfu_frac=_median(kept, "mfu_frac"),
        error=str(state.get("error") or ""),
        notes=tuple(notes),
        mlflow_run_id=tracking.get("mlflow_run_id") or state.get("mlflow_run_id"),
        mlflow_uri=tracking.get("mlflow_uri"),
        mlflow_unsent=_unsent(folder, tracking),
        run_dir=str(folder),
        checkpoint_dir=_newest_checkpoint(folder, checkpoints),
        goodput=goodput,
        ettr_hours=tuple(sliding_ettr(goodput)),
        bills=tuple(bill_incidents(events, steps)),
        losses=tuple(losses),
        eval_losses=tuple(evals),
        lost=tuple(step for step in steps if not step.is_kept),
        checkpoints=tuple(checkpoints),
        events=tuple(events),
        spec=spec,
        environment=_environment(folder, events, spec),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _status(
    state: Mapping[str, Any], events: Sequence[Event], is_driver_alive: bool
) -> tuple[str, list[str]]:
    status = str(state.get("status") or RUNNING)
    if status != RUNNING or is_driver_alive:
        return status, []
    ended = [event for event in events if event.kind in ("run_ended", "attempt_started")]
    if ended and ended[-1].kind == "run_ended":  # the driver died between its last two writes
        return ended[-1].text("status", FAILED), []
    return FAILED, [
        "The driver of this run is dead and did not end it: the figures stop at the last line written. "
        f"To go on from the newest checkpoint: packtrain resume {state.get('run_id', 'RUN')}"
    ]


def _kept_lines(steps: Sequence[StepLine], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metric lines of the steps that counted, in order of step."""
    kept = {(s.attempt, s.generation, s.step) for s in steps if s.is_kept}
    mine = [
        line
        for line in lines
        if "kind" not in line
        and number(line.get("step")) is not None
        and (line.get("attempt", 0), line.get("generation", 0), line["step"]) in kept
    ]
    return _last_by_step(mine)


def _last_by_step(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each step the line of the latest attempt and generation, in order of step."""
    by_age = sorted(lines, key=lambda line: (line.get("attempt", 0), line.get("generation", 0)))
    latest = {line["step"]: line for line in by_age if isinstance(line.get("step"), int)}
    return [latest[step] for step in sorted(latest)]


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[CurvePoint]:
    points = []
    for line in lines:
        value = number(line.get(name))
        if value is not None:
            points.append(CurvePoint(line["step"], number(line.get("at")) or 0.0, value))
    return points


def _median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [
        value for line in lines if (value := number(line.get(name))) is not None and math.isfinite(value)
    ]
    return statistics.median(values) if values else None


def _checkpoints(events: Sequence[Event]) -> list[CheckpointNote]:
    return [
        CheckpointNote(
            step=event.integer("step", -1),
            at=event.at,
            path=event.text("path"),
            n_bytes=event.integer("n_bytes"),
            write_s=event.seconds("write_s"),
            outcome=event.kind.removeprefix("checkpoint_"),
            note=event.text("error") or event.text("reason"),
        )
        for event in events
        if event.kind in ("checkpoint_committed", "checkpoint_failed", "checkpoint_skipped")
    ]


def _newest_checkpoint(folder: Path, notes: Sequence[CheckpointNote]) -> str | None:
    """The newest committed checkpoint on disk; by the ledger where the folder of checkpoints is not there."""
    checkpoints = folder / CHECKPOINTS_DIR
    told = [note.step for note in notes if note.outcome == "committed"]
    newest = newest_committed_step(checkpoints) if checkpoints.is_dir() else max(told, default=None)
    return None if newest is None else str(checkpoints / folder_name(newest))


def _unsent(folder: Path, tracking: Mapping[str, Any]) -> int | None:
    """Lines of metrics.jsonl after the tracking cursor; None where the run is not tracked."""
    offset = tracking.get("metrics_offset_bytes")
    if not isinstance(offset, int):
        return None
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(offset)
            return file.read().count(b"\n")
    except OSError:
        return 0


def _environment(folder: Path, events: Sequence[Event], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run ran and over which layout, as far as its folder tells."""
    found = _read_json(folder / "environment.json")
    strategy = spec.get("strategy")
    if found and isinstance(strategy, dict):
        sizes = {axis: strategy[axis] for axis in SIZES if isinstance(strategy.get(axis), int)}
        found["layout"] = f"{strategy.get('kind')} {Mesh(**sizes).factors}"
    worlds = [event.integer("world_size") for event in events if event.kind == "attempt_started"]
    return {**found, "world_size": worlds[-1]} if worlds else found
