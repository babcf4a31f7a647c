"""What a rank does between its fork and its end: groups, engine, data, restore, hooks, trainer. No Ray here.

Everything in this file is collective: each rank of the generation goes through it in the same order.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from jobs.comm.groups import Groups, destroy_groups, init_groups
from jobs.data.batches import BatchSource
from jobs.data.prepare import load_prepared
from jobs.engines.base import Engine
from jobs.engines.build import build_engine
from jobs.engines.native_parameters import PRECISIONS
from jobs.events import Progress
from jobs.hooks import Hook
from jobs.optim.schedule import lr_at
from jobs.parallel.placement import kv_replicas
from jobs.seeds import seed_rank
from jobs.spec.compare import model_fingerprint
from jobs.spec.job import JobSpec
from jobs.trainer import train
from ops.checkpoint.huggingface import read_huggingface
from ops.checkpoint.layout import CHECKPOINTS_DIR
from ops.checkpoint.manifest import Identity
from ops.checkpoint.writer import Peers
from ops.ledger import LedgerWriter
from service.checkpoint_hook import CheckpointHook, restore
from service.rank_hooks import MetricsHook, TitleHook, measure_peak_tflops
from service.rank_process import RankRequest, StopFlag
from service.run_store import read_spec


def train_from_newest_checkpoint(
    request: RankRequest, open_store: Callable[[], Store], stop: StopFlag
) -> str:
    """Train to the end of the spec or to a stop request; returns "finished" or "stopped". Collective."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {request.rank} %(message)s", force=True)
    run_dir = Path(request.run_dir)
    spec = read_spec(run_dir)
    title = TitleHook(run_dir.name, request.rank)
    title.show("init")
    torch.set_num_threads(spec.resources.threads_per_rank)
    device = _device(spec, request.local_rank)
    store = open_store()
    groups = init_groups(
        spec.strategy.mesh,
        request.rank,
        PrefixStore("groups", store),
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout_s=spec.resilience.collective_timeout_s,
        kv_replicas=kv_replicas(spec.model, spec.strategy.mesh),
    )
    seed_rank(spec.run.seed, request.rank)
    engine = build_engine(spec, groups, device)
    source = BatchSource(load_prepared(Path(request.data_dir)), spec, groups.dp.size, groups.dp.rank)
    title.show("load")
    ledger = LedgerWriter(run_dir / "ledger" / f"rank-{request.rank:05d}.jsonl")
    record = partial(_record, ledger, {"attempt": request.attempt, "generation": request.generation})
    progress = _start_point(spec, run_dir, engine, groups, record, device)
    saving = CheckpointHook(
        spec.checkpoint,
        run_dir / CHECKPOINTS_DIR,
        Identity(
            fingerprint=model_fingerprint(spec.model),
            engine=spec.strategy.kind,
            mesh=groups.mesh,
            attempt=request.attempt,
        ),
        Peers(request.rank, request.world_size, PrefixStore("saves", store)),
        record,
        device,
    )
    hooks: list[Hook] = [title, *_metrics(spec, request, device), saving]
    outcome = train(spec, engine, source, progress, hooks, groups, stop)
    if request.rank == 0:
        record("training_ended", {"outcome": outcome.kind, "step": outcome.progress.step})
    ledger.close()
    destroy_groups(groups)
    return outcome.kind


def _device(spec: JobSpec, local_rank: int) -> torch.device:
    if spec.resources.gpus_per_worker:
        # Ray gives each worker its own CUDA_VISIBLE_DEVICES; under torchrun all are visible.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _start_point(
    spec: JobSpec,
    run_dir: Path,
    engine: Engine,
    groups: Groups,
    record: Callable[[str, dict[str, Any]], None],
    device: torch.device,
) -> Progress:
    """The newest verified checkpoint, else the weights that the spec names, else a fresh start."""

    def lr_of_step(step: int) -> float:
        return lr_at(spec.optim, spec.train.steps, step)

    progress = restore(
        engine, run_dir / CHECKPOINTS_DIR, groups, model_fingerprint(spec.model), lr_of_step, record, device
    )
    if progress.step == 0 and spec.train.init_from is not None:
        read_huggingface(Path(spec.train.init_from), engine.chunks(), spec.model)
        engine.after_load(lr_of_step(0))
    return progress


def _metrics(spec: JobSpec, request: RankRequest, device: torch.device) -> list[Hook]:
    """All ranks measure the peak (one alone would find the machine idle); rank 0 writes."""
    peak = spec.tracking.peak_tflops or measure_peak_tflops(device, PRECISIONS[spec.train.precision].weights)
    if request.rank != 0:
        return []
    path = Path(request.run_dir) / "metrics.jsonl"
    return [MetricsHook(spec, path, request.attempt, request.generation, peak)]


def _record(ledger: LedgerWriter, who: dict[str, int], kind: str, fields: dict[str, Any]) -> None:
    ledger.write(kind, **{**who, **fields})
