"""A run made tiny with its layout kept: the smallest model that each axis cuts as it cuts the large one.

Kept exactly: the engine, its stage, pp, cp, tp, ep, etp, the schedule and its virtual stages, context method,
sequence parallelism, recomputation. Kept in kind: kv heads fewer than tp ranks or not, layers that stages do
not divide, a listed split's larger and smaller stages, a vocabulary or feed-forward width that tp does not
divide, tied embeddings, the experts' router, capacity, losses and shared experts. Made small: everything
else. Pure; no torch.
"""

import math
from dataclasses import dataclass
from typing import Any

from jobs.errors import SpecError
from jobs.mesh import Mesh
from jobs.planner.legality import refusals
from jobs.planner.stages import schedule_refusal
from jobs.spec.data import DataSpec
from jobs.spec.job import JobSpec, ResourcesSection
from jobs.spec.model import ModelSpec, MoeSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy, DeepspeedZeroStrategy, NativeStrategy, Split

HEAD_DIM = 4
D_MODEL = 16
D_FF = 20
EXPERT_D_FF = 12
VOCAB = 37
SEQ_LEN = 16
INIT_STD = 0.1
"""Large enough that no gradient of the tiny model is lost in another's rounding."""
MAX_MICRO_BATCHES = 4
"""Micro-batches of a step, unless the pipeline's schedule needs more."""


@dataclass(frozen=True)
class Shrunk:
    """A tiny run, and what of the layout or the precision could not be kept, a sentence each."""

    spec: JobSpec
    notes: tuple[str, ...]


def shrink(spec: JobSpec, max_ranks: int) -> Shrunk:
    """The tiny run of this spec's layout.

    Args:
        spec: a run whose layout is legal.
        max_ranks: dp is lowered until there are no more ranks than this.

    Raises:
        SpecError: the layout has too many ranks with the smallest dp as well.
    """
    notes: list[str] = []
    strategy = spec.strategy.model_copy(update={"dp": _dp(spec, max_ranks, notes)})
    if not isinstance(strategy, DeepspeedZeroStrategy):
        strategy = _with_small_split(strategy, spec.model.n_layers)
    precision = spec.train.precision
    if precision not in ("fp32", "fp64"):
        notes.append(f"precision {precision} is compared in fp32: what differs is then the layout's doing")
        precision = "fp32"
    micro = min(spec.train.micro_batch_size, 2)
    tiny = spec.model_copy(
        update={
            "model": _tiny_model(spec),
            "data": DataSpec(seq_len=_seq_len(spec), mask_documents=spec.data.mask_documents),
            "train": spec.train.model_copy(
                update={
                    "global_batch_size": micro * strategy.dp * _n_micro_batches(spec),
                    "micro_batch_size": micro,
                    "precision": precision,
                    "init_from": None,
                }
            ),
            "strategy": strategy,
            "resources": ResourcesSection(),
        }
    )
    broken = refusals(tiny)
    if broken:
        raise SpecError("\n".join(f"{refusal.key}: {refusal}" for refusal in broken))
    return Shrunk(tiny, tuple(notes))


