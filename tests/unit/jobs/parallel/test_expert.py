"""Experts spread over ranks, in fp64 to 1e-12 against one process: loss, loads, every gathered gradient."""

from dataclasses import replace

import pytest
import torch

import jobs.parallel.expert
from jobs.comm.collectives import sum_in_place
from jobs.engines.base import MicroBatch
from jobs.mesh import Mesh
from jobs.models.init import build_llama
from jobs.models.losses import cross_entropy_sum
from jobs.models.moe import Router
from jobs.models.operations import Operations
from jobs.models.router_losses import RouterLossScale
from jobs.parallel.context import context_operations, split_batch
from jobs.parallel.expert import expert_operations, sequences_over, update_router_biases
from jobs.parallel.tensor import tensor_operations
from jobs.spec.data import DataSpec
from jobs.spec.job import JobSpec, RunSection, TrainSection
from jobs.spec.model import ModelSpec, MoeSpec
from jobs.spec.optim import OptimSpec
from jobs.spec.strategy import NativeStrategy
from tests.support.layouts import (
    SEED,
    gathered,
    gradients,
    local_model,
    sum_gradients,
)
from tests.support.ranks import run_ranks

GLOBAL_BATCH, SEQ_LEN, VOCAB = 4, 16, 64
CPU = torch.device("cpu")
SOFTMAX = {"balance_loss_coef": 0.3, "z_loss_coef": 0.2}
SIGMOID = SOFTMAX | {
    "router": "sigmoid",
    "bias_update_rate": 0.01,
    "n_shared_experts": 2,
    "routed_scale": 2.5,
    "n_dense_layers": 1,
}
SPREAD_OUT = (0.3, -0.2, 0.1, 0.0, -0.1, 0.2)
"""Selection biases that change choices and leave every expert some tokens."""
TO_ONE_RANK = (9.0, 9.0, 0.0, 0.0, 0.0, 0.0)
"""All tokens go to experts 0 and 1, which one ep rank holds."""
TO_LAST = (0.0, 0.0, 0.0, 0.0, 0.0, 9.0)


def job(mesh, n_experts=6, **moe):
    section = MoeSpec(**({"n_experts": n_experts, "top_k": 2, "d_ff": 12} | moe))
    return JobSpec(
        run=RunSection(seed=SEED),
        model=ModelSpec(
            vocab_size=VOCAB,
            n_layers=2,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            d_ff=24,
            max_seq_len=64,
            init_std=0.2,
            moe=section,
        ),
        data=DataSpec(seq_len=SEQ_LEN),
        optim=OptimSpec(lr=0.1),
        train=TrainSection(steps=1, global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // mesh.dp),
        strategy=NativeStrategy(
            dp=mesh.dp, cp=mesh.cp, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, context_method="all_gather"
        ),
    )


def whole_batch():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    positions = torch.arange(SEQ_LEN).expand(GLOBAL_BATCH, SEQ_LEN)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], positions, None)


def set_biases(model, biases):
    for module in model.modules():
        if isinstance(module, Router) and module.has_bias:
            module.e_score_correction_bias.copy_(torch.tensor(biases[: len(module.load)]))


def loads_of(models):
    return [
        m.load.clone() for model in models for m in model.modules() if isinstance(m, Router) and m.has_bias
    ]


def one_process(spec, biases):
    scale = RouterLossScale(GLOBAL_BATCH, SEQ_LEN)
    model = build_llama(spec.model, SEED, CPU, torch.float64, Operations(router_losses=scale))
    set_biases(model, biases)
    batch = whole_batch()
    loss = cross_entropy_sum(model(batch.tokens, batch.positions, None), batch.labels)
    loss.backward()
    return model, loss.item(), gradients(model)


def build_on_rank(groups, spec, biases):
    operations = Operations()
    if groups.tp.size > 1:
        operations = tensor_operations(operations, groups.tp, True)
    operations = context_operations(operations, "all_gather", groups.cp, SEQ_LEN)
    operations = expert_operations(operations, spec, groups)
    model, placements = local_model(spec.model, groups.mesh, groups, operations)
    set_biases(model, biases)
    batch = whole_batch()
    share = GLOBAL_BATCH // groups.dp.size
    rows = slice(groups.dp.rank * share, (groups.dp.rank + 1) * share)
    own = MicroBatch(batch.tokens[rows], batch.labels[rows], batch.positions[rows], None)
    return operations, model, placements, split_batch(own, groups.cp)


def on_ranks(groups, spec, biases, mutation=None):
    if mutation == "frequencies of a part":
        whole = sequences_over(groups.cp, groups.tp)
        jobs.parallel.expert.sequences_over = lambda cp, tp: replace(whole, total=lambda counts: counts)
    if mutation == "parts in the wrong order":
        jobs.parallel.expert.in_true_order = torch.cat
    operations, model, placements, batch = build_on_rank(groups, spec, biases)
    loss = operations.loss(model(batch.tokens, batch.positions, None), batch.labels)
    loss.backward()
    line = {"no expert gradient sum": "pp", "experts summed like the rest": "data"}.get(mutation, "edp")
    for name, placement in placements.items():
        if placement.sum_over == "edp" and line != "pp":
            placements[name] = replace(placement, sum_over=line)
    summed = {n: p for n, p in placements.items() if (p.sum_over, line) != ("edp", "pp")}
    sum_gradients(model, summed, groups)
    grads = gradients(model)
    squares = sum(float(g.square().sum()) / placements[n].n_replicas for n, g in grads.items())
    figures = torch.tensor([squares, loss.item() / groups.tp.size], dtype=torch.float64)
    sum_in_place(figures, groups.world)
    return gathered(grads, placements, groups), figures.tolist(), loads_of([model])


