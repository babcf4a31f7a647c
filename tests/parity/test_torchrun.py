"""The same ranks under torchrun, without Ray: to the end, and over a restart by torchrun's own agent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_runs import SPEC, command_environment

pytestmark = [pytest.mark.parity, pytest.mark.timeout(120)]


def test_a_run_under_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [
            *(
                str(torchrun),
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                "-m",
                "service.torchrun",
                str(SPEC),
            ),
            *(f"run.storage={tmp_path}", "run.name=plain", "strategy.dp=2"),
        ],
        env=command_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = tmp_path / "plain"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(1, 11))
    assert json.loads((run_dir / "run.json").read_text())["status"] == "FINISHED"
    assert (run_dir / "checkpoints" / "step-00000010" / "manifest.json").exists()
    assert "ray" not in done.stderr.lower()
