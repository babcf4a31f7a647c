"""Each rule refuses what it must, with both numbers, and the layout it proposes is legal."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.mesh import Mesh
from jobs.parallel.placement import place_parameters
from jobs.planner.legality import nearest_layout, refusal_text, refusals, with_layout
from jobs.planner.stages import plan_stages
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec
from jobs.spec.model import parameter_shapes

MOE = {"n_experts": 6, "top_k": 2, "d_ff": 16}


def spec(strategy, model=None, resources=None, seq_len=32, **train) -> JobSpec:
    shape = {"vocab_size": 512, "n_layers": 8, "d_model": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8}
    return JobSpec.model_validate(
        {
            "model": shape | {"d_ff": 48, "max_seq_len": 64} | (model or {}),
            "data": {"seq_len": seq_len},
            "optim": {"lr": 1e-3},
            "train": {"steps": 5, "global_batch_size": 16, "micro_batch_size": 1} | train,
            "strategy": {"kind": "native"} | strategy,
            "resources": resources or {},
        }
    )


LEGAL = {
    "one rank": spec({}),
    "everything": spec({"dp": 2, "pp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2}, {"moe": MOE}),
    "kv heads shared by tp ranks": spec({"tp": 4}, {"n_kv_heads": 2}),
    "zero without copies": spec({"zero_stage": 1}),
    "vocabulary that tp does not divide": spec({"tp": 2}, {"vocab_size": 511}),
    "d_ff that tp does not divide": spec({"tp": 4}, {"d_ff": 50}),
    "layers that pp does not divide": spec({"pp": 4}, {"n_layers": 10}),
    "a listed split": spec({"pp": 4, "pipeline": {"split": (3, 3, 1, 1)}}),
    "ulysses with fewer kv heads": spec({"cp": 4, "context_method": "ulysses"}, {"n_kv_heads": 2}),
    "sequence whole over tp": spec({"tp": 8, "sequence_parallel": False}, seq_len=30),
    "recompute a stage": spec({"pp": 2, "recompute": ("none", "full")}),
    "fp8 on GPUs": spec({}, resources={"gpus_per_worker": 1}, precision="fp8"),
    "experts of etp": spec({"tp": 4, "etp": 4}, {"moe": MOE}),
}

# What is refused, the key blamed, the reason, the nearest.
REFUSED = {
    "heads": (
        spec({"tp": 4}, {"n_heads": 14, "n_kv_heads": 2}),
        "strategy.tp",
        "14 attention heads do not divide over tp=4 ranks, which compute whole heads",
        "strategy.dp=2 strategy.tp=2",
    ),
    "heads of a 7B": (
        spec({"tp": 8}, {"n_heads": 28, "n_kv_heads": 4}),
        "strategy.tp",
        "28 attention heads do not divide over tp=8 ranks, which compute whole heads",
        "strategy.dp=2 strategy.tp=4",
    ),
    "kv heads": (
        spec({"tp": 4}, {"n_heads": 12, "n_kv_heads": 6}),
        "strategy.tp",
        "6 kv heads do not divide over tp=4 ranks, nor the ranks over the heads (with fewer heads than "
        "ranks, equally many ranks hold each)",
        "strategy.dp=2 strategy.tp=2",
    ),
    "rows of d_ff": (
        spec({"tp": 4}, {"d_ff": 6}),
        "strategy.tp",
        "d_ff=6 in pieces of 2 fills 3 of tp=4 ranks",
        "strategy.dp=2 strategy.tp=2",
    ),
    "rows of an expert": (
        spec({"tp": 4, "etp": 4}, {"moe": MOE | {"d_ff": 6}}),
        "strategy.etp",
        "moe.d_ff=6 in pieces of 2 fills 3 of etp=4 ranks",
        "strategy.etp=2",
    ),
    "rows of shared experts": (
        spec({"tp": 4}, {"moe": MOE | {"d_ff": 3, "n_shared_experts": 2}}),
        "strategy.tp",
        "moe.n_shared_experts x d_ff=6 in pieces of 2 fills 3 of tp=4 ranks",
        "strategy.dp=2 strategy.tp=2",
    ),
    "layers": (
        spec({"pp": 4}, {"n_layers": 3}),
        "strategy.pp",
        "3 layers do not fill pp=4 x stages_per_rank=1 = 4 pipeline stages",
        "strategy.dp=2 strategy.pp=2",
    ),
    "split that does not add up": (
        spec({"pp": 4, "pipeline": {"split": (2, 2, 2, 1)}}),
        "strategy.pipeline.split",
        "split=[2, 2, 2, 1] has 4 stages and 7 layers; there are 4 stages (pp=4 x stages_per_rank=1) and 8 "
        "layers",
        "strategy.pipeline.split=[2, 2, 2, 2]",
    ),
    "zig-zag": (
        spec({"cp": 4}, seq_len=30),
        "strategy.cp",
        "data.seq_len=30 does not divide into 2 x cp=4 = 8 parts (zig-zag of context parallelism)",
        "strategy.dp=4 strategy.cp=1; or data.seq_len=32",
    ),
    "sequence parallel": (
        spec({"tp": 4}, seq_len=30),
        "strategy.tp",
        "data.seq_len=30 does not divide into tp=4 = 4 parts (sequence parallelism)",
        "strategy.dp=2 strategy.tp=2; or data.seq_len=32",
    ),
    "both": (
        spec({"cp": 2, "tp": 2}, seq_len=60),
        "strategy.cp",
        "data.seq_len=60 does not divide into 2 x cp=2 x tp=2 = 8 parts (zig-zag of context parallelism and "
        "sequence parallelism)",
        "strategy.dp=2 strategy.tp=1; or data.seq_len=64",
    ),
    "ulysses": (
        spec({"cp": 4, "tp": 4, "context_method": "ulysses"}),
        "strategy.cp",
        "the 2 heads of a tp rank (n_heads=8 / tp=4) do not divide over cp=4 ranks, as ulysses shares them",
        "strategy.dp=2 strategy.tp=2; or strategy.context_method=ring",
    ),
    "experts": (
        spec({"dp": 4, "ep": 4}, {"moe": MOE}),
        "strategy.ep",
        "6 experts cannot be split over ep=4",
        "strategy.ep=2",
    ),
    "expert ranks": (
        spec({"dp": 2, "ep": 3}, {"moe": MOE}),
        "strategy.ep",
        "ep=3 x etp=1 = 3 does not divide the 2 ranks of a pipeline stage (dp=2 x cp=1 x tp=1), which the "
        "experts are spread over",
        "strategy.ep=2",
    ),
    "experts of a dense model": (
        spec({"dp": 2, "ep": 2}),
        "strategy.ep",
        "ep=2 spreads experts, and the model has none (no model.moe)",
        "strategy.ep=1",
    ),
    "experts without sequence parallelism": (
        spec({"tp": 2, "sequence_parallel": False}, {"moe": MOE}),
        "strategy.sequence_parallel",
        "experts with tp=2 and sequence_parallel=false: each tp rank would send the same tokens",
        "strategy.sequence_parallel=true",
    ),
    "micro-batches": (
        spec({"pp": 4}, global_batch_size=2),
        "strategy.pipeline.schedule",
        "pipeline.schedule=1f1b over pp=4 needs 4 micro-batches a step or more; there are 2: raise "
        "train.global_batch_size, lower train.micro_batch_size, or take gpipe",
        "strategy.pipeline.schedule=gpipe",
    ),
    "larger micro-batches than needed": (
        spec({"pp": 4}, micro_batch_size=8),
        "strategy.pipeline.schedule",
        "pipeline.schedule=1f1b over pp=4 needs 4 micro-batches a step or more; there are 2: raise "
        "train.global_batch_size, lower train.micro_batch_size, or take gpipe",
        "train.micro_batch_size=4 (then there are 4 micro-batches)",
    ),
    "stages of a schedule": (
        spec({"pp": 2, "pipeline": {"schedule": "zbv_zero_bubble"}}),
        "strategy.pipeline.schedule",
        "pipeline.schedule=zbv_zero_bubble folds the pipeline once, so each rank has two stages; "
        "stages_per_rank=1: set it to 2",
        "strategy.pipeline.stages_per_rank=2",
    ),
    "stages without a pipeline": (
        spec({"pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}}),
        "strategy.pipeline.stages_per_rank",
        "stages_per_rank=2 with pp=1: one rank has nobody to send to",
        "strategy.pipeline.stages_per_rank=1",
    ),
    "precision of DeepSpeed": (
        spec({"kind": "deepspeed_zero", "stage": 1}, precision="bf16_kahan"),
        "train.precision",
        "precision=bf16_kahan is the native engine's; kind=deepspeed_zero trains in fp32 or bf16",
        "train.precision=bf16",
    ),
    "fp8 on CPUs": (
        spec({}, precision="fp8"),
        "train.precision",
        "precision=fp8 wants GPUs with fp8 products, and resources.gpus_per_worker=0",
        "train.precision=bf16",
    ),
    "recompute under a backward pass taken apart": (
        spec({"pp": 2, "recompute": "full", "pipeline": {"schedule": "interleaved_zero_bubble"}}),
        "strategy.recompute",
        "recompute=full does not go with pipeline.schedule=interleaved_zero_bubble, which takes the backward "
        "pass apart: use recompute=attention or none, or the schedule 1f1b or interleaved_1f1b",
        "strategy.recompute=attention",
    ),
    "recompute": (
        spec({"pp": 2, "recompute": ("full",)}),
        "strategy.recompute",
        "recompute has 1 entries for 2 pipeline stages (pp=2 x stages_per_rank=1)",
        "strategy.recompute=[full, none]",
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_passes(name):
    assert refusals(LEGAL[name]) == []
    assert refusal_text(LEGAL[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_each_rule_refuses_with_numbers_and_a_way_out(name):
    refused, key, reason, nearest = REFUSED[name]
    found = refusals(refused)
    assert [(r.key, r.reason, r.nearest) for r in found] == [(key, reason, nearest)]
    if found[0].layout is not None:
        assert refusals(with_layout(refused, found[0].layout)) == []
        assert found[0].layout.world_size == refused.world_size
    assert refusal_text(refused) == f"{key}: {reason}; nearest: {nearest}"


def test_a_batch_that_dp_does_not_divide_is_refused_in_specs_changed_in_code():
    changed = with_layout(spec({"dp": 2}), Mesh(dp=3))
    assert [(r.key, r.reason, r.nearest) for r in refusals(changed)] == [
        (
            "train.global_batch_size",
            "global_batch_size=16 is not micro_batch_size=1 x dp=3 x a whole number",
            "strategy.dp=1 strategy.pp=3; or train.global_batch_size=18",
        )
    ]


def test_all_broken_rules_are_told_together():
    found = refusals(spec({"tp": 3, "cp": 4, "ep": 4}, {"moe": MOE}, seq_len=30))
    assert [r.key for r in found] == ["strategy.tp", "strategy.cp", "strategy.ep"]
    assert {r.layout for r in found} == {found[0].layout}
    assert found[0].layout is not None
    assert refusals(with_layout(spec({}, {"moe": MOE}, seq_len=30), found[0].layout)) == []


def test_a_layout_of_fewer_ranks_is_proposed_where_none_of_as_many_is_legal():
    prime = spec({"tp": 7}, {"n_layers": 4}, seq_len=31)
    assert nearest_layout(prime) == Mesh()
    assert "nearest: strategy.tp=1" in str(refusals(prime)[0])


def test_the_loader_refuses_at_the_line_of_the_blamed_key(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(
        "model: {preset: tiny}\ndata: {seq_len: 64}\noptim: {lr: 1e-3}\n"
        "train: {steps: 2, global_batch_size: 8, micro_batch_size: 2}\n"
        "strategy:\n  kind: native\n  tp: 3\n"
    )
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{file}:7: strategy.tp: ")
    assert "tp=3 ranks" in first
    assert "nearest: strategy." in first


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        (
            "kind: deepspeed_zero, stage: 3, pp: 2",
            "strategy.pp",
            "use kind=deepspeed_pipeline with stage 0 or 1",
        ),
        ("kind: deepspeed_pipeline, stage: 2, pp: 2", "strategy.stage", "use stage 0 or 1"),
    ],
)
def test_a_pipeline_with_zero_2_or_3_is_refused_with_what_to_use(tmp_path, section, key, said):
    file = tmp_path / "spec.yaml"
    file.write_text(
        "model: {preset: tiny}\ndata: {seq_len: 64}\noptim: {lr: 1e-3}\n"
        "train: {steps: 2, global_batch_size: 8, micro_batch_size: 2}\n"
        f"strategy: {{{section}}}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    lines = [line for line in str(caught.value).splitlines() if f": {key}: " in line]
    assert len(lines) == 1
    assert "over all micro-batches" in lines[0]
    assert said in lines[0]


sizes = st.integers(1, 4)


@settings(max_examples=150)
@given(
    dp=sizes,
    pp=sizes,
    cp=sizes,
    tp=sizes,
    ep=sizes,
    etp=sizes,
    n_layers=st.integers(1, 6),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 3), (4, 1), (8, 2)]),
    d_ff=st.integers(2, 12),
    vocab=st.integers(5, 20),
    has_experts=st.booleans(),
)
def test_what_is_legal_can_be_placed_whole(
    dp, pp, cp, tp, ep, etp, n_layers, heads, d_ff, vocab, has_experts
):
    model = {
        "n_layers": n_layers,
        "n_heads": heads[0],
        "n_kv_heads": heads[1],
        "d_ff": d_ff,
        "vocab_size": vocab,
    }
    if has_experts:
        model["moe"] = MOE | {"d_ff": d_ff}
    mesh = Mesh(dp, pp, cp, tp, ep, etp)
    strategy = {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
    run = spec(strategy, model, seq_len=48, global_batch_size=48, micro_batch_size=1)
    found = refusals(run)
    if found:
        assert all(r.nearest and any(ch.isdigit() for ch in r.reason) for r in found)
        proposed = found[0].layout
        if proposed is not None and all(r.layout is not None for r in found):
            assert refusals(with_layout(run, proposed)) == []
        return
    stages = plan_stages(run.model, pp)
    held = dict.fromkeys(parameter_shapes(run.model), 0.0)
    for rank in range(mesh.world_size):
        for at in place_parameters(run.model, mesh, rank, stages, sequence_parallel=True).values():
            assert all(size > 0 for size in at.shape), at
            held[at.name] += prod(at.shape) / at.n_replicas
    expected = {name: float(prod(shape)) for name, shape in parameter_shapes(run.model).items()}
    assert held == pytest.approx(expected)
