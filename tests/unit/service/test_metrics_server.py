import gzip
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs.errors import PacktrainError, SpecError
from ops.ledger import MetricsWriter
from service.metrics_server import MetricsServer, metrics_text
from service.run_follower import RunFollower
from tests.support.runs import make_run, step_record, tiny_spec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def living(tmp_path):
    """A run that this process drives: one step done."""
    run_dir, ledger = make_run(tmp_path, tiny_spec(tmp_path))
    me, now = psutil.Process(), time.time()
    state = {
        "run_id": "demo",
        "status": "RUNNING",
        "created_at": now,
        "driver_pid": me.pid,
        "driver_host": socket.gethostname(),
        "driver_started_at": me.create_time(),
    }
    (run_dir / "run.json").write_text(json.dumps(state))
    ledger.write("run_created", at=now - 3)
    ledger.write("attempt_started", at=now - 3, attempt=0, world_size=2)
    ledger.write("ranks_started", at=now - 2.5, attempt=0, generation=0)
    ledger.write("restored", at=now - 2, attempt=0, generation=0, step=0, load_s=0.0)
    metrics = MetricsWriter(run_dir / "metrics.jsonl", attempt=0, generation=0)
    metrics.write_step(step_record(1))
    return run_dir, ledger, metrics


def scrape(port, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.headers, answer.read()


def value(text, name, **labels):
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_scrape_follows_a_living_run_and_goes_on_after_its_end(living):
    run_dir, ledger, metrics = living
    with MetricsServer(RunFollower(run_dir), refresh_s=0.02) as server:
        headers, body = scrape(server.port)
        assert headers["Content-Type"].startswith("text/plain; version=")
        assert value(body.decode(), "packtrain_step", run="demo") == 1
        assert value(body.decode(), "packtrain_run_phase", phase="step") == 1
        metrics.write_step(step_record(2))
        until(lambda: value(scrape(server.port)[1].decode(), "packtrain_step") == 2)
        ledger.write("run_ended", status="FINISHED")
        state = json.loads((run_dir / "run.json").read_text())
        (run_dir / "run.json").write_text(json.dumps({**state, "status": "FINISHED"}))
        until(lambda: value(scrape(server.port)[1].decode(), "packtrain_run_state", state="FINISHED") == 1)
        (run_dir / "run.json").unlink()  # the storage is away: the last figures stay
        (run_dir / "spec.json").write_text("{half")
        time.sleep(0.1)
        headers, body = scrape(server.port, **{"Accept-Encoding": "gzip"})
        assert value(gzip.decompress(body).decode(), "packtrain_run_state", state="FINISHED") == 1
        port = server.port
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_it_listens_on_loopback_only(living):
    with MetricsServer(RunFollower(living[0])) as server:
        listening = [c for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == server.port]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_a_taken_port_and_an_unknown_run_are_one_sentence(living, tmp_path):
    with (
        MetricsServer(RunFollower(living[0])) as server,
        pytest.raises(PacktrainError, match="choose another port"),
    ):
        MetricsServer(RunFollower(living[0]), port=server.port)
    with pytest.raises(SpecError, match="no run"):
        MetricsServer(RunFollower(tmp_path / "nobody"))


def test_a_reader_that_follows_says_what_one_that_reads_all_says(living):
    run_dir, ledger, metrics = living
    follower = RunFollower(run_dir)
    follower.samples(time.time())
    for step in range(2, 50):
        metrics.write_step(step_record(step))
    ledger.write("checkpoint_committed", step=40, n_bytes=7, write_s=0.5, path="step-00000040")
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 50, "at"')  # torn
    followed = follower.samples(time.time())  # at once: the whole is not looked at again yet
    assert followed.values["packtrain_step"][()] == 49
    assert followed.values["packtrain_generation_steps"][()] == 49
    until(lambda: time.monotonic() > follower._account_after)
    now = time.time()
    followed, whole = follower.samples(now), RunFollower(run_dir).samples(now)
    assert followed == whole
    assert followed.values["packtrain_step"][()] == 49
    assert followed.values["packtrain_checkpoint_step"][()] == 40


def test_twenty_thousand_steps_are_worked_out_in_seconds_and_scraped_at_once(living):
    run_dir = living[0]
    line = json.loads((run_dir / "metrics.jsonl").read_text())
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({**line, "step": step, "at": line["at"] + step / 1e5}) + "\n")
    with MetricsServer(RunFollower(run_dir), refresh_s=0.01) as server:
        began = time.monotonic()
        for _ in range(3):
            assert value(scrape(server.port)[1].decode(), "packtrain_step") == 20_000
        assert (time.monotonic() - began) / 3 < 1.0


def test_the_verb_serves_and_prints(living):
    run_dir = living[0]
    assert value(metrics_text(run_dir), "packtrain_step") == 1
    command = [sys.executable, "-m", "service", "metrics", str(run_dir)]
    once = subprocess.run([*command, "--once"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert value(once.stdout + "\n", "packtrain_step", run="demo") == 1
    served = subprocess.Popen([*command, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        address = served.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=5) as answer:
            assert value(answer.read().decode(), "packtrain_step", run="demo") == 1
        served.send_signal(signal.SIGINT)
        assert served.wait(10) == 0
    finally:
        served.kill()
        served.wait()
        served.stdout.close()
