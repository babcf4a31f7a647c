"""The tracker and the pump against the real sqlite store."""

import json
import math
import time

import pytest
from mlflow.tracking import MlflowClient

from ops.incident_rows import incident_table
from ops.ledger import Event, JsonLinesWriter, MetricsWriter, read_ledger
from ops.losses import IncidentBill
from ops.tracking.base import Point, TrackingRefusedError
from ops.tracking.mlflow import MlflowTracker, embedded_uri, shown_uri
from ops.tracking.pump import INCIDENTS_FILE, MlflowPump
from tests.support.runs import make_run, step_record, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow stands on


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return embedded_uri(tmp_path_factory.mktemp("storage"))


@pytest.fixture
def run(uri, tmp_path):
    spec = tiny_spec(tmp_path)
    run_dir, ledger = make_run(tmp_path, spec)
    return run_dir, ledger, MlflowPump(run_dir, uri, "packtrain")


def open_pump(pump, **params):
    pump.open("demo", 1000.0, params, {"packtrain.host": "here"}, goes_on=True)
    return MlflowClient(pump.tracker._uri), pump.cursor.mlflow_run_id


def runs_of(client, pump):
    experiment = client.get_experiment_by_name("packtrain")
    return client.search_runs(
        [experiment.experiment_id], f"tags.`packtrain.run_uid` = '{pump.cursor.run_uid}'"
    )


def test_steps_arrive_with_their_true_step_and_instant_and_once(run):
    run_dir, ledger, pump = run
    client, run_id = open_pump(pump, lr="0.1")
    writer = MetricsWriter(run_dir / "metrics.jsonl", 0, 0)
    for step in range(1, 6):
        writer.write_step(step_record(step, loss=6.0 - step), at=5000.0 + step)
    ledger.write(
        "incident", at=5003.5, **{"class": "worker_killed"}, culprit="rank 1", action="RESTART_RANKS", step=3
    )
    before = pump.cursor
    while pump.send_portion():
        pass
    pump.cursor = before  # as after a SIGKILL between the answer and the cursor's file
    while pump.send_portion():
        pass
    history = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (step, 6.0 - step, 5_000_000 + 1000 * step) for step in range(1, 6)
    ]
    stored = client.get_run(run_id)
    assert stored.data.params == {"lr": "0.1"}
    (incident,) = [text for key, text in stored.data.tags.items() if key.startswith("packtrain.incident.")]
    assert "worker_killed | rank 1 | RESTART_RANKS | step 3" in incident
    assert len(client.get_metric_history(run_id, "ops/incidents")) == 1


def test_the_next_driver_goes_on_in_the_same_mlflow_run(run, uri):
    run_dir, _, pump = run
    client, run_id = open_pump(pump, a="1", b="x" * 7000)
    pump.finish("FAILED", 2000.0, [])
    assert client.get_run(run_id).info.status == "FAILED"
    again = MlflowPump(run_dir, uri, "packtrain")
    open_pump(again, a="2", b="x" * 7000, c="3")
    assert again.cursor.mlflow_run_id == run_id
    stored = client.get_run(run_id)
    assert stored.info.status == "RUNNING"
    assert stored.data.params["a"] == "1"
    assert stored.data.params["c"] == "3"
    assert stored.data.tags["packtrain.changed.a"] == "1 -> 2"
    assert "packtrain.changed.b" not in stored.data.tags
    assert again.cursor.settled_status is None


@pytest.mark.parametrize(
    ("status", "theirs"),
    [("FINISHED", "FINISHED"), ("FAILED", "FAILED"), ("STOPPED", "KILLED"), ("PREEMPTED", "KILLED")],
)
def test_final_statuses(run, status, theirs):
    """NVIDIA-NeMo/Automodel#2231: all runs were shown as FINISHED."""
    run_dir, _, pump = run
    client, run_id = open_pump(pump)
    assert client.get_run(run_id).info.status == "RUNNING"
    (run_dir / "loss.png").write_bytes(b"png")
    pump.finish(status, 2000.5, [run_dir / "loss.png", run_dir / "absent"])
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.info.end_time) == (theirs, 2_000_500)
    assert stored.data.tags["packtrain.status"] == status
    assert [item.path for item in client.list_artifacts(run_id)] == ["loss.png"]


