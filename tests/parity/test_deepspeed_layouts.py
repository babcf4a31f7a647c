"""DeepSpeed over our tensor, sequence and context parallelism, and its pipeline: against one process."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.comm.groups import Groups
from jobs.engines import deepspeed_zero
from jobs.engines.base import Engine, MicroBatch, StepResult
from jobs.engines.build import build_engine
from jobs.engines.deepspeed_state import Piece
from jobs.engines.preload import preload_modules
from jobs.mesh import Mesh
from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.parallel.placement import kv_replicas
from jobs.spec.job import JobSpec
from tests.support.deepspeed_runs import CPU, assemble, load, same, save
from tests.support.ranks import run_ranks

RANKS_PRELOAD = (*preload_modules("deepspeed_zero"), "jobs.engines.deepspeed_pipeline")
pytestmark = pytest.mark.parity

SEQ_LEN = 16
GLOBAL_BATCH = 6
CLIP = 0.2
LR = 1e-2
N_STEPS = 3
EVALUATION = 99
"""Number of the batch that is evaluated."""


def spec_of(strategy: dict[str, Any], accum: int = 1, optim: str = "adamw", **model: Any) -> JobSpec:
    """A tiny run. Gradients are what exp_avg is after one step, since beta1 is 0."""
    shape = {"vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    settings = {"kind": optim, "lr": LR, "grad_clip_norm": CLIP, "weight_decay": 0.1}
    if optim == "adamw":
        settings |= {"beta1": 0.0, "eps": 1e-4}
    plan = {
        "run": {"seed": 3},
        "model": shape | {"d_ff": 48, "max_seq_len": SEQ_LEN, "init_std": 0.1} | model,
        "data": {"seq_len": SEQ_LEN},
        "optim": settings,
        "train": {
            "steps": 20,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": GLOBAL_BATCH // (strategy.get("dp", 1) * accum),
            "precision": strategy.get("precision", "fp32"),
        },
        "strategy": {key: value for key, value in strategy.items() if key != "precision"},
    }
    return JobSpec.model_validate(plan)


def global_batch(step: int) -> MicroBatch:
    """Uneven documents, rows from unmasked to nearly all masked."""
    generator = torch.Generator().manual_seed(40 + step)
    tokens = torch.randint(0, 61, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    masked_frac = torch.linspace(0.0, 0.9, GLOBAL_BATCH)[:, None]
    labels[torch.rand(labels.shape, generator=generator) < masked_frac] = IGNORED_LABEL
    borders = torch.rand(labels.shape, generator=generator) < 0.2
    where = torch.arange(SEQ_LEN).expand_as(labels)
    first = where.where(borders, 0).cummax(1).values
    return MicroBatch(tokens[:, :-1].contiguous(), labels, where - first, borders.cumsum(1).int())


def n_valid(batch: MicroBatch) -> int:
    return int((batch.labels != IGNORED_LABEL).sum())


def rows(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    assert batch.document_ids is not None
    parts = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
    return MicroBatch(*(part[first:last] for part in parts))


def step_of(engine: Engine, spec: JobSpec, groups: Groups, step: int) -> StepResult:
    batch, size = global_batch(step), spec.train.micro_batch_size
    first = groups.dp.rank * size * spec.grad_accum_steps
    batches = [rows(batch, first + k * size, first + (k + 1) * size) for k in range(spec.grad_accum_steps)]
    return engine.train_step(batches, n_valid(batch), LR)


def train(
    groups: Groups, spec: JobSpec, steps: range, start: dict[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Steps of a rank, from a state where there is one; an evaluation of other shape before the last step."""
    engine = build_engine(spec, groups, CPU)
    if start is not None:
        load(engine, start, LR)
    seen: dict[str, Any] = {"results": []}
    share = GLOBAL_BATCH // groups.dp.size
    for step in steps:
        if step == steps[-1]:
            first = groups.dp.rank * share
            seen["evaluated"] = engine.evaluate(rows(global_batch(EVALUATION), first, first + share))
        seen["results"].append(step_of(engine, spec, groups, step))
        if step == steps[0]:
            seen["first"] = save(engine)
    return seen | {"last": save(engine)}


def train_all(groups: Groups, specs: list[JobSpec]) -> list[dict[str, Any]]:
    return [train(groups, spec, range(N_STEPS)) for spec in specs]


