"""One run as one HTML page that needs no network: figures, loss curve, time, incidents with their bill, spec.

Draws what ops.report has summed up; the drawings are in report_charts.py, the picture in report_png.py.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ops.incident_rows import handling_words
from ops.losses import IncidentBill
from ops.report import CheckpointNote, Report
from ops.tracking.params import masked_spec
from service.progress import duration_text
from service.report_charts import ettr_chart, loss_chart, timeline
from service.report_png import draw_loss_png
from service.report_style import PHASE_COLOURS, PHASE_WORDS, STYLE

MAX_CHECKPOINT_ROWS = 50


def write_report_files(report: Report, folder: Path) -> None:
    """Write report.html, report.json and loss.png of a run into a folder.

    Raises:
        OSError: the disk is full or the folder is gone.
    """
    draw_loss_png(report, folder / "loss.png")
    (folder / "report.html").write_text(render_html(report))
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")


def render_html(report: Report) -> str:
    """The page as text: self-contained, everything of the run's own escaped."""
    colours = "".join(
        f".p-{phase} {{ fill: {colour}; background: {colour}; }}\n" for phase, colour in PHASE_COLOURS.items()
    )
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in (*report.notes, report.error) if text)
    body = [
        f'<header><h1>{escape(report.run_id)}</h1><span class="status {escape(report.status)}">'
        f"{escape(report.status)}</span></header>",
        f'<div class="quiet">{_span_words(report)}</div>{notes}',
        _tiles(report),
        f"<section><h2>Loss</h2>{_curve_keys(report)}{loss_chart(report)}</section>",
        f"<section><h2>Time</h2>{timeline(report)}{ettr_chart(report)}</section>",
        f"<section><h2>Goodput by phase</h2>{_phases(report)}</section>",
        f"<section><h2>Incidents</h2>{_incidents(report.bills)}</section>",
        f"<section><h2>Checkpoints</h2>{_checkpoints(report)}</section>",
        f"<section><h2>Where</h2>{_places(report)}</section>",
        f"<section><h2>Environment</h2>{_json_block(report.environment)}</section>",
        f"<section><details><summary>Spec</summary>{_json_block(masked_spec(report.spec))}</details></section>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.run_id)} - Packtrain</title><style>{STYLE}{colours}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def loss_text(value: float | None) -> str:
    """A loss for people."""
    return "-" if value is None else f"{value:.4f}"


def ettr_words(report: Report) -> str:
    """The effective training time ratio of the run, its last hour and its worst full hour, for people."""

    def percent(frac: float | None) -> str:
        return "-" if frac is None else f"{frac:.1%}"

    last = report.ettr_hours[-1].frac if report.ettr_hours else None
    words = f"ETTR {percent(report.goodput.ettr_frac)}, last hour {percent(last)}"
    worst = report.ettr_worst_hour_frac
    return words if worst is None else f"{words}, worst {percent(worst)}"


def _span_words(report: Report) -> str:
    goodput = report.goodput
    if not goodput.wall_us:
        return "no time on record"
    start, end = (
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(us / 1e6))
        for us in (goodput.start_us, goodput.end_us)
    )
    return f"{start} to {end}, {duration_text(goodput.wall_us / 1e6)} of wall time"


def _tiles(report: Report) -> str:
    total = f" of {report.total_steps:,}" if report.total_steps else ""
    rate = f"{report.tokens_per_s:,.0f}" if report.tokens_per_s is not None else "-"
    mfu = f"MFU {report.mfu_frac:.1%}" if report.mfu_frac is not None else "median of a step"
    tiles = [
        (f"{report.steps:,}", f"steps{total}"),
        (
            f"{loss_text(report.first_loss)} &rarr; {loss_text(report.final_loss)}",
            "training loss, first to last",
        ),
        (loss_text(report.final_eval_loss), "last evaluation loss"),
        (f"{report.goodput.goodput_frac:.1%}", f"goodput: time in steps that counted; {ettr_words(report)}"),
        (rate, f"tokens/s, {mfu}"),
        (f"{report.tokens_seen:,}", "tokens trained"),
        (f"{report.attempts} / {report.restarts}", "attempts / restarts in place"),
        (f"{report.lost_steps:,}", "steps trained for nothing"),
    ]
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{cells}</div>'


def _curve_keys(report: Report) -> str:
    keys = ['<span><i class="key" style="border-color: var(--train)"></i>training, mean of each step</span>']
    if report.eval_losses:
        keys.append('<span><i class="key" style="border-color: var(--eval)"></i>evaluation</span>')
    if report.bills:
        keys.append('<span><i class="key" style="border-color: var(--bad)"></i>incident, by number</span>')
    if report.lost:
        keys.append(
            '<span><i class="swatch lost" style="background: var(--bad)"></i>steps trained again</span>'
        )
    n_left_out = sum(not math.isfinite(point.value) for point in report.losses)
    if n_left_out:
        keys.append(f"<span>{n_left_out} non-finite losses cannot be drawn</span>")
    return f'<div class="keys">{"".join(keys)}</div>'


