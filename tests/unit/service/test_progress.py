import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jobs.events import EvalRecord
from ops.ledger import Event, LedgerWriter, MetricsWriter
from service.progress import ProgressView, duration_text, event_line
from tests.support.runs import step_record


def plain(run_dir, total_steps=10):
    out = io.StringIO()
    return ProgressView(run_dir, total_steps, Console(file=out, width=80)), out


def test_a_plain_line_a_step_without_a_terminal(tmp_path):
    view, out = plain(tmp_path)
    view.poll()
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0, 0)
    for step in (1, 2, 3):
        writer.write_step(step_record(step, loss=4.0 - step))
    view.poll()
    view.poll()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 1/10", "loss 3.0000"],
        ["step 2/10", "loss 2.0000"],
        ["step 3/10", "loss 1.0000"],
    ]
    assert "200 tokens/s" in lines[2]
    assert "attempt 0" in lines[2]
    assert "ETA 4 s" in lines[2]  # 7 steps of 0.5 s


def test_a_slow_step_is_slow_alone_and_a_resume_starts_no_sum(tmp_path):
    """allenai/open-instruct#1032: rates are of steps, and padding does not count."""
    history = MetricsWriter(tmp_path / "metrics.jsonl", 0, 0)
    for step in range(1, 26):
        history.write_step(step_record(step))
    view, out = plain(tmp_path, 50)
    view.poll()
    assert out.getvalue() == ""
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 1, 0)
    for step in range(26, 32):
        slow_s = 1.0 if step == 28 else 0.0
        writer.write_step(step_record(step, step_time_s=0.5 + slow_s, n_padding_tokens=100))
    view.poll()
    rates = [line.split(" tokens/s")[0].split("  ")[-1] for line in out.getvalue().splitlines()]
    assert rates == ["200", "200", "67", "200", "200", "200"]
    assert "ETA 10 s" in out.getvalue().splitlines()[-1]
    assert "attempt 1" in out.getvalue()


def test_events_and_evaluations_are_lines_of_their_own(tmp_path):
    view, out = plain(tmp_path)
    ledger = LedgerWriter(tmp_path / "ledger" / "coordinator.jsonl")
    ledger.write("checkpoint_committed", step=2, n_bytes=2**29, write_s=0.25, path="p")
    ledger.write(
        "incident",
        **{"class": "worker_killed"},
        culprit="rank 1 [node a]",
        action="RESTART_RANKS",
        step=4,
        reason="why",
    )
    ledger.write("ranks_started", attempt=0, generation=1)
    ledger.write("restored", attempt=0, generation=1, step=2, load_s=0.5)
    ledger.write("checkpoint_failed", step=6, path="p", error="No space left on device", n_bytes=0)
    MetricsWriter(tmp_path / "metrics.jsonl", 0, 1).write_eval(EvalRecord(2, 3.5, 10, 0.125))
    view.close()
    assert out.getvalue().splitlines() == [
        "checkpoint of step 2 committed: 0.500 GiB in 0.25 s",
        "incident: worker_killed: rank 1 [node a], step 4 -> RESTART_RANKS (why)",
        "ranks started again (generation 1)",
        "training goes on after step 2 (checkpoint read in 0.50 s)",
        "checkpoint of step 6 FAILED, the run goes on: No space left on device",
        "evaluation after step 2: loss 3.5000 (0.12 s)",
    ]
    assert event_line(Event(1.0, "ranks_started", "c", {"attempt": 0, "generation": 0})) is None


def test_non_finite_losses_and_torn_lines_are_shown_or_passed_over(tmp_path):
    view, out = plain(tmp_path)
    MetricsWriter(tmp_path / "metrics.jsonl", 0, 0).write_step(
        step_record(1, loss=float("nan"), skipped=True)
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 2, "loss": "inf"}\n{"step"')
    view.poll()
    first, second = out.getvalue().splitlines()
    assert "loss nan" in first
    assert "SKIPPED" in first
    assert "loss inf" in second


SCRIPT = """
import sys, time
from pathlib import Path
from ops.ledger import LedgerWriter, MetricsWriter
from service.progress import ProgressView
from tests.support.runs import step_record
run = Path(sys.argv[1])
view = ProgressView(run, 4)
writer = MetricsWriter(run / "metrics.jsonl", 0, 1)
LedgerWriter(run / "ledger" / "c.jsonl").write("ranks_started", attempt=0, generation=1)
for step in (1, 2, 3):
    writer.write_step(step_record(step, loss=1.5))
    view.poll()
view.say("a line above the bar")
view.close()
"""


def test_a_bar_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd())}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=theirs, stderr=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(ours)
    errors = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait() == 0, errors
    text = drawn.decode()
    assert "step 3/4" in text
    assert "loss 1.5000" in text
    assert "200 tokens/s" in text
    assert "attempt 0.1" in text
    assert "a line above the bar" in text
    assert "ranks started again" in text
    assert "grad_norm" not in text  # no line a step beside the bar
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (float("inf"), "?"), (0.4, "0 s"), (187, "3:07"), (7509, "2:05:09"), (273_600, "3 d 4 h")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
