"""What a run looks like while it runs: a bar on a terminal, a plain line a step elsewhere.

Reads the run folder only. Rates are those of steps, never a sum since the start: they are right after a
resume, and a slow step is slow alone. Sums nothing up: see report_text.py.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ops.ledger import METRICS_FILE, Event, LedgerTail, Tail, number

RATE_WINDOW_STEPS = 20
"""Steps whose median is shown as the rate, and on which the time to the end rests."""
GIB = 2**30


class ProgressView:
    """Follows one run from the driver; poll it about five times a second. Bad lines are passed over."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console | None = None) -> None:
        """Skip what is in the run folder already: a resumed run shows what is new.

        Args:
            run_dir: the run's folder.
            total_steps: train.steps of the spec.
            console: where to draw; None takes standard output.
        """
        self._console = console or Console()
        self._total_steps = total_steps
        self._metrics, self._ledger = Tail(run_dir / METRICS_FILE), LedgerTail(run_dir)
        self._last: Mapping[str, Any] = {}
        self._times_s: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)
        self._rates: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)
        self._attempt = self._generation = 0
        self._progress: Progress | None = None
        self._task = TaskID(0)
        while lines := self._metrics.read():
            self._last = ([line for line in lines if "kind" not in line] or [self._last])[-1]
        self._ledger.read()
        if self._console.is_terminal:
            self._start_bar()

    def poll(self) -> None:
        """Draw what is new; costs next to nothing when nothing is."""
        for event in self._ledger.read():
            self._attempt = event.integer("attempt", self._attempt)
            if event.kind in ("attempt_started", "ranks_started"):
                self._generation = event.integer("generation")
            line = event_line(event)
            if line:
                self.say(line)
        for record in self._metrics.read():
            if record.get("kind") == "eval":
                self.say(eval_line(record))
            elif "kind" not in record:
                self._take_step(record)
        self._draw()

    def say(self, line: str) -> None:
        """Show one line, above the bar where there is one. Safe from other threads."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw what is new, then leave the terminal as it was."""
        self.poll()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _take_step(self, record: Mapping[str, Any]) -> None:
        self._last = record
        for window, name in ((self._times_s, "step_time_s"), (self._rates, "tokens_per_s")):
            value = number(record.get(name))
            if value is not None and math.isfinite(value):
                window.append(value)
        if self._progress is None:
            self.say(step_line(record, self._total_steps, self._eta_s()))

    def _eta_s(self) -> float | None:
        left = self._total_steps - int(number(self._last.get("step")) or 0)
        return max(0, left) * statistics.median(self._times_s) if self._times_s else None

    def _start_bar(self) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        done = int(number(self._last.get("step")) or 0)
        self._task = self._progress.add_task("", total=self._total_steps, completed=done, figures="starting")
        self._progress.start()

    def _draw(self) -> None:
        if self._progress is None or not self._times_s:
            return
        loss, rate = _figure(self._last.get("loss")), statistics.median(self._rates or [0.0])
        attempt = f"attempt {self._attempt}" + (f".{self._generation}" if self._generation else "")
        figures = f"loss {loss}  {rate:,.0f} tokens/s  ETA {duration_text(self._eta_s())}  {attempt}"
        step = int(number(self._last.get("step")) or 0)
        self._progress.update(self._task, completed=step, figures=figures)
        self._progress.refresh()


def step_line(record: Mapping[str, Any], total_steps: int, eta_s: float | None = None) -> str:
    """One step as a plain line."""
    words = [
        f"step {record.get('step')}/{total_steps}",
        f"loss {_figure(record.get('loss'))}",
        f"grad_norm {_figure(record.get('grad_norm'))}",
        f"lr {_figure(record.get('lr'), '.3g')}",
        f"{_figure(record.get('tokens_per_s'), ',.0f')} tokens/s",
        f"{_figure(record.get('step_time_s'), '.3f')} s",
        f"ETA {duration_text(eta_s)}",
        f"attempt {record.get('attempt', 0)}"
        + (f".{record['generation']}" if record.get("generation") else ""),
    ]
    if record.get("skipped"):
        words.append("SKIPPED: the gradient is not finite")
    return "  ".join(words)


def eval_line(record: Mapping[str, Any]) -> str:
    """One evaluation as a plain line."""
    took = _figure(record.get("eval_time_s"), ".2f")
    return f"evaluation after step {record.get('step')}: loss {_figure(record.get('loss'))} ({took} s)"


def event_line(event: Event) -> str | None:
    """One event of the ledger as a line, None for those that a user need not see."""
    step, at_step = event.integer("step"), f"step {event.integer('step')}"
    match event.kind:
        case "incident":
            what = f"{event.text('class')}: {event.text('culprit')}, {at_step}"
            reason = event.text("reason")
            return f"incident: {what} -> {event.text('action')}" + (f" ({reason})" if reason else "")
        case "attempt_started" if event.integer("attempt") > 0:
            off = ", ".join(event.fields.get("exclude", ()))
            ranks = f"attempt {event.integer('attempt')} starts on {event.integer('world_size')} ranks"
            return ranks + (f", off node {off}" if off else "")
        case "growth":
            return f"growth: {event.text('reason')}; the ranks save and leave"
        case "nodes_awaited":
            return f"waiting for nodes with room for {event.integer('world_size')} ranks"
        case "ranks_started" if event.integer("generation") > 0:
            return f"ranks started again (generation {event.integer('generation')})"
        case "restored" if step > 0:
            return f"training goes on after {at_step} (checkpoint read in {event.seconds('load_s'):.2f} s)"
        case "checkpoint_committed":
            size, took = event.integer("n_bytes") / GIB, event.seconds("write_s")
            return f"checkpoint of {at_step} committed: {size:.3f} GiB in {took:.2f} s"
        case "checkpoint_failed":
            return f"checkpoint of {at_step} FAILED, the run goes on: {event.text('error')}"
        case "checkpoint_skipped":
            return f"checkpoint passed over: {event.text('path')}: {event.text('reason')}"
    return None


def duration_text(seconds: float | None) -> str:
    """A duration for people: 42 s, 3:07, 2:05:09, 3 d 4 h; `?` where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _figure(value: Any, form: str = ".4f") -> str:
    found = number(value)
    return "?" if found is None else format(found, form)