def _phases(report: Report) -> str:
    wall_us, phases = report.goodput.wall_us, report.goodput.phases_us
    if not wall_us:
        return '<p class="quiet">No time is on record.</p>'
    most = max(phases.values())
    rows = [
        f'<tr><td><i class="swatch p-{phase}"></i>{phase}</td><td class="quiet">{PHASE_WORDS[phase]}</td>'
        f'<td class="n">{us / 1e6:,.2f} s</td><td class="n">{us / wall_us:.1%}</td>'
        f'<td class="bars"><div class="bar p-{phase}" style="width: {100 * us / most:.2f}%"></div></td></tr>'
        for phase, us in sorted(phases.items(), key=lambda item: -item[1])
        if us
    ]
    rows.append(
        '<tr><td><b>sum</b></td><td class="quiet">wall time</td>'
        f'<td class="n"><b>{wall_us / 1e6:,.2f} s</b></td><td class="n">100.0%</td><td></td></tr>'
    )
    return f"<table>{''.join(rows)}</table>"


def _incidents(bills: Iterable[IncidentBill]) -> str:
    rows = []
    for number, bill in enumerate(bills, start=1):
        event = bill.event
        reason = event.text("reason")
        rows.append(
            f'<tr class="joined"><td>{number}</td><td>{escape(event.text("class"))}</td>'
            f"<td>{escape(event.text('culprit'))}</td>"
            f'<td class="n">{event.integer("step"):,}</td><td>{escape(event.text("action"))}'
            f'<div class="quiet">{escape(reason)}</div>'
            f'<div class="quiet">{escape(handling_words(event))}</div></td>'
            f'<td class="n">{bill.detect_s:.2f} s</td>'
            f'<td class="n">{bill.decide_s:.2f} s</td><td class="n">{bill.relaunch_s:.2f} s</td>'
            f'<td class="n">{bill.reload_s:.2f} s</td><td class="n">{bill.redo_s:.2f} s</td>'
            f'<td class="n">{bill.lost_steps:,}</td><td class="n">{bill.total_s:.2f} s</td></tr>'
            f'<tr><td></td><td colspan="10"><details><summary>evidence</summary>'
            f'<pre class="evidence">{escape(event.text("evidence"))}</pre></details></td></tr>'
        )
    if not rows:
        return '<p class="quiet">None.</p>'
    heads = (
        "#",
        "class",
        "culprit",
        "n step",
        "action",
        "n detect",
        "n decide",
        "n restart",
        "n reload",
        "n recompute",
        "n lost steps",
        "n in all",
    )
    return f"<table>{_head(heads)}{''.join(rows)}</table>"


def _checkpoints(report: Report) -> str:
    if not report.checkpoints:
        return '<p class="quiet">None.</p>'
    shown = report.checkpoints[-MAX_CHECKPOINT_ROWS:]
    rows = [
        f'<tr><td class="n">{note.step if note.step >= 0 else "-"}</td><td>{escape(note.outcome)}</td>'
        f'<td class="n">{_size(note)}</td><td class="n">{_write_time(note)}</td>'
        f"<td>{escape(': '.join(filter(None, (note.path, note.note))))}</td></tr>"
        for note in reversed(shown)
    ]
    left = len(report.checkpoints) - len(shown)
    more = f'<p class="quiet">and {left} earlier ones</p>' if left else ""
    heads = ("n step", "outcome", "n size", "n written in", "where, or why not")
    return f"<table>{_head(heads)}{''.join(rows)}</table>{more}"


def _size(note: CheckpointNote) -> str:
    return f"{note.n_bytes / 2**20:,.1f} MiB" if note.n_bytes else "-"


def _write_time(note: CheckpointNote) -> str:
    return f"{note.write_s:.2f} s" if note.outcome == "committed" else "-"


def _head(titles: Iterable[str]) -> str:
    """A table head; titles that begin with `n ` are of columns of figures."""
    cells = (
        f'<th class="n">{title[2:]}</th>' if title.startswith("n ") else f"<th>{title}</th>"
        for title in titles
    )
    return f"<tr>{''.join(cells)}</tr>"


def _places(report: Report) -> str:
    unsent = f" ({report.mlflow_unsent} lines not sent yet)" if report.mlflow_unsent else ""
    rows = {
        "run folder": report.run_dir,
        "newest checkpoint": report.checkpoint_dir or "none",
        "MLflow run": f"{report.mlflow_run_id or 'none'}{unsent}",
        "MLflow store": report.mlflow_uri or "none",
    }
    cells = "".join(f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _json_block(values: Mapping[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(values, indent=2, default=str))}</pre>"