def reference(spec: JobSpec, n_steps: int = N_STEPS) -> dict[str, Any]:
    """One process, the whole batch, torch's optimizer."""
    model = build_llama(spec.model, spec.run.seed, CPU)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer: torch.optim.Optimizer
    if spec.optim.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=LR)
    else:
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.0, spec.optim.beta2), eps=spec.optim.eps)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(n_steps):
        if step == n_steps - 1:
            whole = global_batch(EVALUATION)
            found["evaluated"] = (loss_sum(model, whole).item(), n_valid(whole))
        batch = global_batch(step)
        loss = loss_sum(model, batch) / n_valid(batch)
        optimizer.zero_grad()
        loss.backward()
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        found["losses"].append(loss.item())
        optimizer.step()
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
            found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def loss_sum(model: Llama, batch: MicroBatch) -> torch.Tensor:
    return cross_entropy_sum(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)


def check(ranks: list[dict[str, Any]], spec: JobSpec, expected: dict[str, Any]) -> None:
    """Loss, norm, gathered gradients and weights of the first step; later losses and norms; an evaluation."""
    assert min(expected["norms"]) > CLIP, "the test wants clipping to be active"
    for rank in ranks:
        results = rank["results"]
        assert results[0].loss == pytest.approx(expected["losses"][0], abs=1e-6)
        assert results[0].grad_norm == pytest.approx(expected["norms"][0], rel=1e-6)
        assert [r.loss for r in results] == pytest.approx(expected["losses"], abs=1e-5)
        assert [r.grad_norm for r in results] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        assert not any(r.skipped for r in results)
    first = assemble([rank["first"] for rank in ranks])
    names = set(expected["weights"])
    assert {name for name in first if name.startswith("model/")} == {f"model/{name}" for name in names}
    for name, weight in expected["weights"].items():
        assert (first[f"model/{name}"] - weight).abs().max() <= 1e-6, name
        if spec.optim.kind == "adamw":
            gradient, wanted = first[f"optim/exp_avg/{name}"], expected["gradients"][name]
            assert (gradient - wanted).norm() <= 1e-5 * wanted.norm(), name
    if spec.optim.kind == "adamw":
        assert assemble([rank["last"] for rank in ranks])["optim/step"].tolist() == [N_STEPS]


def zero(stage: int, **layout: Any) -> dict[str, Any]:
    options = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"kind": "deepspeed_zero", "stage": stage, "zero_options": options, **layout}


def pipeline(stage: int, **layout: Any) -> dict[str, Any]:
    return {"kind": "deepspeed_pipeline", "stage": stage, **layout}


def run_and_check(tmp_path: Path, specs: list[JobSpec]) -> None:
    """All these specs have one mesh."""
    mesh = specs[0].strategy.mesh
    replicas = kv_replicas(specs[0].model, mesh)
    ranks = run_ranks(train_all, mesh, tmp_path, specs, kv_replicas=replicas)
    for number, spec in enumerate(specs):
        check([rank[number] for rank in ranks], spec, reference(spec))


def test_zero_over_tensor_parallel(tmp_path: Path) -> None:
    specs = [spec_of(zero(stage, tp=2), accum=3) for stage in (0, 1, 2)]
    specs.append(spec_of(zero(3, tp=2, recompute="full"), accum=3))
    specs.append(spec_of(zero(3, tp=2, sequence_parallel=False), tie_embeddings=True))
    run_and_check(tmp_path, specs)


def test_zero_over_tensor_and_data_parallel(tmp_path: Path) -> None:
    specs = [spec_of(zero(stage, dp=2, tp=2), optim="sgd") for stage in (0, 1, 3)]
    run_and_check(tmp_path, [*specs, spec_of(zero(2, dp=2, tp=2), vocab_size=63)])


def test_zero_where_tp_ranks_share_a_kv_head(tmp_path: Path) -> None:
    run_and_check(tmp_path, [spec_of(zero(stage, tp=2), n_kv_heads=1) for stage in (0, 1, 2, 3)])


def test_zero_over_context_parallel(tmp_path: Path) -> None:
    methods = ("ring", "ulysses", "all_gather")
    layouts = [zero(stage, cp=2, context_method=m) for stage, m in zip((1, 2, 3), methods, strict=True)]
    run_and_check(tmp_path, [spec_of(layout, accum=2) for layout in layouts])


def test_zero_over_context_and_tensor_parallel(tmp_path: Path) -> None:
    run_and_check(tmp_path, [spec_of(zero(stage, cp=2, tp=2)) for stage in (0, 1, 3)])


def _count_all(pieces: Mapping[torch.Tensor, Piece]) -> None:
    for parameter in pieces:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _leave(*_: Any) -> None:
    pass


