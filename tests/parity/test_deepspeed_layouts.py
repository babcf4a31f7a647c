"""DeepSpeed over our tensor, sequence and context parallelism, and its pipeline: against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.comm.groups import Groups
from jobs.engines.base import Engine, MicroBatch, StepResult
from jobs.engines.build import build_engine
from jobs.engines.preload import preload_modules
from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.parallel.placement import kv_replicas
from jobs.spec.job import JobSpec
from tests.support.deepspeed_runs import CPU, assemble, load, save
from tests.support.ranks import run_ranks

RANKS_PRELOAD = preload_modules("deepspeed_zero")
pytestmark = pytest.mark.parity

SEQ_LEN = 16
GLOBAL_BATCH = 6
CLIP = 0.2
LR = 1e-2


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
            "precision": strategy.pop("precision", "fp32"),
        },
        "strategy": strategy,
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
    groups: Groups, spec: JobSpec, n_steps: int, start: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    engine = build_engine(spec, groups, CPU)
    if start is not None:
        load(engine, start, LR)
    results = []
    for step in range(n_steps):
        results.append(step_of(engine, spec, groups, step))
        if step == 0:
            after_first = save(engine)
    size = spec.train.micro_batch_size
    evaluated = engine.evaluate(rows(global_batch(9), groups.dp.rank * size, (groups.dp.rank + 1) * size))
    return {"results": results, "first": after_first, "last": save(engine), "evaluated": evaluated}


def train_all(groups: Groups, specs: list[JobSpec]) -> list[dict[str, Any]]:
    return [train(groups, spec, 3, None) for spec in specs]


def reference(spec: JobSpec, n_steps: int) -> dict[str, Any]:
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
    losses, norms, gradients, weights = [], [], {}, {}
    for step in range(n_steps):
        batch = global_batch(step)
        loss = loss_sum(model, batch) / n_valid(batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights, "model": model}


def loss_sum(model: Llama, batch: MicroBatch) -> torch.Tensor:
    return cross_entropy_sum(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)


def check(ranks: list[dict[str, Any]], spec: JobSpec, expected: dict[str, Any]) -> None:
    """Loss, norm, gathered gradients after the first step, weights after it, later losses, evaluation."""
    assert min(expected["norms"]) > CLIP, "the test wants clipping to be active"
    for rank in ranks:
        assert [r.loss for r in rank["results"]] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["results"][0].loss == pytest.approx(expected["losses"][0], abs=1e-6)
        assert rank["results"][0].grad_norm == pytest.approx(expected["norms"][0], rel=1e-6)
        assert [r.grad_norm for r in rank["results"]] == pytest.approx(expected["norms"], rel=1e-5)
        assert not any(r.skipped for r in rank["results"])
        model, n_sequences = expected["model"], spec.train.micro_batch_size * spec.strategy.dp
        batch = rows(global_batch(9), 0, n_sequences)
        with torch.no_grad():
            assert rank["evaluated"] == pytest.approx(
                (loss_sum(model, batch).item(), n_valid(batch)), rel=1e-5
            )
    first = assemble([rank["first"] for rank in ranks])
    names = set(expected["weights"])
    assert {name for name in first if name.startswith("model/")} == {f"model/{name}" for name in names}
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            first[f"model/{name}"], weight, rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
        if spec.optim.kind == "adamw":
            gradient, wanted = first[f"optim/exp_avg/{name}"], expected["gradients"][name]
            assert (gradient - wanted).norm() <= 1e-5 * wanted.norm(), name
    if spec.optim.kind == "adamw":
        assert assemble([rank["last"] for rank in ranks])["optim/step"].tolist() == [len(ranks[0]["results"])]


def zero(stage: int, **layout: Any) -> dict[str, Any]:
    options = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"kind": "deepspeed_zero", "stage": stage, "zero_options": options, **layout}


def run_and_check(tmp_path: Path, specs: list[JobSpec]) -> None:
    """All these specs have one mesh and one model."""
    mesh = specs[0].strategy.mesh
    replicas = kv_replicas(specs[0].model, mesh)
    ranks = run_ranks(train_all, mesh, tmp_path, specs, kv_replicas=replicas)
    for number, spec in enumerate(specs):
        check([rank[number] for rank in ranks], spec, reference(spec, 3))


@pytest.mark.parametrize("dp", [1, 2])
def test_zero_over_tensor_parallel(dp: int, tmp_path: Path) -> None:
    specs = [spec_of(zero(stage, dp=dp, tp=2), accum=3) for stage in range(4)]
    specs += [spec_of(zero(stage, dp=dp, tp=2), optim="sgd") for stage in (0, 1, 2, 3)]
    run_and_check(tmp_path, specs)
