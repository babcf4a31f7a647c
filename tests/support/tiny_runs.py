"""A tiny Llama with uneven synthetic documents, and the plain single-process loop that engines must equal."""

import torch

from jobs.engines.base import Engine, MicroBatch, StepResult
from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.optim.schedule import lr_at
from jobs.parity.reference import plain_optimizer
from jobs.spec.data import DataSpec
from jobs.spec.job import JobSpec, RunSection, TrainSection
from jobs.spec.model import ModelSpec
from jobs.spec.optim import Cosine, OptimSpec
from jobs.spec.strategy import NativeStrategy

GLOBAL_BATCH = 12
SEQ_LEN = 24
VOCAB = 259
N_IDS = 97
"""Ids that occur. A token met for the first time late in a run has no second moment yet: where its gradient
is about eps, AdamW turns the last bit of it into a visible change, which would test rounding, not engines.
"""
STEPS = 20


def tiny_model(**changes):
    shape = {"vocab_size": VOCAB, "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return ModelSpec(**(shape | {"d_ff": 48, "max_seq_len": 64, "init_std": 0.1} | changes))


def tiny_spec(dp=1, accum=1, precision="fp32", bucket_mib=0.01, model=None, **optim):
    """A native run; the small buckets give it about eight of them."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.5} | optim
    return JobSpec(
        run=RunSection(seed=5),
        model=model or tiny_model(),
        data=DataSpec(seq_len=SEQ_LEN),
        optim=OptimSpec(schedule=Cosine(warmup_steps=4, min_lr_frac=0.1), **settings),
        train=TrainSection(
            steps=STEPS,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=GLOBAL_BATCH // (dp * accum),
            precision=precision,
        ),
        strategy=NativeStrategy(dp=dp, bucket_mib=bucket_mib),
    )


def whole_batch(step):
    """The global batch of a step: uneven documents, and rows from unmasked to nearly all masked."""
    generator = torch.Generator().manual_seed(77 + step)
    tokens = torch.randint(0, N_IDS, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    masked_frac = torch.linspace(0.0, 0.95, GLOBAL_BATCH)[:, None]
    labels[torch.rand(labels.shape, generator=generator) < masked_frac] = IGNORED_LABEL
    borders = torch.rand((GLOBAL_BATCH, SEQ_LEN), generator=generator) < 0.15
    document_ids = borders.cumsum(1).int()
    first = torch.zeros_like(document_ids, dtype=torch.int64)
    where = torch.arange(SEQ_LEN).expand_as(first)
    first[borders] = where[borders]
    positions = where - first.cummax(1).values
    return MicroBatch(tokens[:, :-1], labels, positions, document_ids)


def n_valid(batch):
    return int((batch.labels != IGNORED_LABEL).sum())


def share(batch, dp_rank, dp, accum):
    """A rank's micro-batches of the global batch."""
    size = GLOBAL_BATCH // (dp * accum)
    first = dp_rank * size * accum
    return [
        MicroBatch(
            batch.tokens[at : at + size],
            batch.labels[at : at + size],
            batch.positions[at : at + size],
            None if batch.document_ids is None else batch.document_ids[at : at + size],
        )
        for at in range(first, first + size * accum, size)
    ]


def engine_step(engine: Engine, spec: JobSpec, dp_rank: int, step: int) -> StepResult:
    batch = whole_batch(step)
    batches = share(batch, dp_rank, spec.strategy.dp, spec.grad_accum_steps)
    return engine.train_step(batches, n_valid(batch), lr_at(spec.optim, spec.train.steps, step))


def plain_loop(spec: JobSpec, n_steps: int = STEPS) -> tuple[list[float], list[float], Llama]:
    """Loss and gradient norm of each step, and the model at the end: one process, whole batches."""
    dtype = torch.float64 if spec.train.precision == "fp64" else torch.float32
    model = build_llama(spec.model, spec.run.seed, torch.device("cpu"), dtype)
    optimizer = plain_optimizer(model, spec.optim)
    losses, norms = [], []
    for step in range(n_steps):
        batch = whole_batch(step)
        loss = cross_entropy_sum(
            model(batch.tokens, batch.positions, batch.document_ids), batch.labels
        ) / n_valid(batch)
        optimizer.zero_grad()
        loss.backward()
        limit = spec.optim.grad_clip_norm
        norms.append(
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), float("inf") if limit is None else limit
            ).item()
        )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(spec.optim, spec.train.steps, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model
