"""The report of a run, and what a driver does last: report, export, MLflow's end."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ops.report import Report, build_report
from service.report_html import write_report_files
from service.report_text import print_report
from service.run_store import FAILED, RUNNING, read_spec, read_state, write_state
from service.tracking_feed import TrackingFeed
from service.tracking_run import open_command, settle

Say = Callable[[str], None]


def make_report(run_dir: Path, say: Say) -> Report:
    """Sum up a run and write report.html, report.json and loss.png.

    A run whose driver was killed is told to MLflow as FAILED on this occasion: nobody else is left to do it.
    """
    state = read_state(run_dir)
    is_alive = state.status == RUNNING and state.is_driver_alive(run_dir)
    if not is_alive:
        status = FAILED if state.status == RUNNING else state.status
        problem = settle(run_dir, read_spec(run_dir), status)
        if problem is not None:
            say(problem)
    report = build_report(run_dir, now=time.time(), is_driver_alive=is_alive)
    write_report_files(report, run_dir)
    return report


def show_report(report: Report, run_dir: Path) -> None:
    """Print the report."""
    print_report(report, Console(), open_command(run_dir, read_spec(run_dir)))


def finish_run(run_dir: Path, feed: TrackingFeed, status: str, export_dir: Path | None, say: Say) -> None:
    """What is left to do when the attempts are over; nothing here can change how the run ended."""
    if status == "FINISHED" and export_dir is not None:
        from service.exchange import export_checkpoint

        try:
            say(export_checkpoint(run_dir, export_dir, None, "float32"))
        except Exception as error:  # whatever it is, the books below are still to be closed
            say(f"not exported: {error}")
    feed.flush()
    try:
        _close_books(run_dir, feed)
    except Exception as error:  # of the disk, or of the library that draws
        say(f"the report could not be written: {error}")
    feed.close(status)
    show_report(build_report(run_dir), run_dir)


def _close_books(run_dir: Path, feed: TrackingFeed) -> None:
    if feed.mlflow_run_id is not None:
        write_state(run_dir, replace(read_state(run_dir), mlflow_run_id=feed.mlflow_run_id))
    write_report_files(build_report(run_dir), run_dir)
