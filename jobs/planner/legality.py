"""Which layouts fit which run: each rule, with the reason and the nearest legal layout. Pure; no torch.

A layout that passes here builds and trains; one that does not is refused before anything starts. What one key
alone may be is the schema's business (jobs/spec), and what a cluster has is not looked at.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from jobs.mesh import AXES, Mesh
from jobs.planner.stages import recompute_refusal, schedule_refusal
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy, DeepspeedZeroStrategy, NativeStrategy

SIZES = (*AXES, "ep", "etp")
"""The axes that a spec gives sizes of."""
ONLY_NATIVE = ("bf16_kahan", "fp8", "fp64")
"""Precisions that DeepSpeed's engines do not have."""
MAX_CANDIDATES = 20_000
"""Layouts that the search for the nearest looks at, the nearest first."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a run cannot be executed as it is written."""

    key: str
    """Dotted key of the spec to blame."""
    reason: str
    """One sentence, with the numbers."""
    nearest: str
    """What to set instead, as `key=value`, several divided by spaces."""
    layout: Mesh | None = None
    """The nearest legal layout, where another layout is the way out."""

    def __str__(self) -> str:
        return f"{self.reason}; nearest: {self.nearest}"


@dataclass(frozen=True)
class _Breach:
    """A broken rule. `instead` is None where another layout is the way out."""

    key: str
    reason: str
    instead: str | None = None
    alternative: str = ""
    """Besides another layout."""


def refusals(spec: JobSpec) -> list[Refusal]:
    """All rules that a run breaks; empty where its layout is legal."""
    broken = list(_breaches(spec))
    if not broken:
        return []
    layout = None
    if any(breach.instead is None for breach in broken):
        layout = nearest_layout(spec)
    found = []
    for breach in broken:
        nearest, mesh = breach.instead, None
        if nearest is None:
            mesh = layout
            nearest = (
                _described(spec, layout) if layout is not None else "no layout of so many ranks or fewer"
            )
            nearest += f"; or {breach.alternative}" if breach.alternative else ""
        found.append(Refusal(breach.key, breach.reason, nearest, mesh))
    return found


def refusal_text(spec: JobSpec) -> str | None:
    """All refusals as one text, `key: reason; nearest: ...` a line; None where the layout is legal."""
    found = refusals(spec)
    return "\n".join(f"{refusal.key}: {refusal}" for refusal in found) if found else None


def nearest_layout(spec: JobSpec) -> Mesh | None:
    """The legal layout that changes least: with as many ranks where there is one, else with fewer.

    Rules that no layout mends (a precision, say) are left out of account. Least is: the fewest axes, then
    the smallest factors. None where there is none.
    """
    others = {breach.key for breach in _breaches(spec) if breach.instead is not None}
    for candidates in (_of_equal_size(spec), _of_smaller_size(spec)):
        for mesh in candidates[:MAX_CANDIDATES]:
            left = _breaches(with_layout(spec, mesh))
            if all(breach.instead is not None and breach.key in others for breach in left):
                return mesh
    return None


def with_layout(spec: JobSpec, mesh: Mesh) -> JobSpec:
    """The spec with other axis sizes; nothing is checked."""
    sizes = {axis: getattr(mesh, axis) for axis in SIZES if axis in type(spec.strategy).model_fields}
    return spec.model_copy(update={"strategy": spec.strategy.model_copy(update=sizes)})


def _breaches(spec: JobSpec) -> Iterator[_Breach]:
    for rule in RULES:
        yield from rule(spec)