MUTATIONS = {
    "partial gradients are left as they are": ("sum_partial_gradients", _leave),
    "each copy of a norm counts in the gradient norm": ("mark_counted", _count_all),
    "only tp rank 0 counts in the gradient norm": ("mark_counted", _leave),
}


def _train_mutants(groups: Groups, spec: JobSpec) -> list[dict[str, Any]]:
    seen = []
    for name, broken in MUTATIONS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deepspeed_zero, name, broken)
            seen.append(train(groups, spec, range(N_STEPS)))
    return seen


def test_what_is_checked_notices_a_missing_sum(tmp_path: Path) -> None:
    spec = spec_of(zero(1, tp=2), n_kv_heads=1)
    ranks = run_ranks(_train_mutants, spec.strategy.mesh, tmp_path, spec, kv_replicas=2)
    expected = reference(spec)
    for number, mutation in enumerate(MUTATIONS):
        norms = [rank[number]["results"][0].grad_norm for rank in ranks]
        with pytest.raises(AssertionError):
            check([rank[number] for rank in ranks], spec, expected)
        assert norms[0] != pytest.approx(expected["norms"][0], rel=1e-4), mutation


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_of_two(tied: bool, tmp_path: Path) -> None:
    specs = [spec_of(pipeline(stage, pp=2), accum=3, tie_embeddings=tied) for stage in (0, 1)]
    specs.append(spec_of(pipeline(1, pp=2, recompute="full"), optim="sgd", tie_embeddings=tied))
    run_and_check(tmp_path, specs)


def test_pipeline_of_four_uneven_stages(tmp_path: Path) -> None:
    specs = [
        spec_of(pipeline(stage, pp=4, split=split), accum=3, n_layers=10, tie_embeddings=tied)
        for stage, split, tied in ((0, "layers", False), (1, (1, 4, 3, 2), True), (1, "parameters", True))
    ]
    run_and_check(tmp_path, specs)


def test_pipeline_with_data_parallel(tmp_path: Path) -> None:
    run_and_check(
        tmp_path, [spec_of(pipeline(stage, dp=2, pp=2), accum=3, tie_embeddings=True) for stage in (0, 1)]
    )


def test_bf16_layouts_follow_bf16_on_one_rank(tmp_path: Path) -> None:
    """The same products in bf16: sums are rounded in another order, the masters stay fp32."""
    bf16 = {"precision": "bf16"}
    plain = run_ranks(train_all, 1, tmp_path, [spec_of(zero(1) | bf16, accum=3)])
    pipelines = [spec_of(pipeline(1, pp=2) | bf16, accum=3)]
    cut = [spec_of(zero(stage, tp=2) | bf16, accum=3) for stage in (1, 2, 3)]
    for specs in (pipelines, cut):
        ranks = run_ranks(train_all, specs[0].strategy.mesh, tmp_path, specs)
        for seen in [seen for rank in ranks for seen in rank]:
            for mine, wanted in zip(seen["results"], plain[0][0]["results"], strict=True):
                assert mine.loss == pytest.approx(wanted.loss, abs=2e-3)
                assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)


def test_bf16_pipeline_without_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="stage=0"):
        spec_of(pipeline(0, pp=2) | {"precision": "bf16"})


Spoil = Callable[[Any], AbstractContextManager[None]]
"""Engine -> for the length of a with-block its steps go wrong on this rank."""


def _around_a_bad_step(groups: Groups, spec: JobSpec, spoil: Spoil) -> tuple[StepResult, StepResult, bool]:
    """A step that is spoiled on rank 1 only, the next one, and whether the first left the state alone."""
    engine = build_engine(spec, groups, CPU)
    step_of(engine, spec, groups, 0)
    before = save(engine)
    with spoil(engine) if groups.rank == 1 else nullcontext():
        bad = step_of(engine, spec, groups, 1)
    unchanged = same(before, save(engine))
    return bad, step_of(engine, spec, groups, 1), unchanged


@contextmanager
def _infinite_gradient(engine: Any) -> Iterator[None]:
    parameter = dict(engine.model.named_parameters())["layers.1.self_attn.o_proj.weight"]
    handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
    yield
    handle.remove()


