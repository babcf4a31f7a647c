"""50 steps of a tiny Llama: the losses of record. A change here needs a line in CHANGELOG.md saying why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobs.comm.groups import init_groups
from jobs.engines.build import build_engine
from jobs.mesh import Mesh
from jobs.optim.schedule import lr_at
from tests.support.tiny_runs import n_valid, share, tiny_spec, whole_batch

pytestmark = pytest.mark.golden
RECORD = Path(__file__).with_name("llama_losses.json")
ROOT = Path(__file__).resolve().parents[2]
N_STEPS = 50
SAME_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Every x86 processor then runs the same instructions, so that the record holds on all of them."""


def losses(store: str) -> list[float]:
    """The losses, in a process whose environment holds SAME_KERNELS."""
    groups = init_groups(Mesh(), 0, dist.FileStore(store, 1), "gloo", timeout_s=30.0)
    spec = tiny_spec(accum=3)
    engine = build_engine(spec, groups, torch.device("cpu"))
    found = []
    for step in range(N_STEPS):
        batch = whole_batch(step % 4)
        batches = share(batch, groups.dp.rank, groups.dp.size, spec.grad_accum_steps)
        found.append(engine.train_step(batches, n_valid(batch), lr_at(spec.optim, N_STEPS, step)).loss)
    return found


def test_losses_of_50_steps(tmp_path):
    recorded = json.loads(RECORD.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.test_llama_losses", str(tmp_path / "store")],
        cwd=ROOT,
        env={**os.environ, **SAME_KERNELS},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(recorded) == N_STEPS
    assert recorded[-1] < 0.6 * recorded[0]
    assert json.loads(done.stdout) == pytest.approx(recorded, abs=1e-6, rel=0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(losses(sys.argv[1])))
