"""Run folders as a driver would leave them, without a driver: for tests of what reads them."""

import json
from pathlib import Path

from jobs.events import StepRecord
from jobs.spec.data import DataSpec
from jobs.spec.job import JobSpec, RunSection, TrackingSection, TrainSection
from jobs.spec.load import resolved_json
from jobs.spec.model import ModelSpec
from jobs.spec.optim import OptimSpec
from ops.ledger import LedgerWriter


def tiny_spec(storage: Path, mlflow_uri: str | None = None, steps: int = 100, **tracking: object) -> JobSpec:
    return JobSpec(
        run=RunSection(name="demo", storage=str(storage)),
        model=ModelSpec(
            vocab_size=257,
            n_layers=1,
            d_model=8,
            n_heads=2,
            n_kv_heads=1,
            head_dim=4,
            d_ff=16,
            max_seq_len=32,
        ),
        data=DataSpec(seq_len=16),
        optim=OptimSpec(lr=3e-4),
        train=TrainSection(steps=steps, global_batch_size=4, micro_batch_size=2),
        tracking=TrackingSection(mlflow_uri=mlflow_uri, **tracking),
    )


def step_record(step: int, loss: float = 2.0, step_time_s: float = 0.5, **changes: object) -> StepRecord:
    values = {
        "grad_norm": 1.0,
        "lr": 1e-3,
        "n_tokens": 100,
        "n_padding_tokens": 0,
        "data_time_s": 0.01,
        "tokens_seen": step * 100,
        "sample_ordinal": step * 4,
    }
    return StepRecord(step=step, loss=loss, step_time_s=step_time_s, **{**values, **changes})


def make_run(storage: Path, spec: JobSpec, status: str = "RUNNING") -> tuple[Path, LedgerWriter]:
    run_dir = storage / "demo"
    for name in ("ledger", "logs", "checkpoints"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.json").write_text(resolved_json(spec))
    (run_dir / "run.json").write_text(json.dumps({"run_id": "demo", "status": status, "created_at": 0.0}))
    ledger = LedgerWriter(run_dir / "ledger" / "supervisor.jsonl")
    return run_dir, ledger