def _poisoned(groups: Groups, specs: list[JobSpec]) -> list[list[str]]:
    """What is wrong after a gradient that is infinite on rank 1 only, for each spec."""
    wrong = []
    for spec in specs:
        skipped, next_step, unchanged = _around_a_bad_step(groups, spec, _infinite_gradient)
        faults = {
            "not skipped": not skipped.skipped or next_step.skipped,
            "norm is finite": math.isfinite(skipped.grad_norm),
            "state changed": not unchanged,
            "loss of the next step": not math.isclose(next_step.loss, skipped.loss, abs_tol=1e-6),
        }
        wrong.append([text for text, is_wrong in faults.items() if is_wrong])
    return wrong


@pytest.mark.parametrize(
    "layouts", [[zero(stage, tp=2) for stage in (0, 1, 3)], [pipeline(stage, pp=2) for stage in (0, 1)]]
)
def test_infinite_gradient_on_one_rank_skips_the_step_on_all(
    layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    specs = [spec_of(layout) for layout in layouts]
    for rank in run_ranks(_poisoned, specs[0].strategy.mesh, tmp_path, specs):
        assert rank == [[] for _ in specs]


@contextmanager
def _infinite_loss(engine: Any) -> Iterator[None]:
    name = "_cross_entropy" if hasattr(engine, "_cross_entropy") else "_loss"
    loss = getattr(engine, name)
    setattr(engine, name, lambda logits, labels: loss(logits, labels) + torch.inf)
    yield
    setattr(engine, name, loss)


def _infinite_losses(groups: Groups, specs: list[JobSpec]) -> list[list[str]]:
    """What is wrong after a loss that is infinite on rank 1 while its gradient is not, for each spec."""
    wrong = []
    for spec in specs:
        skipped, next_step, unchanged = _around_a_bad_step(groups, spec, _infinite_loss)
        is_named = skipped.is_cause == (groups.rank == 1) or spec.strategy.kind == "deepspeed_pipeline"
        faults = {
            "not skipped": not skipped.skipped or next_step.skipped,
            "loss is finite": math.isfinite(skipped.loss),
            "another rank is named": not is_named,
            "state changed": not unchanged,
        }
        wrong.append([text for text, is_wrong in faults.items() if is_wrong])
    return wrong


@pytest.mark.parametrize(
    "layouts", [[zero(stage, dp=2) for stage in (0, 1, 2, 3)], [pipeline(stage, pp=2) for stage in (0, 1)]]
)
def test_an_infinite_loss_with_a_finite_gradient_skips_the_step_on_all(
    layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    specs = [spec_of(layout) for layout in layouts]
    for rank in run_ranks(_infinite_losses, specs[0].strategy.mesh, tmp_path, specs):
        assert rank == [[] for _ in specs]


def _go_on(groups: Groups, spec: JobSpec, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    return train(groups, spec, range(N_STEPS, 2 * N_STEPS), whole)


ROUTES = {
    "pipeline to native": (pipeline(1, pp=2), {"kind": "native", "dp": 2}),
    "tensor parallel ZeRO-3 to pipeline": (zero(3, tp=2), pipeline(0, pp=2)),
    "pipeline to tensor parallel ZeRO-2": (pipeline(1, pp=2), zero(2, tp=2)),
}


@pytest.mark.parametrize("route", ROUTES)
def test_state_moves_between_layouts(route: str, tmp_path: Path) -> None:
    before, after = (spec_of(layout, tie_embeddings=True) for layout in ROUTES[route])
    ranks = run_ranks(train_all, before.strategy.mesh, tmp_path, [before])
    whole = assemble([rank[0]["last"] for rank in ranks])
    expected = reference(after, 2 * N_STEPS)
    for rank in run_ranks(_go_on, after.strategy.mesh, tmp_path, after, whole):
        assert [r.loss for r in rank["results"]] == pytest.approx(expected["losses"][N_STEPS:], abs=1e-5)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


def _one_stage_is_missing(groups: Groups, spec: JobSpec) -> float:
    engine = build_engine(spec, groups, CPU)
    step_of(engine, spec, groups, 0)
    began_at_mono_s = time.monotonic()
    if groups.rank == 1:
        time.sleep(6.0)
    else:
        with pytest.raises(RuntimeError):
            step_of(engine, spec, groups, 1)
    return time.monotonic() - began_at_mono_s


def test_a_stage_whose_neighbour_does_not_come_raises_by_itself(tmp_path: Path) -> None:
    spec = spec_of(pipeline(0, pp=2))
    limited = spec.model_copy(
        update={"resilience": spec.resilience.model_copy(update={"collective_timeout_s": 3.0})}
    )
    waited_s, missing_s = run_ranks(
        _one_stage_is_missing, Mesh(pp=2), tmp_path, limited, collective_timeout_s=3.0
    )
    assert waited_s < missing_s
