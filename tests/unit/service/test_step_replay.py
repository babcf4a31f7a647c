"""A step taken again: a real run of one rank, its checkpoint, and what it wrote down."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ops.checkpoint.layout import CHECKPOINTS_DIR
from ops.checkpoint.set_aside import set_aside
from ops.ledger import read_ledger
from service.fork_client import ForkServer
from service.run_store import RUNNING
from service.step_replay import checkpoint_before, own_addresses, verdict_of
from tests.support.live_runs import packtrain
from tests.support.one_rank import run_one_rank
from tests.support.stored_runs import stopped_run

SPEC = """\
model: {preset: tiny, n_layers: 1}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 16
optim: {lr: 1e-3, schedule: {kind: constant}}
train: {steps: 6, global_batch_size: 4, micro_batch_size: 4}
run: {name: one, storage: FOLDER}
checkpoint: {every_steps: 2, asynchronous: false, keep_last: 9}
resilience: {digest_every_steps: 1}
tracking: {mlflow: false, peak_tflops: 1.0}
"""


def replayed(run_dir: Path, step: int) -> tuple[int, dict[str, Any]]:
    done = packtrain("replay", str(run_dir), "--step", str(step), "--json", cwd=run_dir)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_step_comes_out_as_it_was_recorded_and_a_recorded_slip_is_noticed(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("hello world. " * 500)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("FOLDER", str(tmp_path)))
    run_dir = stopped_run(tmp_path / "spec.yaml", (), status=RUNNING)
    assert run_one_rank(server, run_dir).outcome == "finished"
    set_aside(run_dir / CHECKPOINTS_DIR, [4])
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    code, found = replayed(run_dir, 6)
    assert (code, found["ok"]) == (0, True)
    assert found["checkpoint"].endswith("set_aside/step-00000004-001")
    assert [(one["step"], one["verdict"], one["digests_equal"]) for one in found["steps"]] == [
        (5, "same", True),
        (6, "same", True),
    ]
    ledger = run_dir / "ledger"
    after = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path != ledger)
    told = ledger / "replay.jsonl"
    assert [one for one in after if one[0] != told] == [one for one in before if one[0] != ledger]
    (event,) = [one for one in read_ledger(run_dir) if one.kind == "step_replayed"]
    assert (event.integer("step"), event.text("verdict")) == (6, "same")
    assert set(event.fields["addresses"]) == own_addresses()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("step") == 6 and "grad_norm" in line:
            line |= {"loss": "nan", "grad_norm": "nan", "skipped": True}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = replayed(run_dir, 6)
    assert (code, found["steps"][-1]["verdict"]) == (1, "clean_here")
    assert "the chip or memory that it had is to blame" in found["conclusion"]


def test_a_step_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("hello world. " * 500)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("FOLDER", str(tmp_path)))
    run_dir = stopped_run(tmp_path / "spec.yaml", ())
    done = packtrain("replay", str(run_dir), "--step", "7", cwd=tmp_path)
    assert done.returncode == 2
    assert "this run has steps 1 to 6" in done.stderr
    assert checkpoint_before(run_dir, 3, read_ledger(run_dir)) == ("", 0)


@pytest.mark.parametrize(
    ("now", "recorded", "verdict"),
    [
        ((2.0, 1.0), (2.0, 1.0), "same"),
        ((2.0, 1.0), (2.0001, 1.001), "close"),
        ((2.0, 1.0), (2.1, 1.0), "differs"),
        ((math.nan, 1.0), (2.1, 1.0), "differs"),
        ((math.nan, math.inf), (2.0, math.nan), "same_fault"),
        ((2.0, 1.0), (2.0, math.inf), "clean_here"),
        ((2.0, 1.0), (None, None), "not_recorded"),
    ],
)
def test_verdicts(now: tuple[float, float], recorded: tuple[Any, Any], verdict: str) -> None:
    assert verdict_of(*now, *recorded) == verdict
