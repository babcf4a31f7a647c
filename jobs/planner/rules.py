"""The rules of a legal layout: each yields what a run breaks of it, with the reason. Pure; no torch.

Knows no better layout: where only another layout helps, legality.py looks for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jobs.planner.stages import recompute_refusal, schedule_refusal
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy, DeepspeedZeroStrategy, NativeStrategy

ONLY_NATIVE = ("bf16_kahan", "fp8", "fp64")
"""Precisions that DeepSpeed's engines do not have."""


@dataclass(frozen=True)
class Breach:
    """A broken rule."""

    key: str
    """Dotted key of the spec to blame."""
    reason: str
    """One sentence, with the numbers."""
    instead: str | None = None
    """What to set, as `key=value`; None where another layout is the way out."""
    alternative: str = ""
    """What helps besides another layout, as `key=value`."""


def breaches(spec: JobSpec) -> Iterator[Breach]:
    """All that a run breaks, in the order of RULES."""
    for rule in RULES:
        yield from rule(spec)


def _batch(spec: JobSpec) -> Iterator[Breach]:
    micro, dp, whole = spec.train.micro_batch_size, spec.strategy.dp, spec.train.global_batch_size
    if whole % (micro * dp):
        more = -(-whole // (micro * dp)) * micro * dp
        yield Breach(
            "train.global_batch_size",
            f"global_batch_size={whole} is not micro_batch_size={micro} x dp={dp} x a whole number",
            alternative=f"train.global_batch_size={more}",
        )


def _heads(spec: JobSpec) -> Iterator[Breach]:
    model, tp = spec.model, spec.strategy.mesh.tp
    if model.n_heads % tp:
        yield Breach(
            "strategy.tp",
            f"{model.n_heads} attention heads do not divide over tp={tp} ranks, which compute whole heads",
        )
    elif model.n_kv_heads % tp and tp % model.n_kv_heads:
        yield Breach(
            "strategy.tp",
            f"{model.n_kv_heads} kv heads do not divide over tp={tp} ranks, nor the ranks over the heads "
            "(with fewer heads than ranks, equally many ranks hold each)",
        )


def _matrices(spec: JobSpec) -> Iterator[Breach]:
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
            yield Breach(
                f"strategy.{axis}",
                f"{name}={rows} in pieces of {each} fills {-(-rows // each)} of {axis}={n_ranks} ranks",
            )


def _stages(spec: JobSpec) -> Iterator[Breach]:
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
        yield Breach(
            "strategy.pp",
            f"{n_layers} layers do not fill pp={pp} x stages_per_rank={each} = {n_stages} pipeline stages",
            f"strategy.pipeline.stages_per_rank={n_layers // pp}" if each > 1 and pp <= n_layers else None,
        )
    elif not isinstance(split, str) and (len(split) != n_stages or sum(split) != n_layers):
        fewest, more = divmod(n_layers, n_stages)
        even = [fewest + (index < more) for index in range(n_stages)]
        yield Breach(
            key,
            f"split={list(split)} has {len(split)} stages and {sum(split)} layers; there are {n_stages} "
            f"stages (pp={pp} x stages_per_rank={each}) and {n_layers} layers",
            f"{key}={even}",
        )


def _schedule(spec: JobSpec) -> Iterator[Breach]:
    strategy = spec.strategy
    if not isinstance(strategy, NativeStrategy):
        return
    pp, pipeline = strategy.pp, strategy.pipeline
    if pp == 1:
        if pipeline.stages_per_rank > 1:
            yield Breach(
                "strategy.pipeline.stages_per_rank",
                f"stages_per_rank={pipeline.stages_per_rank} with pp=1: one rank has nobody to send to",
                "strategy.pipeline.stages_per_rank=1",
            )
        return
    reason = schedule_refusal(pipeline.schedule, pp, pipeline.stages_per_rank, spec.grad_accum_steps)
    if reason is None:
        return
    fits = _fitting_pipeline(spec)
    yield Breach("strategy.pipeline.schedule", reason, fits)


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


def _sequence(spec: JobSpec) -> Iterator[Breach]:
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
        yield Breach(
            "strategy.cp" if mesh.cp > 1 else "strategy.tp",
            f"data.seq_len={seq_len} does not divide into {' x '.join(why)} = {parts} parts "
            f"({' and '.join(named)})",
            alternative=f"data.seq_len={fits}" if fits > 1 else "",
        )
    heads = spec.model.n_heads // mesh.tp
    if mesh.cp > 1 and strategy.context_method == "ulysses" and heads % mesh.cp:
        yield Breach(
            "strategy.cp",
            f"the {heads} heads of a tp rank (n_heads={spec.model.n_heads} / tp={mesh.tp}) do not divide "
            f"over cp={mesh.cp} ranks, as ulysses shares them",
            alternative="strategy.context_method=ring",
        )


def _experts(spec: JobSpec) -> Iterator[Breach]:
    moe, mesh = spec.model.moe, spec.strategy.mesh
    if moe is None:
        for axis in ("ep", "etp"):
            if getattr(mesh, axis) > 1:
                yield Breach(
                    f"strategy.{axis}",
                    f"{axis}={getattr(mesh, axis)} spreads experts, and the model has none (no model.moe)",
                    f"strategy.{axis}=1",
                )
        return
    if moe.n_experts % mesh.ep:
        yield Breach("strategy.ep", f"{moe.n_experts} experts cannot be split over ep={mesh.ep}")
    in_stage = mesh.dp * mesh.cp * mesh.tp
    if in_stage % (mesh.ep * mesh.etp):
        yield Breach(
            "strategy.ep" if mesh.ep > 1 else "strategy.etp",
            f"ep={mesh.ep} x etp={mesh.etp} = {mesh.ep * mesh.etp} does not divide the {in_stage} ranks of a "
            f"pipeline stage (dp={mesh.dp} x cp={mesh.cp} x tp={mesh.tp}), which the experts are spread over",
        )
    strategy = spec.strategy
    if mesh.tp > 1 and not isinstance(strategy, DeepspeedPipelineStrategy) and not strategy.sequence_parallel:
        yield Breach(
            "strategy.sequence_parallel",
            f"experts with tp={mesh.tp} and sequence_parallel=false: each tp rank would send the same tokens",
            "strategy.sequence_parallel=true",
        )


def _deepspeed(spec: JobSpec) -> Iterator[Breach]:
    strategy, precision = spec.strategy, spec.train.precision
    if isinstance(strategy, NativeStrategy):
        return
    if precision in ONLY_NATIVE:
        yield Breach(
            "train.precision",
            f"precision={precision} is the native engine's; kind={strategy.kind} trains in fp32 or bf16",
            f"train.precision={'fp32' if precision == 'fp64' else 'bf16'}",
        )
    if spec.model.moe is not None:
        yield Breach(
            "strategy.kind",
            f"kind={strategy.kind} trains dense models, and this one has {spec.model.moe.n_experts} experts: "
            "ZeRO shares every parameter over all of dp x cp, experts have their own ranks",
            "strategy.kind=native strategy.zero_stage=1",
        )


def _precision(spec: JobSpec) -> Iterator[Breach]:
    if spec.train.precision == "fp8" and spec.resources.gpus_per_worker == 0:
        yield Breach(
            "train.precision",
            "precision=fp8 wants GPUs with fp8 products, and resources.gpus_per_worker=0",
            "train.precision=bf16",
        )


def _recompute(spec: JobSpec) -> Iterator[Breach]:
    strategy = spec.strategy
    if not isinstance(strategy, NativeStrategy):
        return
    is_one = isinstance(strategy.recompute, str)
    modes = [strategy.recompute] if isinstance(strategy.recompute, str) else list(strategy.recompute)
    n_stages = strategy.pp * strategy.pipeline.stages_per_rank
    if not is_one and len(modes) != n_stages:
        fits = [*modes, *["none"] * n_stages][:n_stages]
        yield Breach(
            "strategy.recompute",
            f"recompute has {len(modes)} entries for {n_stages} pipeline stages "
            f"(pp={strategy.pp} x stages_per_rank={strategy.pipeline.stages_per_rank})",
            f"strategy.recompute=[{', '.join(fits)}]",
        )
    reason = recompute_refusal(strategy.pipeline.schedule, modes) if strategy.pp > 1 else None
    if reason is not None:
        fits = ["attention" if mode in ("full", "ops") else mode for mode in modes]
        yield Breach(
            "strategy.recompute",
            reason,
            "strategy.recompute=" + (fits[0] if is_one else f"[{', '.join(fits)}]"),
        )


RULES: tuple[Callable[[JobSpec], Iterator[Breach]], ...] = (
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
