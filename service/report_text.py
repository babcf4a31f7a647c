"""One run in the terminal: a compact table, its incidents with their bill, and where everything lies.

Prints what ops.report has summed up; the page is report_html.py.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.incident_rows import handling_words
from ops.report import Report
from service.progress import duration_text
from service.report_html import ettr_words, loss_text
from service.report_style import PHASE_WORDS

COLOURS = {"FINISHED": "green", "FAILED": "red", "RUNNING": "blue"}


def print_report(report: Report, console: Console, open_mlflow: str = "") -> None:
    """Print the report.

    Args:
        report: of the run.
        console: where to.
        open_mlflow: the command or address that shows the run in MLflow; empty where it is not tracked.
    """
    console.print(
        Text.assemble((report.run_id, "bold"), "  ", (report.status, COLOURS.get(report.status, "yellow")))
    )
    for text in (*report.notes, report.error):
        if text:
            console.print(Text(text, "red"))
    console.print(_figures(report))
    console.print(_phases(report))
    if report.bills:
        console.print(_incidents(report))
        console.print(_bills(report))
    for name, place in _places(report, open_mlflow).items():
        console.print(f"{name:<12}{place}", markup=False, highlight=False, soft_wrap=True)


def _figures(report: Report) -> Table:
    total = f" of {report.total_steps:,}" if report.total_steps else ""
    rate = f"{report.tokens_per_s:,.0f} tokens/s" if report.tokens_per_s is not None else "-"
    mfu = f", MFU {report.mfu_frac:.1%}" if report.mfu_frac is not None else ""
    rows = {
        "steps": f"{report.steps:,}{total}",
        "loss": f"{loss_text(report.first_loss)} -> {loss_text(report.final_loss)}",
        "evaluation": loss_text(report.final_eval_loss),
        "speed": f"{rate}{mfu} (median of a step)",
        "tokens": f"{report.tokens_seen:,}",
        "attempts": f"{report.attempts}, {report.restarts} restarts in place, {len(report.bills)} incidents",
        "lost": f"{report.lost_steps:,} steps trained for nothing",
        "wall time": duration_text(report.goodput.wall_us / 1e6),
        "goodput": f"{report.goodput.goodput_frac:.1%} of the wall time; {ettr_words(report)}",
    }
    if "layout" in report.environment:
        rows["layout"] = f"{report.environment['layout']}, {report.environment.get('world_size', '-')} ranks"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), value)
    return table


def _phases(report: Report) -> Table:
    table = Table(
        "phase", "seconds", "share", "what", title="where the time went", title_justify="left", box=None
    )
    for column in table.columns[1:3]:
        column.justify = "right"
    wall_us = report.goodput.wall_us
    for phase, us in sorted(report.goodput.phases_us.items(), key=lambda item: -item[1]):
        if us:
            table.add_row(
                phase.value, f"{us / 1e6:,.2f}", f"{us / wall_us:.1%}", Text(PHASE_WORDS[phase], "dim")
            )
    return table


def _incidents(report: Report) -> Table:
    heads = ("#", "class", "culprit", "step", "action", "to notice", "to train again", "lost steps", "how")
    table = Table(*heads, title="incidents", title_justify="left", box=None)
    for number, bill in enumerate(report.bills, start=1):
        event = bill.event
        table.add_row(
            str(number),
            Text(event.text("class")),
            Text(event.text("culprit")),
            str(event.integer("step")),
            Text(event.text("action")),
            f"{bill.detect_s:.2f} s",
            f"{bill.restart_s:.2f} s",
            str(bill.lost_steps),
            Text(handling_words(event)),
        )
    return table


def _bills(report: Report) -> Table:
    heads = ("#", "detect", "decide", "restart", "reload", "recompute", "in all")
    table = Table(*heads, title="what they cost, in seconds", title_justify="left", box=None)
    for column in table.columns:
        column.justify = "right"
    for number, bill in enumerate(report.bills, start=1):
        parts = (bill.detect_s, bill.decide_s, bill.relaunch_s, bill.reload_s, bill.redo_s, bill.total_s)
        table.add_row(str(number), *(f"{part_s:,.2f}" for part_s in parts))
    return table


def _places(report: Report, open_mlflow: str) -> dict[str, str]:
    page = str(Path(report.run_dir) / "report.html")
    places = {"run folder": report.run_dir, "page": page, "checkpoint": report.checkpoint_dir or "none"}
    if open_mlflow:
        unsent = f"; {report.mlflow_unsent} lines not sent yet" if report.mlflow_unsent else ""
        places["MLflow"] = (
            f"run {report.mlflow_run_id or 'not made yet'}{unsent}; open it with: {open_mlflow}"
        )
    return places
