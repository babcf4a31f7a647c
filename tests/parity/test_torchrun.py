"""The same ranks under torchrun, without Ray: to the end, driven by rank 0, never beside another driver."""

import contextlib
import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from jobs.errors import SpecError
from jobs.spec.load import load_spec
from service.run_store import create_run, sole_driver
from tests.support.live_runs import SPEC, command_environment

pytestmark = [pytest.mark.parity, pytest.mark.timeout(120)]


def test_a_run_under_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    run_dir = tmp_path / "plain"
    lease = run_dir / "control" / "driver_alive"
    leases, refusals = set(), []
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [
                *(str(torchrun), "--nproc-per-node", "2", "--max-restarts", "1"),
                *("-m", "service.torchrun", str(SPEC)),
                *(f"run.storage={tmp_path}", "run.name=plain", "strategy.dp=2"),
            ],
            env=command_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(FileNotFoundError):
                    leases.add(lease.stat().st_mtime)
                if not refusals and (run_dir / "metrics.jsonl").exists():
                    try:
                        with sole_driver(run_dir, wait_s=0.0):
                            pass
                    except SpecError as error:
                        refusals.append(str(error))
                time.sleep(0.1)
        finally:
            process.kill()
    told = (tmp_path / "errors.txt").read_text()
    assert process.returncode == 0, told[-4000:]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(1, 11))
    assert json.loads((run_dir / "run.json").read_text())["status"] == "FINISHED"
    assert (run_dir / "checkpoints" / "step-00000010" / "manifest.json").exists()
    assert "ray" not in told.lower()
    assert max(leases) - min(leases) > 0.9, "the lease was not kept"
    assert refusals, "a second driver found the place free"
    assert "is being driven by process" in refusals[0]
    with sole_driver(run_dir, wait_s=0.0):
        pass


def test_ranks_that_torchrun_restarts_leave_a_run_that_another_drives_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "taken"
    create_run(load_spec(SPEC, [f"run.storage={tmp_path}", "run.name=taken", "strategy.dp=1"]), run_dir)
    before = (run_dir / "run.json").read_text()
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    store.set("packtrain/folders", json.dumps([str(run_dir), str(tmp_path)]))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": "1"}
    with sole_driver(run_dir):
        done = subprocess.run(
            [sys.executable, "-m", "service.torchrun", str(SPEC), f"run.storage={tmp_path}", "strategy.dp=1"],
            env=command_environment(**ranks, **where),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    assert "run taken is being driven by process" in done.stderr
    assert (run_dir / "run.json").read_text() == before
    assert not (run_dir / "metrics.jsonl").exists()