def test_a_run_whose_creation_was_not_answered_is_found_again(run, uri):
    run_dir, _, pump = run
    client, run_id = open_pump(pump)
    pump._keep(type(pump.cursor)(pump.cursor.mlflow_uri, pump.cursor.run_uid))  # the answer was lost
    again = MlflowPump(run_dir, uri, "packtrain")
    open_pump(again)
    assert again.cursor.mlflow_run_id == run_id
    assert len(runs_of(client, pump)) == 1


def test_mlflow_run_id_in_the_environment_changes_nothing(run, monkeypatch):
    """mlflow/mlflow#11782."""
    _, _, pump = run
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    client, run_id = open_pump(pump)
    assert run_id != "0" * 32
    assert len(runs_of(client, pump)) == 1


def test_bad_names_bad_values_and_1500_points_at_once(run, uri):
    """mlflow/mlflow#24577, #20715, #22826, #16555."""
    run_dir, _, pump = run
    client, run_id = open_pump(pump)
    bad = {"gain %": 1.0, "with space": 2.0, "x" * 300: 3.0}
    writer = MetricsWriter(run_dir / "metrics.jsonl", 0, 0)
    for step in range(1, 151):
        loss = (math.nan, math.inf, -math.inf)[step - 1] if step <= 3 else 1.0
        writer.write_step(step_record(step, loss=loss), at=1000.0 + step, **bad)
    JsonLinesWriter(run_dir / "metrics.jsonl").append({"at": 1.0, "step": "no number"})
    while pump.send_portion():
        pass
    data = client.get_run(run_id).data
    assert data.metrics["ops/nonfinite_points"] == 3
    assert data.metrics["extra/with space"] == 2.0
    assert set(pump.cursor.mapped_names) == {"extra/gain %", "extra/" + "x" * 300}
    for name, accepted in pump.cursor.mapped_names.items():
        assert data.metrics[accepted] == bad[name.removeprefix("extra/")]
    assert [m.step for m in client.get_metric_history(run_id, "train/loss")] == list(range(4, 151))
    assert all(abs(value) < 1e300 for value in data.metrics.values())
    pump.tracker.log_metrics([Point("many", float(n), n, 2000.0) for n in range(1500)])
    assert len(client.get_metric_history(run_id, "many")) == 1500


def test_points_that_the_store_refuses_are_left_out_and_counted(run):
    _, _, pump = run
    client, run_id = open_pump(pump)
    points = [Point("fine", float(n), n, 2000.0) for n in range(5)]
    points.insert(2, Point("bad", "no number", 1, 2000.0))
    assert pump._send(points) == 1
    assert len(client.get_metric_history(run_id, "fine")) == 5


@pytest.mark.timeout(240)
def test_a_hundred_thousand_points_take_reasonable_time(run):
    """mlflow/mlflow#24577."""
    run_dir, _, pump = run
    client, run_id = open_pump(pump)
    writer = MetricsWriter(run_dir / "metrics.jsonl", 0, 0)
    for step in range(1, 11_112):
        writer.write_step(step_record(step), at=1000.0 + step)
    began = time.process_time()
    while pump.send_portion():
        pass
    took_s = time.process_time() - began
    assert len(client.get_metric_history(run_id, "train/loss")) == 11_111
    assert took_s < 45, f"100,000 points took {took_s:.1f} s of processor time"


def test_events_without_a_tag_of_their_own_send_nothing(uri):
    tracker = MlflowTracker(uri, "packtrain", "uid")
    tracker.log_event(Event(1.0, "training_ended", "s", {}))


