"""The feed against a real MLflow server behind a proxy that fails in every way a server can."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from mlflow.tracking import MlflowClient

from ops.ledger import MetricsWriter
from service import tracking_feed
from service.provenance import collect_environment
from service.tracking_feed import TrackingFeed
from service.tracking_run import open_command, settle
from tests.support.mlflow_server import FaultyProxy, mlflow_server
from tests.support.runs import make_run, step_record, tiny_spec

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what MLflow stands on
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def server_port(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("server")) as port:
        yield port


@pytest.fixture
def proxy(server_port):
    proxy = FaultyProxy(server_port)
    yield proxy
    proxy.close()


class Stage:
    """A run folder, its feed, and a view of the server that does not go through the proxy."""

    def __init__(self, tmp_path, proxy, server_port):
        self.spec = tiny_spec(tmp_path, proxy.uri, experiment=tmp_path.name)
        self.run_dir, self.ledger = make_run(tmp_path, self.spec)
        self.ledger.write("run_created", at=999.0)
        self.ledger.write("attempt_started", at=999.5, attempt=0, world_size=2)
        self.metrics = MetricsWriter(self.run_dir / "metrics.jsonl", 0, 0)
        self.lines = []
        self.client = MlflowClient(f"http://127.0.0.1:{server_port}")
        self.experiment = tmp_path.name

    def feed(self):
        return TrackingFeed(self.run_dir, self.spec, self.lines.append, interval_s=0.1)

    def train(self, first, last):
        for step in range(first, last + 1):
            self.metrics.write_step(step_record(step, loss=100.0 - step), at=1000.0 + step)

    def runs(self):
        experiment = self.client.get_experiment_by_name(self.experiment)
        return self.client.search_runs([experiment.experiment_id]) if experiment else []

    def steps(self):
        (run,) = self.runs()
        return [(m.step, m.timestamp) for m in self.client.get_metric_history(run.info.run_id, "train/loss")]

    def wait_for(self, condition, limit_s=60.0):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError(f"not within {limit_s} s; the feed said: {self.lines}")


@pytest.fixture
def stage(tmp_path, proxy, server_port):
    return Stage(tmp_path, proxy, server_port)


def expected(last):
    return [(step, 1_000_000 + 1000 * step) for step in range(1, last + 1)]


def test_a_run_from_start_to_end(stage):
    feed = stage.feed()
    feed.start()
    stage.train(1, 10)
    stage.ledger.write(
        "incident",
        **{"class": "worker_killed"},
        culprit="rank 1",
        action="RESTART_RANKS",
        step=10,
        evidence="-9",
    )
    assert feed.flush(60.0)
    assert stage.steps() == expected(10)
    (run,) = stage.runs()
    assert run.info.status == "RUNNING"
    assert feed.mlflow_run_id == run.info.run_id
    (stage.run_dir / "report.html").write_text("<html></html>")
    (stage.run_dir / "loss.png").write_bytes(b"png")
    stage.train(11, 12)
    feed.close("FINISHED", timeout_s=60.0)
    assert stage.lines == []
    assert stage.steps() == expected(12)
    (run,) = stage.runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.0003"
    assert run.data.tags["packtrain.version.torch"]
    assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    assert any(key.startswith("packtrain.incident.") for key in run.data.tags)
    assert "system/memory_percent" in run.data.metrics
    assert run.data.metrics["ops/incidents"] == 1
    names = {item.path for item in stage.client.list_artifacts(run.info.run_id)}
    assert {"spec.json", "environment.json", "report.html", "loss.png", "events.json"} <= names
    assert settle(stage.run_dir, stage.spec, "FINISHED") is None
    assert open_command(stage.run_dir, stage.spec) == stage.spec.tracking.mlflow_uri


@pytest.mark.parametrize("mode", ["refuse", "500", "cut"])
def test_a_server_that_fails_from_the_start_is_told_later_in_one_run(stage, proxy, mode):
    """radixark/miles#2571, case (a); mlflow/mlflow#11782: a cut answer makes no second run."""
    proxy.set_mode(mode)
    feed = stage.feed()
    feed.start()
    stage.train(1, 5)
    stage.wait_for(lambda: any("takes no figures now" in line for line in stage.lines))
    stage.train(6, 10)
    proxy.set_mode("pass")
    assert feed.flush(60.0)
    stage.train(11, 12)
    feed.close("FINISHED", timeout_s=60.0)
    assert stage.steps() == expected(12)
    assert [run.info.status for run in stage.runs()] == ["FINISHED"]
    assert len(stage.lines) == 2
    assert "answers again" in stage.lines[1]


