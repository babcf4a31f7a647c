"""The rank's side of a replay: the state of a checkpoint, then the same steps on the same samples. No Ray.

Writes nothing into the run's folder. The other side is step_replay.py's.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.comm.groups import Groups
from jobs.comm.replicas import replica_digests
from jobs.data.batches import BatchSource
from jobs.data.prepare import load_prepared
from jobs.engines.build import build_engine
from jobs.events import Ranges
from jobs.optim.schedule import lr_at
from jobs.seeds import seed_rank
from jobs.spec.job import JobSpec
from ops.checkpoint.huggingface import read_huggingface
from ops.checkpoint.manifest import read_manifest
from ops.checkpoint.reader import CheckpointRef, load_into


@dataclass(frozen=True)
class ReplayedStep:
    """One step as it came out this time."""

    step: int
    sample_ordinal: int
    """Sampler's state after it."""
    loss: float
    grad_norm: float
    skipped: bool
    digests: dict[str, list[int]]
    """Of this rank's parameters after it, by key."""


def replay_steps(
    groups: Groups, spec: JobSpec, data_dir: str, checkpoint: str, until: int, skipped: Ranges
) -> list[ReplayedStep]:
    """Steps from a checkpoint on to step `until`. Collective.

    Args:
        groups: of the run's mesh.
        spec: the run.
        data_dir: its prepared data.
        checkpoint: folder to begin from; empty begins with the start weights.
        until: last step.
        skipped: sample ordinals that are passed over, those that the checkpoint knows of left out.
    """
    device = torch.device("cpu")
    torch.set_num_threads(spec.resources.threads_per_rank)
    seed_rank(spec.run.seed, groups.rank)
    engine = build_engine(spec, groups, device)
    step = ordinal = 0
    if checkpoint:
        path = Path(checkpoint)
        progress = load_into(CheckpointRef(path, read_manifest(path)), engine.chunks(), strict=False)
        step, ordinal = progress.step, progress.sample_ordinal
        skipped = (*progress.skipped_samples, *skipped)
        engine.after_load(lr_at(spec.optim, spec.train.steps, step))
    elif spec.train.init_from is not None:
        read_huggingface(Path(spec.train.init_from), engine.chunks(), spec.model)
        engine.after_load(lr_at(spec.optim, spec.train.steps, 0))
    source = BatchSource(load_prepared(Path(data_dir)), spec, groups.dp.size, groups.dp.rank, skipped)
    found = []
    while step < until:
        batches = source.step_at(ordinal)
        lr = lr_at(spec.optim, spec.train.steps, step)
        result = engine.train_step(batches.batches, batches.n_valid_tokens, lr)
        step, ordinal = step + 1, batches.next_ordinal
        weights = dict(engine.model.named_parameters())
        digests = replica_digests(engine.chunks(), weights, groups.mesh, groups.rank)
        found.append(ReplayedStep(step, ordinal, result.loss, result.grad_norm, result.skipped, digests))
    return found
