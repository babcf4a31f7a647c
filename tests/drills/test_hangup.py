"""The terminal of a run is closed: it saves and stops, and under nohup it goes on."""

import signal
from pathlib import Path

import pytest

from tests.support.live_runs import live_run

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]


def test_a_closed_terminal_saves_and_stops(tmp_path: Path) -> None:
    with live_run(tmp_path, "hung-up", "train.steps=3000", "checkpoint.every_steps=1000") as run:
        run.until_step(5)
        run.process.send_signal(signal.SIGHUP)
        assert run.wait() == 3, run.text()
        assert [event["status"] for event in run.events("run_ended")] == ["STOPPED"]
        assert [event["step"] for event in run.events("checkpoint_committed")] == [run.last_step()]


def test_under_nohup_it_goes_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does: children inherit it
    try:
        with live_run(tmp_path, "nohup", "train.steps=200") as run:
            run.until_step(5)
            run.process.send_signal(signal.SIGHUP)
            assert run.wait() == 0, run.text()
            assert run.last_step() == 200
    finally:
        signal.signal(signal.SIGHUP, before)
