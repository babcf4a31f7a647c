"""From lines of the run folder to points: which figure goes under which name. Pure; sends nothing.

Non-finite figures are not sent, since servers turn them into 1.797e308 or break on them: they stay readable
in metrics.jsonl, and how many there were is a metric (ops/nonfinite_points).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ops.ettr import HOUR_S
from ops.ledger import Event, number
from ops.metric_values import Accounted
from ops.tracking.base import Point

STEP_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "n_tokens": "train/step_tokens",
    "n_padding_tokens": "train/step_padding_tokens",
    "tokens_seen": "train/tokens_seen",
    "step_time_s": "perf/step_time_s",
    "data_time_s": "perf/data_time_s",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu_frac": "perf/mfu_frac",
    "bubble_frac": "perf/bubble_frac",
    "tflops_per_rank": "perf/tflops_per_rank",
    "memory_bytes": "perf/memory_bytes",
}
"""Names of the fields of a step's line; other figures of a line go under extra/."""
EVAL_NAMES = {"loss": "eval/loss", "n_tokens": "eval/tokens", "eval_time_s": "eval/time_s"}
_COORDINATES = frozenset({"at", "kind", "attempt", "generation", "step", "sample_ordinal"})


@dataclass(frozen=True)
class Counts:
    """Running totals of a run, which become points of their own."""

    nonfinite_points: int = 0
    skipped_steps: int = 0
    incidents: int = 0
    restarts: int = 0
    checkpoints: int = 0
    failed_checkpoints: int = 0
    last_step: int = 0
    """Newest step seen: where events without a step are drawn."""


def points_of_lines(
    lines: Iterable[Mapping[str, Any]], counts: Counts, log_every_steps: int = 1
) -> tuple[list[Point], Counts]:
    """The points of metric lines, and the totals after them.

    Args:
        lines: of metrics.jsonl, in order.
        counts: totals so far.
        log_every_steps: send only steps that this divides, and step 1; evaluations and totals always.
    """
    points: list[Point] = []
    for line in lines:
        step, at = number(line.get("step")), number(line.get("at"))
        if step is None or at is None or not math.isfinite(step + at):
            continue
        counts = replace(counts, last_step=int(step))
        if "kind" in line:
            names, is_wanted = EVAL_NAMES, line["kind"] == "eval"
        else:
            names, is_wanted = STEP_NAMES, step % log_every_steps == 0 or step == 1
            if line.get("skipped"):
                counts = replace(counts, skipped_steps=counts.skipped_steps + 1)
                points.append(Point("ops/skipped_steps", counts.skipped_steps, int(step), at))
        n_bad = 0
        for field, raw in line.items():
            value = None if field in _COORDINATES else number(raw)
            if value is None:
                continue
            if not math.isfinite(value):
                n_bad += 1
            elif is_wanted:
                points.append(Point(names.get(field, f"extra/{field}"), value, int(step), at))
        if n_bad:
            counts = replace(counts, nonfinite_points=counts.nonfinite_points + n_bad)
            points.append(Point("ops/nonfinite_points", counts.nonfinite_points, int(step), at))
    return points, counts


def points_of_event(event: Event, counts: Counts) -> tuple[list[Point], Counts]:
    """The points of one event, and the totals after it."""
    step = event.integer("step", counts.last_step)
    figures: dict[str, float] = {}
    match event.kind:
        case "attempt_started":
            figures = {"ops/attempt": event.integer("attempt"), "ops/world_size": event.integer("world_size")}
        case "ranks_started" if event.integer("generation") > 0:
            counts = replace(counts, restarts=counts.restarts + 1)
            figures = {"ops/restarts": counts.restarts}
        case "restored":
            figures = {"ops/restored_step": step, "ops/load_s": event.seconds("load_s")}
        case "incident":
            counts = replace(counts, incidents=counts.incidents + 1)
            detected = event.seconds("detected_at", event.at)
            detect_s = max(0.0, detected - event.seconds("failed_at", detected))
            figures = {"ops/incidents": counts.incidents, "ops/detect_s": detect_s}
        case "checkpoint_blocked":
            figures = {"ops/save_stall_s": event.seconds("blocked_s")}
        case "checkpoint_committed":
            counts = replace(counts, checkpoints=counts.checkpoints + 1)
            figures = {
                "ops/checkpoints": counts.checkpoints,
                "ops/checkpoint_step": step,
                "ops/checkpoint_bytes": event.integer("n_bytes"),
                "ops/checkpoint_write_s": event.seconds("write_s"),
            }
        case "checkpoint_failed":
            counts = replace(counts, failed_checkpoints=counts.failed_checkpoints + 1)
            figures = {"ops/failed_checkpoints": counts.failed_checkpoints}
    return [Point(name, float(value), step, event.at) for name, value in figures.items()], counts


def goodput_figures(accounted: Accounted) -> dict[str, float]:
    """Where the time of a run went up to now, under the names of metrics; fractions are 0 to 1."""
    goodput = accounted.goodput
    hour = goodput.between(goodput.end_us - round(HOUR_S * 1e6), goodput.end_us)
    figures = {
        "ops/goodput_frac": goodput.goodput_frac,
        "ops/ettr_frac": goodput.ettr_frac,
        "ops/ettr_last_hour_frac": hour.ettr_frac,
        "ops/lost_steps": float(accounted.n_lost_steps),
        "ops/incident_cost_s": sum(bill.total_s for bill in accounted.bills),
        **{f"time/{phase.value}_s": us / 1e6 for phase, us in goodput.phases_us.items()},
    }
    return {name: value for name, value in figures.items() if value is not None}
