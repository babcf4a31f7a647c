"""`list` contacts nobody; `status` tells MLflow the end of a run whose driver was killed."""

import time
from pathlib import Path

import pytest

from ops.ledger import MetricsWriter
from service.run_status import summaries, told_summary
from tests.support.mlflow_server import FaultyProxy
from tests.support.runs import make_run, step_record, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow stands on


def test_twenty_dead_runs_and_a_dead_server_are_listed_at_once(tmp_path: Path) -> None:
    proxy = FaultyProxy(1)
    try:
        proxy.set_mode("hang")
        for number in range(20):
            storage = tmp_path / f"{number:02d}"
            run_dir, _ = make_run(storage, tiny_spec(storage, proxy.uri))
            MetricsWriter(run_dir / "metrics.jsonl", 0, 0).write_step(step_record(7), at=1007.0)
            run_dir.rename(tmp_path / f"demo-{number:02d}")
        began = time.monotonic()
        rows = summaries(tmp_path)
        assert time.monotonic() - began < 10.0
        assert [(row["status"], row["step"]) for row in rows] == [("FAILED", 7)] * 20
        assert proxy.n_requests == 0
        proxy.set_mode("500")
        assert told_summary(tmp_path / "demo-03") == rows[3]
        assert proxy.n_requests > 0
    finally:
        proxy.close()
