"""Tiny runs under any layout, small enough for eight ranks on two cores, and what starts their ranks."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.engines.base import Engine
from jobs.events import Progress
from jobs.mesh import Mesh
from jobs.parallel.placement import kv_replicas
from jobs.parity.compare import Runner
from jobs.spec.compare import model_fingerprint
from jobs.spec.job import JobSpec
from ops.checkpoint.manifest import Identity
from ops.checkpoint.writer import AsyncWriter, Peers
from tests.support.checkpoints import Events
from tests.support.ranks import run_ranks

DENSE = {
    "vocab_size": 67,
    "n_layers": 4,
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
}
MOE = DENSE | {
    "n_layers": 3,
    "moe": {
        "n_experts": 4,
        "top_k": 2,
        "d_ff": 24,
        "n_shared_experts": 1,
        "n_dense_layers": 1,
        "balance_loss_coef": 0.05,
        "z_loss_coef": 0.01,
    },
}
SEQ_LEN = 32


def layout_spec(
    strategy: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    *,
    accum: int = 1,
    precision: str = "fp32",
    n_sequences: int | None = None,
    **data: Any,
) -> JobSpec:
    """A tiny run.

    Args:
        strategy: keys of the strategy section.
        model: keys over those of DENSE.
        accum: micro-batches of a step on each data-parallel rank (one sequence each).
        precision: of training.
        n_sequences: the global batch; None is accum for each data-parallel rank.
        data: keys of the data section.
    """
    kind = {"kind": "native"} | dict(strategy)
    dp = kind.get("dp", 1)
    whole = n_sequences or accum * dp
    values = {
        "run": {"seed": 3},
        "model": DENSE | {"max_seq_len": SEQ_LEN, "init_std": 0.1} | dict(model or {}),
        "data": {"seq_len": SEQ_LEN, "mask_documents": True} | data,
        "optim": {"lr": 1e-2},
        "train": {
            "steps": 10,
            "global_batch_size": whole,
            "micro_batch_size": whole // (accum * dp),
            "precision": precision,
        },
        "strategy": kind,
    }
    return JobSpec.model_validate_json(json.dumps(values))


def launch(fn: Callable[..., Any], spec: JobSpec, tmp_path: Path, *args: Any) -> list[Any]:
    """Run `fn(groups, spec, *args)` on every rank of the spec's layout."""
    mesh = spec.strategy.mesh
    return run_ranks(
        fn, mesh, tmp_path, spec, *args, kv_replicas=kv_replicas(spec.model, mesh), timeout_s=100.0
    )


def save(groups: Groups, engine: Engine, spec: JobSpec, folder: str, step: int) -> None:
    """Leave a checkpoint. Collective over all ranks."""
    peers = Peers(groups.rank, groups.world_size, dist.FileStore(f"{folder}.store", groups.world_size))
    identity = Identity(model_fingerprint(spec.model), spec.strategy.kind, groups.mesh)
    writer = AsyncWriter(Path(folder), identity, peers, Events())
    writer.save(engine.chunks(), Progress(step))
    assert writer.wait(60)


def runner(tmp_path: Path, timeout_s: float = 100.0) -> Runner:
    """Forks the ranks of a comparison from the tests' fork server."""

    def run(fn: Callable[..., Any], mesh: Mesh, kv_replicas: int, *args: Any) -> Sequence[Any]:
        return run_ranks(fn, mesh, tmp_path, *args, kv_replicas=kv_replicas, timeout_s=timeout_s)

    return run
