"""A live run tells people, Prometheus and MLflow of a killed rank; dead and hanging targets hold nobody."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from mlflow.tracking import MlflowClient
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_target import dead_port, target
from tests.support.live_runs import ROOT, live_run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what MLflow stands on
]
SECRET = "s3cr3t-t0ken"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(samples, name, **labels):
    return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


def test_a_killed_rank_is_told_to_people_prometheus_and_mlflow(tmp_path, monkeypatch):
    port = free_port()
    with target() as (good, got), target(answer_after_s=60) as (slow, _):
        env = {
            "OPS_CHAT": f"json://user:{SECRET}@127.0.0.1:{good}/{SECRET}",
            "OPS_SLOW": f"json://user:{SECRET}@127.0.0.1:{slow}/",
            "OPS_DEAD": f"json://127.0.0.1:{dead_port()}/?token={SECRET}",
        }
        overrides = (
            "tracking.mlflow=true",
            "tracking.notify=['${OPS_SLOW}', '${OPS_DEAD}', '${OPS_CHAT}', '${OPS_UNSET}']",
            f"tracking.metrics_port={port}",
            "train.steps=5000",
            "checkpoint.every_steps=10",
        )
        with live_run(tmp_path, "told", *overrides, env=env) as run, socket.socket() as hanging:
            run.until_step(12)
            hanging.connect(("127.0.0.1", port))  # a scraper that does not end its question
            hanging.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            os.kill(run.pid_of("packtrain[told] rank 0:"), signal.SIGKILL)
            run.until(lambda: len(got) >= 2, "two messages")
            run.until(lambda: values(scraped(port), "packtrain_incidents_total"), "a scrape of the incident")
            seen = scraped(port)
            subprocess.run(
                [sys.executable, "-m", "service", "stop", "told", "--storage", str(tmp_path / "runs")],
                cwd=ROOT,
                check=True,
                timeout=90,
                capture_output=True,
            )
            assert run.wait(60) == 3, run.text()
            output = run.text()
    titles = [message["title"] for message in got]
    assert titles[0].startswith("told: worker_killed, rank 0 (node ")
    assert titles[1] == f"{titles[0]}: over"
    assert titles[-1] == "told: STOPPED"
    assert len(titles) == 3
    assert "OPS_UNSET is not set where the driver runs" in output
    assert "notifications, target 1 (json): " in output
    assert "notifications, target 2 (json): " in output

    assert values(seen, "packtrain_incidents_total", action="RESTART_RANKS") == [1.0]
    (node,) = {s.labels["node"] for s in seen if s.name == "packtrain_node_incidents_total"}
    assert f"(node {node})" in titles[0]
    for name in ("goodput_ratio", "tokens_per_second", "step_duration_median_seconds", "checkpoint_step"):
        assert values(seen, f"packtrain_{name}", run="told")[0] > 0
    assert values(seen, "packtrain_ettr_ratio", window="1h")[0] > 0
    assert sum(values(seen, "packtrain_phase_seconds")) > 0

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs' / 'mlflow' / 'mlflow.db'}")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("packtrain")
    (stored,) = client.search_runs([experiment.experiment_id])
    (incident,) = [text for key, text in stored.data.tags.items() if key.startswith("packtrain.incident.")]
    assert incident.startswith("worker_killed | rank 0 (node ")
    assert " | restart " in incident
    assert 0 < stored.data.metrics["ops/goodput_frac"] < 1
    assert "incidents.json" in stored.data.tags["mlflow.loggedArtifacts"]
    table = client.load_table(experiment.experiment_id, "incidents.json", [stored.info.run_id])
    assert table[["class", "action", "lost_steps"]].values.tolist()[0][:2] == [
        "worker_killed",
        "RESTART_RANKS",
    ]

    assert SECRET not in output
    grep = shutil.which("grep")
    assert grep is not None
    found = subprocess.run(
        [grep, "-rlaF", SECRET, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