def _dp(spec: JobSpec, max_ranks: int, notes: list[str]) -> int:
    """The largest dp that leaves few enough ranks and whole sets of experts."""
    mesh = spec.strategy.mesh
    each = mesh.pp * mesh.cp * mesh.tp
    in_stage = mesh.cp * mesh.tp
    for dp in range(mesh.dp, 0, -1):
        if dp * each <= max_ranks and dp * in_stage % (mesh.ep * mesh.etp) == 0:
            if dp < mesh.dp:
                notes.append(
                    f"dp={mesh.dp} is lowered to {dp}: {mesh.world_size} ranks are more than {max_ranks}"
                )
            return dp
    fewest = each * (mesh.ep * mesh.etp // math.gcd(mesh.ep * mesh.etp, in_stage))
    raise SpecError(
        f"strategy: {mesh.world_size} ranks are too many for this machine (at most {max_ranks}), and with "
        f"the smallest dp there are still {fewest}; compare a smaller pp, cp, tp or ep, or raise --max-ranks"
    )


def _with_small_split(strategy: Any, n_layers: int) -> Any:
    """A listed split with the same larger and smaller stages, at most two layers apart."""
    if isinstance(strategy, NativeStrategy):
        split = _small_split(strategy.pipeline.split)
        return strategy.model_copy(update={"pipeline": strategy.pipeline.model_copy(update={"split": split})})
    return strategy.model_copy(update={"split": _small_split(strategy.split)})


def _small_split(split: Split) -> Split:
    if isinstance(split, str):
        return split
    return tuple(1 + min(2, layers - min(split)) for layers in split)


def _n_layers(spec: JobSpec) -> int:
    """Two a stage's worth at most: as many over a whole number of layers a stage as the large model has."""
    strategy, n_layers = spec.strategy, spec.model.n_layers
    n_stages = strategy.mesh.pp
    split: Split = "layers"
    if isinstance(strategy, NativeStrategy):
        n_stages *= strategy.pipeline.stages_per_rank
        split = strategy.pipeline.split
    elif not isinstance(strategy, DeepspeedZeroStrategy):
        split = strategy.split
    small = _small_split(split)
    if not isinstance(small, str):
        return sum(small)
    if n_stages == 1:
        return min(n_layers, 2)
    return n_stages + n_layers % n_stages


def _tiny_model(spec: JobSpec) -> ModelSpec:
    model, mesh, n_layers = spec.model, spec.strategy.mesh, _n_layers(spec)
    n_heads, n_kv_heads = _heads(spec)
    changes: dict[str, Any] = {
        "preset": None,
        "hf_config": None,
        "vocab_size": _rows(VOCAB, model.vocab_size, mesh.tp),
        "n_layers": n_layers,
        "d_model": D_MODEL,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": HEAD_DIM,
        "d_ff": _rows(D_FF, model.d_ff, mesh.tp),
        "max_seq_len": _seq_len(spec),
        "init_std": INIT_STD,
        "moe": None if model.moe is None else _tiny_moe(model.moe, mesh, n_layers),
    }
    return model.model_copy(update=changes)


def _tiny_moe(moe: MoeSpec, mesh: Mesh, n_layers: int) -> MoeSpec:
    top_k, n_shared = min(moe.top_k, 2), min(moe.n_shared_experts, 1)
    each = -(-min(moe.n_experts, max(4, top_k + 1)) // mesh.ep)
    return moe.model_copy(
        update={
            "n_experts": each * mesh.ep,
            "top_k": top_k,
            "d_ff": _expert_d_ff(moe, n_shared, mesh.tp, mesh.etp),
            "n_shared_experts": n_shared,
            "n_dense_layers": min(moe.n_dense_layers, 1, n_layers - 1),
        }
    )


def _seq_len(spec: JobSpec) -> int:
    """SEQ_LEN, or the next that cp and tp cut."""
    mesh = spec.strategy.mesh
    parts = (2 * mesh.cp if mesh.cp > 1 else 1) * mesh.tp
    return -(-SEQ_LEN // parts) * parts


def _heads(spec: JobSpec) -> tuple[int, int]:
    """The fewest heads with kv heads shared by query heads, and by ranks, where the large model's are."""
    large, tp, cp = spec.model, spec.strategy.mesh.tp, 1
    strategy = spec.strategy
    if not isinstance(strategy, DeepspeedPipelineStrategy) and strategy.context_method == "ulysses":
        cp = strategy.cp
    few_kv, grouped = large.n_kv_heads < tp, large.n_heads > large.n_kv_heads

    def fits(heads: int, kv: int) -> bool:
        whole = heads % kv == 0 and heads % (tp * cp) == 0 and (kv % tp == 0 or tp % kv == 0)
        return whole and (kv < tp) == few_kv and (heads > kv) == grouped

    for heads in range(min(4, large.n_heads), large.n_heads + 1):
        for kv in range(min(2, large.n_kv_heads), large.n_kv_heads + 1):
            if fits(heads, kv):
                return heads, kv
    return large.n_heads, large.n_kv_heads


def _expert_d_ff(moe: MoeSpec, n_shared_experts: int, tp: int, etp: int) -> int:
    """Rows of an expert's matrices: over etp as in the large model, enough for shared ones over tp."""
    size = _rows(EXPERT_D_FF, moe.d_ff, etp)
    while n_shared_experts and not _is_full(n_shared_experts * size, tp):
        size = _rows(size + 1, moe.d_ff, etp)
    return size


def _rows(at_least: int, large: int, n_ranks: int) -> int:
    """The smallest number of rows that leaves no rank without one, and divides or not as `large` does."""
    size = at_least
    while (size % n_ranks == 0) != (large % n_ranks == 0) or not _is_full(size, n_ranks):
        size += 1
    return size


def _is_full(rows: int, n_ranks: int) -> bool:
    return -(-rows // n_ranks) * (n_ranks - 1) < rows


def _n_micro_batches(spec: JobSpec) -> int:
    """As many as the run has, up to a few; more where the schedule needs them."""
    strategy, n_micro_batches = spec.strategy, min(spec.grad_accum_steps, MAX_MICRO_BATCHES)
    if isinstance(strategy, NativeStrategy) and strategy.pp > 1:
        section = strategy.pipeline
        while n_micro_batches < spec.grad_accum_steps and schedule_refusal(
            section.schedule, strategy.pp, section.stages_per_rank, n_micro_batches
        ):
            n_micro_batches += 1
    return n_micro_batches