def test_passwords_are_not_shown():
    assert shown_uri("https://me:secret@host:5000/x?y=1") == "https://host:5000/x?y=1"
    assert shown_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert shown_uri("http://me:secret@[::1:5000") == "[::1:5000"


def test_a_refused_parameter_or_tag_costs_itself_only(run, monkeypatch):
    run_dir, _, pump = run
    monkeypatch.setattr("ops.tracking.mlflow.MAX_PARAM_CHARS", (9000, 500))  # more than this store takes
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    params = {f"p{n}": str(n) for n in range(120)} | {"long": "x" * 8000}
    refused = pump.open("demo", 1000.0, params, {"a tag#": "refused", "b": "taken"}, goes_on=True)
    assert list(refused) == ["a tag#"]
    assert pump.is_open
    assert pump.open("demo", 1000.0, params, {"a tag#": "refused"}, goes_on=True) == {}
    MetricsWriter(run_dir / "metrics.jsonl", 0, 0).write_step(step_record(1), at=1000.0)
    assert pump.send_portion() == 1
    stored = MlflowClient(pump.tracker._uri).get_run(pump.cursor.mlflow_run_id)
    assert stored.data.params == {**params, "long": "x" * 497 + "..."}
    assert stored.data.tags["b"] == "taken"
    assert stored.data.metrics["train/loss"] == 2.0


def test_a_run_that_was_deleted_on_the_server_is_refused_with_the_way_back(run, uri):
    run_dir, _, pump = run
    client, run_id = open_pump(pump)
    client.delete_run(run_id)
    with pytest.raises(TrackingRefusedError, match=f"{run_id} was deleted there; .*mlflow runs restore"):
        open_pump(MlflowPump(run_dir, uri, "packtrain"))
    client.restore_run(run_id)
    open_pump(MlflowPump(run_dir, uri, "packtrain"))


def test_an_incident_gets_its_bill_once_it_is_over_and_the_incidents_are_a_table(run, uri, monkeypatch):
    run_dir, ledger, pump = run
    client, run_id = open_pump(pump)
    named = {
        "class": "hang",
        "culprit": "rank 1 (node 10.0.0.3)",
        "action": "RESTART_WITHOUT_NODE",
        "step": 3,
    }
    nodes = {"exclude": ["10.0.0.3"], "strikes": [["10.0.0.3", 1.0]], "detector": "collective_hang"}
    ledger.write("incident", at=5003.5, **named, **nodes)
    while pump.send_portion():
        pass
    (event,) = read_ledger(run_dir)
    still_open = IncidentBill(event, 1.0, 0.0, 0.0, 0.0, 0, 0.0)
    over = IncidentBill(event, 1.0, 0.0, 2.5, 0.5, 4, 4.0)

    def incident_tags():
        tags = client.get_run(run_id).data.tags
        return [text for key, text in tags.items() if key.startswith("packtrain.incident.")]

    handled = "seen by collective_hang; keeps off 10.0.0.3; strikes: 10.0.0.3 +1"
    pump.send_bills([still_open])
    assert incident_tags() == [f"hang | rank 1 (node 10.0.0.3) | RESTART_WITHOUT_NODE | step 3 | {handled}"]
    pump.send_bills([over])
    (text,) = incident_tags()
    assert "| step 3 | detect 1.00 s | restart 2.50 s | 4 steps lost | seen by" in text
    table = run_dir / INCIDENTS_FILE
    table.parent.mkdir(exist_ok=True)
    table.write_text(json.dumps(incident_table([over])))
    pump.finish("FINISHED", 6000.0, [table])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    experiment = client.get_experiment_by_name("packtrain").experiment_id
    rows = client.load_table(experiment, "incidents.json", [run_id])
    assert rows[["class", "nodes", "restart_s", "lost_steps", "strikes"]].values.tolist() == [
        ["hang", "10.0.0.3", 2.5, 4, "10.0.0.3 +1"]
    ]
