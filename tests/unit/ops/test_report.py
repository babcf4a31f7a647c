import json
import math

import pytest

from jobs.events import EvalRecord, StepRecord
from ops.ledger import LedgerWriter, MetricsWriter
from ops.report import build_report

CONTRACT = {
    "run_id",
    "status",
    "steps",
    "first_loss",
    "final_loss",
    "attempts",
    "restarts",
    "lost_steps",
    "goodput_frac",
    "phases_s",
    "incidents",
    "mlflow_run_id",
    "checkpoint_dir",
}


def record(step, loss, skipped=False):
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        n_tokens=100,
        n_padding_tokens=20,
        step_time_s=1.0,
        data_time_s=0.1,
        tokens_seen=step * 100,
        sample_ordinal=step * 4,
        skipped=skipped,
    )


@pytest.fixture
def crashed(tmp_path):
    """A run of 6 steps: a rank dies after step 4, the newest checkpoint is that of step 2."""
    run = tmp_path / "demo"
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step-00000006").mkdir()  # a save that was not finished
    (run / "run.json").write_text(json.dumps({"run_id": "demo", "status": "FINISHED"}))
    (run / "spec.json").write_text(json.dumps({"train": {"steps": 6}}))
    driver = LedgerWriter(run / "ledger" / "supervisor.jsonl")
    driver.write("run_created", at=100.0)
    driver.write("attempt_started", at=100.0, attempt=0, world_size=2)
    driver.write("ranks_started", at=101.0, attempt=0, generation=0)
    driver.write("restored", at=102.0, attempt=0, generation=0, step=0, load_s=0)
    driver.write("checkpoint_committed", at=104.1, step=2, n_bytes=5, write_s=0.1, path="step-00000002")
    driver.write(
        "incident",
        at=106.5,
        **{"class": "worker_killed"},
        culprit="rank 1",
        action="RESTART_RANKS",
        step=4,
        failed_at=106.25,
        detected_at=106.5,
        evidence="rank 1 was killed by SIGKILL",
        attempt=0,
        generation=0,
    )
    driver.write("ranks_started", at=107.0, attempt=0, generation=1)
    driver.write("restored", at=108.0, attempt=0, generation=1, step=2, load_s=0.5)
    driver.write("training_ended", at=112.0, attempt=0, generation=1, step=6, outcome="finished")
    driver.write("attempt_ended", at=112.0, attempt=0, outcome="finished")
    driver.write("run_ended", at=112.0, status="FINISHED")
    first = MetricsWriter(run / "metrics.jsonl", attempt=0, generation=0)
    for step in (1, 2, 3, 4):
        first.write_step(record(step, 6.0 - step), at=102.0 + step, mfu_frac=0.5)
    second = MetricsWriter(run / "metrics.jsonl", attempt=0, generation=1)
    for step in (3, 4, 5, 6):
        second.write_step(record(step, 5.5 - step / 2), at=106.0 + step, mfu_frac=0.25)
    second.write_eval(EvalRecord(step=6, loss=2.75, n_tokens=50, eval_time_s=0.0), at=112.0)
    return run


def test_the_contract_of_the_json_report(crashed):
    values = build_report(crashed).to_json()
    assert set(values) >= CONTRACT
    assert values["status"] == "FINISHED"
    assert (values["steps"], values["total_steps"]) == (6, 6)
    assert (values["first_loss"], values["final_loss"], values["final_eval_loss"]) == (5.0, 2.5, 2.75)
    assert (values["attempts"], values["restarts"], values["lost_steps"]) == (1, 1, 2)
    assert values["tokens_seen"] == 600
    assert values["tokens_per_s"] == 100.0
    assert values["mfu_frac"] == 0.25
    assert sum(values["phases_s"].values()) == pytest.approx(values["wall_s"]) == pytest.approx(12.0)
    assert values["goodput_frac"] == pytest.approx(6.0 / 12.0)
    assert values["checkpoint_dir"] == str(crashed / "checkpoints" / "step-00000002")
    (incident,) = values["incidents"]
    assert incident["class"] == "worker_killed"
    assert incident["culprit"] == "rank 1"
    assert incident["action"] == "RESTART_RANKS"
    assert "SIGKILL" in incident["evidence"]
    assert (incident["detect_s"], incident["restart_s"]) == (0.25, 1.5)
    assert (incident["lost_steps"], incident["redo_s"]) == (2, 2.0)
    json.dumps(values, allow_nan=False)


def test_the_newest_checkpoint_is_found_by_number(crashed):
    for name in ("step-99999999", "step-100000000"):
        (crashed / "checkpoints" / name).mkdir()
        (crashed / "checkpoints" / name / "manifest.json").write_text("{}")
    assert build_report(crashed).checkpoint_dir == str(crashed / "checkpoints" / "step-100000000")


def test_the_curve_keeps_the_last_attempt_of_each_step(crashed):
    curve = build_report(crashed).losses
    assert [(point.step, point.value) for point in curve] == [
        (1, 5.0),
        (2, 4.0),
        (3, 4.0),
        (4, 3.5),
        (5, 3.0),
        (6, 2.5),
    ]


def test_a_run_whose_driver_died_says_so(crashed):
    (crashed / "run.json").write_text(json.dumps({"run_id": "demo", "status": "RUNNING"}))
    ledger = crashed / "ledger" / "supervisor.jsonl"
    ledger.write_text("".join(line + "\n" for line in ledger.read_text().splitlines()[:-3]))
    dead = build_report(crashed)
    assert dead.status == "FAILED"
    assert "driver of this run is dead" in dead.notes[0]
    assert "packtrain resume demo" in dead.notes[0]
    alive = build_report(crashed, now=200.0, is_driver_alive=True)
    assert alive.status == "RUNNING"
    assert alive.notes == ()
    assert alive.goodput.wall_us == 100_000_000


def test_a_driver_that_died_between_its_last_two_writes_is_no_failure(crashed):
    (crashed / "run.json").write_text(json.dumps({"run_id": "demo", "status": "RUNNING"}))
    report = build_report(crashed)
    assert (report.status, report.notes) == ("FINISHED", ())


def test_non_finite_losses_and_an_empty_run(crashed, tmp_path):
    writer = MetricsWriter(crashed / "metrics.jsonl", attempt=0, generation=1)
    writer.write_step(record(7, math.nan, skipped=True), at=112.0)
    values = build_report(crashed).to_json()
    assert values["final_loss"] == "nan"
    assert values["skipped_steps"] == 1
    (tmp_path / "empty").mkdir()
    empty = build_report(tmp_path / "empty").to_json()
    assert set(empty) >= CONTRACT
    assert (empty["run_id"], empty["steps"], empty["final_loss"], empty["checkpoint_dir"]) == (
        "empty",
        0,
        None,
        None,
    )
