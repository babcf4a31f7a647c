"""A tiny Llama, its batches and plain reference loops, for the tests of the DeepSpeed engine.

The references are written without any engine: one process, torch.optim, the whole global batch.
"""

import copy
from typing import Any

import torch

from jobs.comm.groups import Groups
from jobs.engines.base import Engine, MicroBatch, StepResult
from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.spec.job import JobSpec

SEQ_LEN = 12
GLOBAL_BATCH = 24  # divisible by dp in {1, 2, 3, 4, 6} x 2 micro-batches
ACCUM = 2
CLIP = 0.5
CPU = torch.device("cpu")


def make_spec(dp: int, strategy: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A run of the tiny Llama; `strategy` None is native. Odd sizes: every shard is padded and cut."""
    plan = {
        "run": {"seed": 3},
        "model": {
            "vocab_size": 67,
            "n_layers": 2,
            "d_model": 20,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 6,
            "d_ff": 27,
            "max_seq_len": 32,
            "tie_embeddings": changes.pop("tied", False),
            "init_std": 0.1,
        },
        "data": {"seq_len": SEQ_LEN},
        "optim": {
            "kind": changes.pop("optimizer", "adamw"),
            "lr": 1e-2,
            "grad_clip_norm": CLIP,
            "weight_decay": 0.1,
        },
        "train": {
            "steps": 20,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": GLOBAL_BATCH // (dp * ACCUM),
            "precision": changes.pop("precision", "fp32"),
        },
        "strategy": (strategy or {"kind": "native"}) | {"dp": dp},
    }
    assert not changes, changes
    return JobSpec.model_validate(plan)


def zero_spec(dp: int, stage: int, options: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """The same under DeepSpeed; at stage 3 no parameter stays gathered unless options say so."""
    options = {"stage3_param_persistence_threshold": 0} if stage == 3 and options is None else options
    return make_spec(dp, {"kind": "deepspeed_zero", "stage": stage, "zero_options": options or {}}, **changes)


def lr_of(step: int) -> float:
    """Learning rate of a step: it changes at every one."""
    return 1e-2 * min(1.0, (step + 1) / 4) * (1 - step / 40)


def global_batch(step: int) -> MicroBatch:
    """The whole batch of a step: two documents a sequence, and unequal padding at the end of each."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 67, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    padding = torch.randint(0, 5, (GLOBAL_BATCH, 1), generator=generator)
    where = torch.arange(SEQ_LEN)[None]
    labels[where >= SEQ_LEN - padding] = IGNORED_LABEL
    document_ids = (where >= 5).int().expand(GLOBAL_BATCH, -1)
    positions = torch.where(where >= 5, where - 5, where).expand(GLOBAL_BATCH, -1)
    return MicroBatch(tokens[:, :-1], labels, positions, document_ids)


def rows(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Sequences [first, last) of a batch."""
    assert batch.document_ids is not None
    return MicroBatch(
        *(t[first:last] for t in (batch.tokens, batch.labels, batch.positions, batch.document_ids))
    )


def train_one(engine: Engine, step: int, groups: Groups) -> StepResult:
    """One step of a rank on its rows of the global batch."""
    dp_rank, dp = groups.dp.rank, groups.dp.size
    whole = global_batch(step)
    size = GLOBAL_BATCH // (dp * ACCUM)
    first = dp_rank * size * ACCUM
    batches = [rows(whole, first + k * size, first + (k + 1) * size) for k in range(ACCUM)]
    n_valid_tokens = int((whole.labels != IGNORED_LABEL).sum())
    return engine.train_step(batches, n_valid_tokens, lr_of(step))


def reference_model(spec: JobSpec) -> Llama:
    """The start weights on one device, fp32."""
    return build_llama(spec.model, spec.run.seed, CPU)


def reference_loop(spec: JobSpec, n_steps: int) -> tuple[list[float], list[float], Llama]:
    """Losses, gradient norms and final (master) weights of a plain loop in one process."""
    master = reference_model(spec)
    working = copy.deepcopy(master).bfloat16() if spec.train.precision == "bf16" else master
    decay = [
        {"params": [p for p in master.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in master.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if spec.optim.kind == "adamw":
        optimizer = torch.optim.AdamW(decay, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(decay, lr=0.0)
    losses, norms = [], []
    for step in range(n_steps):
        batch = global_batch(step)
        n_valid_tokens = int((batch.labels != IGNORED_LABEL).sum())
        logits = working(batch.tokens, batch.positions, batch.document_ids)
        loss = cross_entropy_sum(logits, batch.labels) / n_valid_tokens
        loss.backward()
        if working is not master:
            for low, high in zip(working.parameters(), master.parameters(), strict=True):
                assert low.grad is not None
                high.grad, low.grad = low.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(master.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.step()
        optimizer.zero_grad()
        if working is not master:
            with torch.no_grad():
                for low, high in zip(working.parameters(), master.parameters(), strict=True):
                    low.copy_(high)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, master


def reference_loss(model: Llama, batch: MicroBatch) -> tuple[float, int]:
    """Sum of cross entropies of a batch and its count of valid tokens."""
    with torch.no_grad():
        loss = cross_entropy_sum(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)
    return loss.item(), int((batch.labels != IGNORED_LABEL).sum())


Saved = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor, bool]]


def save(engine: Engine) -> Saved:
    """A copy of this rank's chunks: name, global shape, offsets, tensor, is_writer."""
    return [(c.name, c.global_shape, c.offsets, c.tensor.clone(), c.is_writer) for c in engine.chunks()]


def same(first: Saved, second: Saved) -> bool:
    """Whether two states are bitwise equal, box by box."""
    return [chunk[:3] for chunk in first] == [chunk[:3] for chunk in second] and all(
        torch.equal(a[3], b[3]) for a, b in zip(first, second, strict=True)
    )


def assemble(ranks: list[Saved]) -> dict[str, torch.Tensor]:
    """Whole logical tensors from what ranks write; fails unless boxes tile each tensor exactly once."""
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for chunks in ranks:
        for name, shape, offsets, tensor, is_writer in chunks:
            if not is_writer:
                continue
            box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
            whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box] = tensor
            written.setdefault(name, torch.zeros(shape, dtype=torch.int64))[box] += 1
    for name, count in written.items():
        assert bool((count == 1).all()), f"{name} is written {count.min()} to {count.max()} times"
    return whole


def load(engine: Engine, whole: dict[str, torch.Tensor], lr: float) -> None:
    """Read whole logical tensors into an engine's chunks."""
    chunks = engine.chunks()
    assert {c.name for c in chunks} <= set(whole), "a chunk has no source"
    for chunk in chunks:
        assert tuple(whole[chunk.name].shape) == chunk.global_shape
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
        chunk.tensor.copy_(whole[chunk.name][box])
    engine.after_load(lr)
