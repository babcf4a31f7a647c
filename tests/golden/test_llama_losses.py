"""50 steps of a tiny Llama: the losses of record. A change here needs a line in CHANGELOG.md saying why."""

import json
from pathlib import Path

import pytest
import torch

from jobs.engines.build import build_engine
from jobs.optim.schedule import lr_at
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import n_valid, share, tiny_spec, whole_batch

pytestmark = pytest.mark.golden
RECORD = Path(__file__).with_name("llama_losses.json")
N_STEPS = 50


def _losses(groups, spec):
    engine = build_engine(spec, groups, torch.device("cpu"))
    losses = []
    for step in range(N_STEPS):
        batch = whole_batch(step % 4)
        batches = share(batch, groups.dp_rank, groups.dp_size, spec.grad_accum_steps)
        losses.append(engine.train_step(batches, n_valid(batch), lr_at(spec.optim, N_STEPS, step)).loss)
    return losses


def test_losses_of_50_steps(tmp_path):
    recorded = json.loads(RECORD.read_text())
    (found,) = run_ranks(_losses, 1, tmp_path, tiny_spec(accum=3))
    assert len(recorded) == N_STEPS
    assert recorded[-1] < 0.6 * recorded[0]
    assert found == pytest.approx(recorded, abs=1e-6, rel=0)