@pytest.mark.parametrize("mode", ["500", "cut", "refuse"])
def test_a_server_that_fails_on_the_way_costs_no_step_and_no_point(stage, proxy, mode):
    """radixark/miles#2571, case (b)."""
    feed = stage.feed()
    feed.start()
    stage.train(1, 10)
    assert feed.flush(60.0)
    proxy.set_mode(mode)
    began = time.monotonic()
    stage.train(11, 200)
    assert time.monotonic() - began < 1.0
    stage.wait_for(lambda: any("takes no figures now" in line for line in stage.lines))
    proxy.set_mode("pass")
    feed.close("STOPPED", timeout_s=60.0)
    assert stage.steps() == expected(200)
    assert [run.info.status for run in stage.runs()] == ["KILLED"]


def test_a_server_that_hangs_at_the_end_holds_nobody_and_is_told_by_the_next_report(stage, proxy):
    """radixark/miles#2571, case (c)."""
    feed = stage.feed()
    feed.start()
    stage.train(1, 10)
    assert feed.flush(60.0)
    proxy.set_mode("hang")
    stage.train(11, 40)
    began = time.monotonic()
    feed.close("FINISHED", timeout_s=2.0)
    assert time.monotonic() - began < 5.0
    (line,) = [line for line in stage.lines if "were not sent" in line]
    assert "30 lines of figures" in line
    assert str(stage.run_dir / "metrics.jsonl") in line
    began = time.monotonic()
    problem = settle(stage.run_dir, stage.spec, "FINISHED", timeout_s=1.0)
    assert "30 lines" in problem
    assert time.monotonic() - began < 3.0
    proxy.set_mode("pass")
    stage.wait_for(lambda: settle(stage.run_dir, stage.spec, "FINISHED") is None)
    assert stage.steps() == expected(40)
    assert [run.info.status for run in stage.runs()] == ["FINISHED"]


def test_a_refused_tag_is_a_line_and_the_figures_follow(stage, monkeypatch):
    facts = collect_environment(stage.run_dir)
    facts["versions"]["no#tag"] = "1.0"
    monkeypatch.setattr(tracking_feed, "collect_environment", lambda _folder: facts)
    feed = stage.feed()
    feed.start()
    stage.train(1, 10)
    assert feed.flush(60.0)
    feed.close("FINISHED", timeout_s=60.0)
    (line,) = stage.lines
    assert "refused 1 of this run's parameters and tags" in line
    assert "packtrain.version.no#tag (" in line
    assert stage.steps() == expected(10)
    (run,) = stage.runs()
    assert run.data.tags["packtrain.version.torch"]
    assert run.data.params["optim.lr"] == "0.0003"
    assert run.info.status == "FINISHED"


def test_a_feed_that_cannot_begin_says_so_and_tries_again(stage, monkeypatch):
    real, tries = tracking_feed.new_pump, []

    def fails_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise OSError("no more file handles")
        return real(*arguments)

    monkeypatch.setattr(tracking_feed, "new_pump", fails_once)
    feed = stage.feed()
    feed.start()
    stage.train(1, 10)
    assert feed.flush(60.0)
    feed.close("FINISHED", timeout_s=60.0)
    assert ["no more file handles" in line for line in stage.lines] == [True, False]
    assert stage.steps() == expected(10)


DRIVER = """
import sys, time
from pathlib import Path
from jobs.spec.load import spec_from_json
from service.tracking_feed import TrackingFeed
run_dir = Path(sys.argv[1])
feed = TrackingFeed(run_dir, spec_from_json((run_dir / "spec.json").read_text()), print, interval_s=0.1)
feed.start()
print(feed.flush(60.0), flush=True)
time.sleep(100)
"""


def test_a_killed_driver_leaves_a_failed_run_that_a_resume_goes_on_with(stage):
    """NVIDIA-NeMo/Automodel#2231: runs whose process was killed stayed RUNNING, or were FINISHED."""
    stage.train(1, 5)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(stage.run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout.readline() == "True\n"
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    assert [run.info.status for run in stage.runs()] == ["RUNNING"]
    stage.train(6, 8)
    assert settle(stage.run_dir, stage.spec, "FAILED", timeout_s=60.0) is None
    assert [run.info.status for run in stage.runs()] == ["FAILED"]
    assert stage.steps() == expected(8)
    feed = stage.feed()
    feed.start()
    stage.train(9, 10)
    assert feed.flush(60.0)
    assert [run.info.status for run in stage.runs()] == ["RUNNING"]
    feed.close("FINISHED", timeout_s=60.0)
    assert [run.info.status for run in stage.runs()] == ["FINISHED"]
    assert stage.steps() == expected(10)


def test_without_mlflow_nothing_is_sent_and_the_environment_is_still_recorded(stage, proxy):
    tracking = stage.spec.tracking.model_copy(update={"mlflow": False})
    stage.spec = stage.spec.model_copy(update={"tracking": tracking})
    feed = stage.feed()
    feed.start()
    stage.train(1, 3)
    assert feed.flush() is True
    feed.close("FINISHED", timeout_s=60.0)
    assert settle(stage.run_dir, stage.spec, "FINISHED") is None
    assert proxy.n_requests == 0
    assert stage.lines == []
    assert json.loads((stage.run_dir / "environment.json").read_text())["versions"]["torch"]
