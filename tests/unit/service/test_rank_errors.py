"""Errors of a real rank process, from its exception to what becomes of the run."""

from pathlib import Path

from jobs.spec.job import ResilienceSection
from ops.checkpoint.layout import CHECKPOINTS_DIR, committed_steps, folder_name
from ops.decision import Action
from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.ledger import read_metrics
from ops.policy import decide
from service.fork_client import ForkServer
from service.run_store import RUNNING
from tests.support.commands import command
from tests.support.one_rank import RankEnd, run_one_rank
from tests.support.stored_runs import stopped_run

SPEC = """\
model: {preset: tiny, n_layers: 1}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 16
optim: {lr: 1e-3, schedule: {kind: constant}}
train: {steps: 12, global_batch_size: 4, micro_batch_size: 4}
run: {name: one, storage: runs}
checkpoint: {every_steps: 1, asynchronous: false}
resilience: {on_bad_loss: skip, max_skipped_steps: 2}
tracking: {mlflow: false, peak_tflops: 1.0}
"""


def start(folder: Path, *changes: tuple[str, str]) -> Path:
    (folder / "corpus.txt").write_text("hello world. " * 500)
    text = SPEC.replace("runs}", f"{folder}/runs}}")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "spec.yaml").write_text(text)
    return stopped_run(folder / "spec.yaml", (), status=RUNNING)


def verdict(end: RankEnd, step: int) -> tuple[str, Action]:
    """Class and action, as the coordinator comes to them."""
    words = {
        key: end.error[key]
        for key in ("error_type", "error_text", "traceback", "failure_class", "from_communication")
    }
    incident = diagnose([RankExit(0, "10.0.0.1", 5.0, end.exit_code, **words)], step, now=6.0)
    assert "Traceback" in incident.evidence
    return incident.failure_class, decide(incident, [], ResilienceSection(), shells_alive=True).action


def test_gradients_that_stay_infinite_stop_the_run(server: ForkServer, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#1773, ymcui/Chinese-LLaMA-Alpaca#534: named, and not begun again for ever."""
    run_dir = start(tmp_path, ("lr: 1e-3", "lr: 1e38"))
    end = run_one_rank(server, run_dir)
    assert end.exit_code == 1
    assert end.error["error_type"] == "jobs.errors.NumericError"
    assert "more than resilience.max_skipped_steps=2 in a row" in end.error["error_text"]
    assert "lower optim.lr, or go on from an older checkpoint with other data" in end.error["error_text"]
    records = [record for record in read_metrics(run_dir) if "grad_norm" in record]
    assert [record["skipped"] for record in records[-3:]] == [True, True, True]
    assert not records[0]["skipped"]
    assert len(records) < 12
    assert verdict(end, records[-1]["step"]) == ("numerics", Action.STOP)
    again = run_one_rank(server, run_dir, generation=1)
    assert again.error["failure_class"] == "numerics"
    for told in (command("report", str(run_dir), "--json"), command("status", str(run_dir), "--json")):
        assert told.code == 0
        assert told.json["run_id"] == "one"


def test_another_models_checkpoint_ends_the_rank_before_anything_is_loaded(
    server: ForkServer, tmp_path: Path
) -> None:
    """NVIDIA-NeMo/Automodel#836: equal shapes, another RoPE base."""
    run_dir = start(tmp_path, ("steps: 12", "steps: 2"))
    assert run_one_rank(server, run_dir).outcome == "finished"
    spec = run_dir / "spec.json"
    spec.write_text(spec.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    end = run_one_rank(server, run_dir, generation=1)
    assert end.error["error_type"] == "jobs.errors.CheckpointError"
    assert "rope_theta is 10000.0 in the checkpoint and 500000.0 in this run" in end.error["error_text"]
    assert verdict(end, 2) == ("configuration", Action.STOP)


def test_damaged_checkpoints_are_tried_again_and_never_overwritten_from_step_zero(
    server: ForkServer, tmp_path: Path
) -> None:
    run_dir = start(tmp_path, ("steps: 12", "steps: 2"))
    assert run_one_rank(server, run_dir).outcome == "finished"
    folder = run_dir / CHECKPOINTS_DIR
    assert committed_steps(folder) == [1, 2]
    for shard in folder.glob("*/*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    end = run_one_rank(server, run_dir, generation=1)
    assert end.error["error_type"] == "ops.checkpoint.manifest.CorruptCheckpointError"
    assert all(folder_name(step) in end.error["error_text"] for step in (1, 2))
    assert verdict(end, 0) == ("corrupt_checkpoint", Action.RESTART_RANKS)
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == before


def test_prepared_data_that_is_gone_is_never_tried_again(server: ForkServer, tmp_path: Path) -> None:
    run_dir = start(tmp_path)
    for path in (tmp_path / "runs" / "cache").rglob("*.bin"):
        path.unlink()
    end = run_one_rank(server, run_dir)
    assert end.error["error_type"] == "jobs.errors.DataError"
    assert verdict(end, 0) == ("configuration", Action.STOP)