def _batch(spec: JobSpec) -> Iterator[_Breach]:
    micro, dp, whole = spec.train.micro_batch_size, spec.strategy.dp, spec.train.global_batch_size
    if whole % (micro * dp):
        more = -(-whole // (micro * dp)) * micro * dp
        yield _Breach(
            "train.global_batch_size",
            f"global_batch_size={whole} is not micro_batch_size={micro} x dp={dp} x a whole number",
            alternative=f"train.global_batch_size={more}",
        )


def _heads(spec: JobSpec) -> Iterator[_Breach]:
    model, tp = spec.model, spec.strategy.mesh.tp
    if model.n_heads % tp:
        yield _Breach(
            "strategy.tp",
            f"{model.n_heads} attention heads do not divide over tp={tp} ranks, which compute whole heads",
        )
    elif model.n_kv_heads % tp and tp % model.n_kv_heads:
        yield _Breach(
            "strategy.tp",
            f"{model.n_kv_heads} kv heads do not divide over tp={tp} ranks, nor the ranks over the heads "
            "(with fewer heads than ranks, equally many ranks hold each)",
        )


def _matrices(spec: JobSpec) -> Iterator[_Breach]:
    """Rows are cut like torch.chunk: all ranks but the last few hold as many, and none may have nothing."""
    model, mesh = spec.model, spec.strategy.mesh
    cuts = [("vocab_size", model.vocab_size, "tp", mesh.tp)]
    if model.moe is None or model.moe.n_dense_layers:
        cuts.append(("d_ff", model.d_ff, "tp", mesh.tp))
    if model.moe is not None:
        cuts.append(("moe.d_ff", model.moe.d_ff, "etp", mesh.etp))
        if model.moe.n_shared_experts:
            width = model.moe.n_shared_experts * model.moe.d_ff
            cuts.append(("moe.n_shared_experts x d_ff", width, "tp", mesh.tp))
    for name, rows, axis, n_ranks in cuts:
        each = -(-rows // n_ranks)
        if each * (n_ranks - 1) >= rows:
            yield _Breach(
                f"strategy.{axis}",
                f"{name}={rows} in pieces of {each} fills {-(-rows // each)} of {axis}={n_ranks} ranks",
            )


def _stages(spec: JobSpec) -> Iterator[_Breach]:
    strategy = spec.strategy
    pp, n_layers = strategy.mesh.pp, spec.model.n_layers
    if isinstance(strategy, DeepspeedZeroStrategy):
        return
    if isinstance(strategy, NativeStrategy):
        pipeline = strategy.pipeline
        key, split, each = "strategy.pipeline.split", pipeline.split, pipeline.stages_per_rank
    else:
        key, split, each = "strategy.split", strategy.split, 1
    n_stages = pp * each
    if n_layers < n_stages:
        yield _Breach(
            "strategy.pp",
            f"{n_layers} layers do not fill pp={pp} x stages_per_rank={each} = {n_stages} pipeline stages",
        )
    elif not isinstance(split, str) and (len(split) != n_stages or sum(split) != n_layers):
        fewest, more = divmod(n_layers, n_stages)
        even = [fewest + (index < more) for index in range(n_stages)]
        yield _Breach(
            key,
            f"split={list(split)} has {len(split)} stages and {sum(split)} layers; there are {n_stages} "
            f"stages (pp={pp} x stages_per_rank={each}) and {n_layers} layers",
            f"{key}={even}",
        )


def _schedule(spec: JobSpec) -> Iterator[_Breach]:
    strategy = spec.strategy
    if not isinstance(strategy, NativeStrategy):
        return
    pp, pipeline = strategy.pp, strategy.pipeline
    if pp == 1:
        if pipeline.stages_per_rank > 1:
            yield _Breach(
                "strategy.pipeline.stages_per_rank",
                f"stages_per_rank={pipeline.stages_per_rank} with pp=1: one rank has nobody to send to",
                "strategy.pipeline.stages_per_rank=1",
            )
        return
    reason = schedule_refusal(pipeline.schedule, pp, pipeline.stages_per_rank, spec.grad_accum_steps)
    if reason is None:
        return
    fits = _fitting_pipeline(spec)
    yield _Breach("strategy.pipeline.schedule", reason, fits)


def _fitting_pipeline(spec: JobSpec) -> str:
    """Another number of stages a rank, else of micro-batches, else schedule, that goes with the rest."""
    strategy = spec.strategy
    assert isinstance(strategy, NativeStrategy)
    pipeline, pp, accum = strategy.pipeline, strategy.pp, spec.grad_accum_steps
    for each in (1, 2):
        if schedule_refusal(pipeline.schedule, pp, each, accum) is None and pp * each <= spec.model.n_layers:
            return f"strategy.pipeline.stages_per_rank={each}"
    micro = spec.train.micro_batch_size
    for smaller in range(micro - 1, 0, -1):
        more, rest = divmod(micro * accum, smaller)
        if not rest and schedule_refusal(pipeline.schedule, pp, pipeline.stages_per_rank, more) is None:
            return f"train.micro_batch_size={smaller} (then there are {more} micro-batches)"
    if pipeline.stages_per_rank == 1:
        return "strategy.pipeline.schedule=gpipe"
    for more in range(accum + 1, accum + 4 * pp):
        if schedule_refusal(pipeline.schedule, pp, pipeline.stages_per_rank, more) is None:
            whole = micro * strategy.dp * more
            return f"train.global_batch_size={whole} (then there are {more} micro-batches)"
    return "strategy.pipeline.schedule=gpipe strategy.pipeline.stages_per_rank=1"


def _sequence(spec: JobSpec) -> Iterator[_Breach]:
    strategy, seq_len = spec.strategy, spec.data.seq_len
    mesh = strategy.mesh
    if isinstance(strategy, DeepspeedPipelineStrategy):
        return
    is_cut_over_tp = strategy.sequence_parallel and mesh.tp > 1
    parts = (2 * mesh.cp if mesh.cp > 1 else 1) * (mesh.tp if is_cut_over_tp else 1)
    if seq_len % parts:
        why, named = [], []
        if mesh.cp > 1:
            named.append("zig-zag of context parallelism")
            why.append(f"2 x cp={mesh.cp}")
        if is_cut_over_tp:
            named.append("sequence parallelism")
            why.append(f"tp={mesh.tp}")
        more = -(-seq_len // parts) * parts
        fits = more if more <= spec.model.max_seq_len else seq_len // parts * parts
        yield _Breach(
            "strategy.cp" if mesh.cp > 1 else "strategy.tp",
            f"data.seq_len={seq_len} does not divide into {' x '.join(why)} = {parts} parts "
            f"({' and '.join(named)})",
            alternative=f"data.seq_len={fits}" if fits > 1 else "",
        )
    heads = spec.model.n_heads // mesh.tp
    if mesh.cp > 1 and strategy.context_method == "ulysses" and heads % mesh.cp:
        yield _Breach(
            "strategy.cp",
            f"the {heads} heads of a tp rank (n_heads={spec.model.n_heads} / tp={mesh.tp}) do not divide "
            f"over cp={mesh.cp} ranks, as ulysses shares them",
            alternative="strategy.context_method=ring",
        )


def _experts(spec: JobSpec) -> Iterator[_Breach]:
    moe, mesh = spec.model.moe, spec.strategy.mesh
    if moe is None:
        for axis in ("ep", "etp"):
            if getattr(mesh, axis) > 1:
                yield _Breach(
                    f"strategy.{axis}",
                    f"{axis}={getattr(mesh, axis)} spreads experts, and the model has none (no model.moe)",
                    f"strategy.{axis}=1",
                )
        return
    if moe.n_experts % mesh.ep:
        yield _Breach("strategy.ep", f"{moe.n_experts} experts cannot be split over ep={mesh.ep}")
    in_stage = mesh.dp * mesh.cp * mesh.tp
    if in_stage % (mesh.ep * mesh.etp):
        yield _Breach(
            "strategy.ep" if mesh.ep > 1 else "strategy.etp",
            f"ep={mesh.ep} x etp={mesh.etp} = {mesh.ep * mesh.etp} does not divide the {in_stage} ranks of a "
            f"pipeline stage (dp={mesh.dp} x cp={mesh.cp} x tp={mesh.tp}), which the experts are spread over",
        )
    strategy = spec.strategy
    if mesh.tp > 1 and not isinstance(strategy, DeepspeedPipelineStrategy) and not strategy.sequence_parallel:
        yield _Breach(
            "strategy.sequence_parallel",
            f"experts with tp={mesh.tp} and sequence_parallel=false: each tp rank would send the same tokens",
            "strategy.sequence_parallel=true",
        )


def _deepspeed(spec: JobSpec) -> Iterator[_Breach]:
    strategy, precision = spec.strategy, spec.train.precision
    if isinstance(strategy, NativeStrategy):
        return
    if precision in ONLY_NATIVE:
        yield _Breach(
            "train.precision",
            f"precision={precision} is the native engine's; kind={strategy.kind} trains in fp32 or bf16",
            f"train.precision={'fp32' if precision == 'fp64' else 'bf16'}",
        )
    if spec.model.moe is not None:
        yield _Breach(
            "strategy.kind",
            f"kind={strategy.kind} trains dense models, and this one has {spec.model.moe.n_experts} experts: "
            "ZeRO shares every parameter over all of dp x cp, experts have their own ranks",
            "strategy.kind=native strategy.zero_stage=1",
        )


def _precision(spec: JobSpec) -> Iterator[_Breach]:
    if spec.train.precision == "fp8" and spec.resources.gpus_per_worker == 0:
        yield _Breach(
            "train.precision",
            "precision=fp8 wants GPUs with fp8 products, and resources.gpus_per_worker=0",
            "train.precision=bf16",
        )


def _recompute(spec: JobSpec) -> Iterator[_Breach]:
    strategy = spec.strategy
    if not isinstance(strategy, NativeStrategy):
        return
    is_one = isinstance(strategy.recompute, str)
    modes = [strategy.recompute] if isinstance(strategy.recompute, str) else list(strategy.recompute)
    n_stages = strategy.pp * strategy.pipeline.stages_per_rank
    if not is_one and len(modes) != n_stages:
        fits = [*modes, *["none"] * n_stages][:n_stages]
        yield _Breach(
            "strategy.recompute",
            f"recompute has {len(modes)} entries for {n_stages} pipeline stages "
            f"(pp={strategy.pp} x stages_per_rank={strategy.pipeline.stages_per_rank})",
            f"strategy.recompute=[{', '.join(fits)}]",
        )
    reason = recompute_refusal(strategy.pipeline.schedule, modes) if strategy.pp > 1 else None
    if reason is not None:
        fits = ["attention" if mode in ("full", "ops") else mode for mode in modes]
        yield _Breach(
            "strategy.recompute",
            reason,
            "strategy.recompute=" + (fits[0] if is_one else f"[{', '.join(fits)}]"),
        )


RULES: tuple[Callable[[JobSpec], Iterator[_Breach]], ...] = (
    _batch,
    _heads,
    _matrices,
    _stages,
    _schedule,
    _sequence,
    _experts,
    _deepspeed,
    _precision,
    _recompute,
)
"""Each yields what a run breaks of it."""


def _of_equal_size(spec: JobSpec) -> list[Mesh]:
    own = spec.strategy.mesh
    dense = [axis for axis in AXES if axis in type(spec.strategy).model_fields]
    meshes = [
        Mesh(**dict(zip(dense, sizes, strict=True)), ep=ep, etp=etp)
        for sizes in _factorings(own.world_size, len(dense))
        for ep, etp in _expert_sizes(spec)
    ]
    return sorted(meshes, key=lambda mesh: _distance(own, mesh))


def _of_smaller_size(spec: JobSpec) -> list[Mesh]:
    """Every axis by one of its divisors, or one axis by any smaller number."""
    own = spec.strategy.mesh
    sizes = {axis: getattr(own, axis) for axis in SIZES}
    meshes = {Mesh(*chosen) for chosen in product(*(_divisors(size) for size in sizes.values()))}
    meshes |= {Mesh(**sizes | {axis: n}) for axis, size in sizes.items() for n in range(1, min(size, 4096))}
    return sorted(meshes, key=lambda mesh: (_distance(own, mesh), -mesh.world_size))


def _expert_sizes(spec: JobSpec) -> list[tuple[int, int]]:
    own, moe = spec.strategy.mesh, spec.model.moe
    if moe is None or "ep" not in type(spec.strategy).model_fields:
        return [(own.ep, own.etp)]
    return [(ep, etp) for ep in {own.ep, *_divisors(moe.n_experts)} for etp in _divisors(own.etp)]


def _factorings(n: int, n_factors: int) -> Iterator[tuple[int, ...]]:
    if n_factors == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factorings(n // first, n_factors - 1):
            yield first, *rest


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _distance(own: Mesh, other: Mesh) -> tuple[int, float, tuple[int, ...]]:
    ratios = [abs(math.log2(getattr(other, axis) / getattr(own, axis))) for axis in SIZES]
    n_changed = sum(ratio > 0 for ratio in ratios)
    return n_changed, round(sum(ratios), 6), tuple(-getattr(other, axis) for axis in SIZES)


def _described(spec: JobSpec, mesh: Mesh) -> str:
    """The axes that change, as a user would write them after --set."""
    own = spec.strategy.mesh
    changes = [a for a in SIZES if getattr(mesh, a) != getattr(own, a)]
    return " ".join(f"strategy.{axis}={getattr(mesh, axis)}" for axis in changes)
