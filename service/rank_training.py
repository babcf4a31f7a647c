"""What a rank does between its fork and its end: groups, engine, data, restore, hooks, trainer. No Ray here.

Everything in this file is collective: each rank of the generation goes through it in the same order.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
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
from ops.black_box import Phase
from ops.checkpoint.huggingface import read_huggingface
from ops.checkpoint.layout import CHECKPOINTS_DIR
from ops.checkpoint.manifest import Identity
from ops.checkpoint.writer import Peers
from ops.findings import Finding
from ops.ledger import LedgerWriter
from ops.rollback import merged
from service.board import Board
from service.checkpoint_hook import CheckpointHook, Record, restore
from service.digest_hook import DigestHook
from service.fault_hook import FaultHook
from service.loss_hook import LossHook
from service.rank_box import BlackBoxHook, EvaluationHook, RankBox
from service.rank_faults import RankFaults
from service.rank_hooks import MetricsHook, TitleHook, measure_peak_tflops
from service.rank_process import RankRequest, StopFlag
from service.run_store import read_spec, recent_steps
from service.straggler_hook import StragglerHook


def train_from_newest_checkpoint(
    request: RankRequest,
    open_store: Callable[[], Store],
    stop: StopFlag,
    faults: RankFaults,
    tell: Callable[[Finding], None],
) -> str:
    """Train to the end of the spec or to a stop request; returns "finished" or "stopped". Collective."""
    box_dir = Path(request.box_dir) if request.box_dir else None
    box = RankBox(box_dir, request.attempt, request.generation, request.rank)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {request.rank} %(message)s", force=True)
    run_dir = Path(request.run_dir)
    spec = read_spec(run_dir, request.attempt)
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
    box.follow_collectives(groups)
    seed_rank(spec.run.seed, request.rank)
    engine = build_engine(spec, groups, device)
    title.show("load")
    box.enter(Phase.LOAD)
    ledger = LedgerWriter(run_dir / "ledger" / f"rank-{request.rank:05d}.jsonl")
    record = partial(_record, ledger, {"attempt": request.attempt, "generation": request.generation})
    progress = _start_point(spec, request, engine, groups, record, device)
    prepared = load_prepared(Path(request.data_dir))
    source = BatchSource(prepared, spec, groups.dp.size, groups.dp.rank, progress.skipped_samples)
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
        box.blocking_save,
    )
    board = Board(PrefixStore("board", store), request.rank, request.world_size)
    hooks: list[Hook] = [
        BlackBoxHook(box, faults.strike),
        title,
        *_metrics(spec, request, device),
        *_detectors(spec, request, board, tell, record),
        FaultHook(faults, run_dir / "control", spec.train.global_batch_size, record),
        saving,
        *_evaluation(spec, box),
    ]
    outcome = train(spec, engine, source, progress, hooks, groups, stop)
    if request.rank == 0:
        record("training_ended", {"outcome": outcome.kind, "step": outcome.progress.step})
    ledger.close()
    box.end()
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
    request: RankRequest,
    engine: Engine,
    groups: Groups,
    record: Callable[[str, dict[str, Any]], None],
    device: torch.device,
) -> Progress:
    """The newest verified checkpoint, else the weights that the spec names, else a fresh start.

    What earlier rollbacks passed over stays passed over, whether or not the checkpoint knows of it.
    """

    def lr_of_step(step: int) -> float:
        return lr_at(spec.optim, spec.train.steps, step)

    progress = restore(
        engine,
        Path(request.run_dir) / CHECKPOINTS_DIR,
        groups,
        model_fingerprint(spec.model),
        lr_of_step,
        record,
        device,
        request.restore_before,
    )
    if progress.step == 0 and spec.train.init_from is not None:
        read_huggingface(Path(spec.train.init_from), engine.chunks(), spec.model)
        engine.after_load(lr_of_step(0))
    return replace(progress, skipped_samples=merged([*progress.skipped_samples, *request.skip_samples]))


def _metrics(spec: JobSpec, request: RankRequest, device: torch.device) -> list[Hook]:
    """All ranks measure the peak (one alone would find the machine idle); rank 0 writes."""
    peak = spec.tracking.peak_tflops or measure_peak_tflops(device, PRECISIONS[spec.train.precision].weights)
    if request.rank != 0:
        return []
    path = Path(request.run_dir) / "metrics.jsonl"
    return [MetricsHook(spec, path, request.attempt, request.generation, peak)]


def _detectors(
    spec: JobSpec, request: RankRequest, board: Board, tell: Callable[[Finding], None], record: Record
) -> list[Hook]:
    """What looks at the training itself: every rank measures, rank 0 judges."""
    rules, mesh, rank = spec.resilience, spec.strategy.mesh, request.rank
    hooks: list[Hook] = []
    if rank == 0:
        hooks.append(LossHook(recent_steps(Path(request.run_dir)), tell))
    if rules.digest_every_steps is not None:
        hooks.append(DigestHook(board, mesh, rank, rules.digest_every_steps, tell, record))
    if rules.straggler_window_steps is not None and request.world_size > 1:
        hooks.append(StragglerHook(board, mesh, rank, rules.straggler_window_steps, tell))
    return hooks


def _evaluation(spec: JobSpec, box: RankBox) -> list[Hook]:
    every_steps = spec.train.evaluate_every_steps
    return [] if every_steps is None else [EvaluationHook(box, every_steps)]


def _record(ledger: LedgerWriter, who: dict[str, int], kind: str, fields: dict[str, Any]) -> None:
    ledger.write(kind, **{**who, **fields})