CAPACITY = {"capacity_factor": 0.7}
LAYOUTS = {
    "ep2": (Mesh(dp=2, ep=2), SOFTMAX | CAPACITY, SPREAD_OUT),
    "ep2 of 5 experts": (Mesh(dp=2, ep=2), SIGMOID | {"n_experts": 5}, SPREAD_OUT),
    "ep4: 2 2 2 0 experts": (Mesh(dp=4, ep=4), SIGMOID, SPREAD_OUT),
    "ep2 edp2": (Mesh(dp=4, ep=2), SIGMOID, SPREAD_OUT),
    "ep2 etp2": (Mesh(dp=4, ep=2, etp=2), SIGMOID, SPREAD_OUT),
    "ep2 tp2": (Mesh(tp=2, ep=2), SIGMOID | CAPACITY, SPREAD_OUT),
    "ep2 cp2": (Mesh(cp=2, ep=2), SIGMOID | CAPACITY, SPREAD_OUT),
    "ep2 etp2 cp2 tp2": (Mesh(cp=2, tp=2, ep=2, etp=2), SIGMOID | CAPACITY, SPREAD_OUT),
    "ep2, all tokens to one rank": (Mesh(dp=2, ep=2), SIGMOID, TO_ONE_RANK),
    "ep2 etp2, all tokens to one rank": (Mesh(dp=2, tp=2, ep=2, etp=2), SIGMOID, TO_ONE_RANK),
    "ep4, all tokens to one expert": (Mesh(dp=4, ep=4), SIGMOID | {"top_k": 1}, TO_LAST),
}


def check(mesh, moe, biases, tmp_path, mutation=None):
    spec = job(mesh, **moe)
    reference, loss, expected = one_process(spec, biases)
    results = run_ranks(on_ranks, mesh, tmp_path, spec, biases, mutation)
    found, (squares, summed_loss), _ = results[0]
    assert summed_loss == pytest.approx(loss, rel=1e-12)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert squares == pytest.approx(sum(float(g.square().sum()) for g in expected.values()), rel=1e-12)
    loads = [torch.stack(of_layers) for of_layers in zip(*(r[2] for r in results), strict=True)]
    assert [load.sum(0).tolist() for load in loads] == [load.tolist() for load in loads_of([reference])]


@pytest.mark.parametrize(("mesh", "moe", "biases"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_layout_of_experts_equals_one_process(mesh, moe, biases, tmp_path):
    check(mesh, moe, biases, tmp_path)


@pytest.mark.parametrize(
    ("mutation", "layout", "words"),
    [
        ("no expert gradient sum", "ep2 edp2", r"mlp\.experts\.0\.gate_proj"),
        ("experts summed like the rest", "ep2", r"mlp\.experts\.0\.gate_proj"),
        ("frequencies of a part", "ep2 cp2", "embed_tokens"),
        ("parts in the wrong order", "ep2 cp2", "Obtained"),
    ],
)
def test_the_comparison_notices(mutation, layout, words, tmp_path):
    """pytorch#160285: expert gradients doubled; Megatron-LM#5916: counted over the wrong group."""
    with pytest.raises(AssertionError, match=words):
        check(*LAYOUTS[layout], tmp_path, mutation)


def biases_after(groups, spec, biases, is_skipped):
    operations, model, _, batch = build_on_rank(groups, spec, biases)
    for row in range(len(batch.tokens)):  # as micro-batches
        loss = operations.loss(
            model(batch.tokens[row, None], batch.positions[row, None], None), batch.labels[row, None]
        )
        loss.backward()
    update_router_biases([model], groups, 0.25, is_skipped=is_skipped)
    routers = [m for m in model.modules() if isinstance(m, Router) and m.has_bias]
    assert not any(router.load.any() for router in routers)
    return [router.e_score_correction_bias.tolist() for router in routers]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_biases_move_against_the_load_of_the_global_batch(is_skipped, tmp_path):
    mesh = Mesh(dp=2, tp=2, ep=2)
    spec = job(mesh, **SIGMOID | {"n_dense_layers": 0})
    reference, *_ = one_process(spec, SPREAD_OUT)
    expected = []
    for load in loads_of([reference]):
        assert load.sum() == GLOBAL_BATCH * SEQ_LEN * 2
        mean = load.double().mean()
        step = 0.0 if is_skipped else 0.25
        moved = [b + step * float(torch.sign(mean - n)) for b, n in zip(SPREAD_OUT, load, strict=True)]
        expected.append(pytest.approx(moved, abs=1e-6))
    for found in run_ranks(biases_after, mesh, tmp_path, spec, SPREAD_OUT, is_skipped):
        assert found == expected
