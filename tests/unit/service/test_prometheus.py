"""A real Prometheus scrapes a run, loads the alert rules, and answers every query of the dashboards."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml

from jobs.events import EvalRecord
from ops.ledger import MetricsWriter
from ops.node_book import NodeBook
from ops.quarantine import ChangeKind, NodeChange, Owner
from service.metrics_server import MetricsServer
from service.run_follower import RunFollower
from tests.support.runs import make_run, step_record, tiny_spec

OPS = Path(__file__).resolve().parents[3] / "ops"

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@pytest.fixture
def run_dir(tmp_path):
    """A driven run of a minute ago with a crash, saves, an evaluation, a bad node and spares."""
    spec = tiny_spec(tmp_path)
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every_steps": 2})})
    run_dir, ledger = make_run(tmp_path, spec)
    me, start = psutil.Process(), time.time() - 60
    known = json.loads((run_dir / "run.json").read_text())
    driver = {
        "driver_pid": me.pid,
        "driver_host": socket.gethostname(),
        "driver_started_at": me.create_time(),
    }
    (run_dir / "run.json").write_text(json.dumps({**known, **driver}))
    ledger.write("run_created", at=start)
    ledger.write("attempt_started", at=start + 1, attempt=0, world_size=2)
    ledger.write("ranks_started", at=start + 2, attempt=0, generation=0)
    ledger.write("restored", at=start + 3, attempt=0, generation=0, step=0, load_s=0.0)
    ledger.write("checkpoint_blocked", at=start + 6, step=2, blocked_s=0.25)
    ledger.write("checkpoint_committed", at=start + 6, step=2, n_bytes=9, write_s=0.5, path="step-00000002")
    ledger.write("checkpoint_failed", at=start + 7, step=2, error="disk full")
    what = {"class": "gpu_hardware", "culprit": "gpu 0 (node 10.0.0.3)", "action": "RESTART_RANKS", "step": 4}
    who = {"attempt": 0, "generation": 0}
    ledger.write("incident", at=start + 11, failed_at=start + 10, detected_at=start + 10.5, **what, **who)
    ledger.write("ranks_started", at=start + 12, attempt=0, generation=1)
    ledger.write("restored", at=start + 13, attempt=0, generation=1, step=2, load_s=0.5)
    ledger.write("spares", at=start + 13, available=0, planned=2)
    more = {"mfu_frac": 0.4, "memory_bytes": 2**30, "bubble_frac": 0.1}
    for generation, steps, begun in ((0, (1, 2, 3, 4), 4), (1, (3, 4, 5, 6), 13)):
        metrics = MetricsWriter(run_dir / "metrics.jsonl", attempt=0, generation=generation)
        for n, step in enumerate(steps):
            metrics.write_step(step_record(step, step_time_s=1.0), at=start + begun + n, **more)
    metrics.write_eval(EvalRecord(step=6, loss=3.5, n_tokens=50, eval_time_s=0.25), at=start + 18)
    cordon = NodeChange(start, "10.0.0.3", ChangeKind.CORDON, Owner.POLICY, n_nodes=2)
    strike = NodeChange(start, "10.0.0.3", ChangeKind.STRIKE, Owner.POLICY, weight=2.5, n_nodes=2)
    NodeBook(tmp_path).change(lambda _fleet: [strike, cordon])
    return run_dir


class Prometheus:
    """One started for a test, on loopback."""

    def __init__(self, port):
        self._base = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path, **arguments):
        url = f"{self._base}/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def query(self, expr):
        return self.get("query", query=expr)["result"]

    def wait_for(self, expr, limit_s=20.0):
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError):
                if self.query(expr):
                    return
            assert time.monotonic() < deadline, expr
            time.sleep(0.1)


@contextlib.contextmanager
def prometheus(folder, target_port):
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(OPS / "alerts" / "packtrain.yaml")],
        "scrape_configs": [
            {"job_name": "packtrain", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(20)


def dashboard_queries():
    for path in sorted((OPS / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for one in panel.get("targets", []):
                expr = one["expr"].replace("$run", "demo").replace("$__rate_interval", "1m")
                yield path.stem, panel["title"], expr


def test_every_query_of_the_dashboards_is_answered_and_the_rules_run(run_dir, tmp_path):
    with (
        MetricsServer(RunFollower(run_dir), refresh_s=0.2) as server,
        prometheus(tmp_path, server.port) as found,
    ):
        found.wait_for("count_over_time(packtrain_step[1m]) >= 3")
        found.wait_for('ALERTS{alertname="PacktrainNoSpares",alertstate="firing"}')
        (target,) = found.get("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        empty = [(board, title, expr) for board, title, expr in dashboard_queries() if not found.query(expr)]
        assert empty == []
        rules = [rule for group in found.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
        assert firing == {"PacktrainNoSpares", "PacktrainBreakerOpen"}
        assert found.query('packtrain_step{run="demo"}')[0]["value"][1] == "6"
        assert found.query('sum(packtrain_phase_seconds{run="demo"})')[0]["value"][1] > "59"
