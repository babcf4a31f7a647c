"""A tiny run keeps the layout and the way in which it cuts the model."""

import pytest

from jobs.errors import SpecError
from jobs.parity.shrink import shrink
from jobs.planner.legality import refusals
from jobs.spec.job import JobSpec
from jobs.spec.presets import PRESETS


def large(strategy, model=None, seq_len=4096, **train) -> JobSpec:
    shape = {"vocab_size": 128256, "n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8}
    shape |= {"head_dim": 128, "d_ff": 14336, "max_seq_len": 8192}
    return JobSpec.model_validate(
        {
            "model": shape | (model or {}),
            "data": {"seq_len": seq_len},
            "optim": {"lr": 1e-3},
            "train": {"steps": 5, "global_batch_size": 512, "micro_batch_size": 1} | train,
            "strategy": {"kind": "native"} | strategy,
        }
    )


def tiny(*args, max_ranks=32, **kwargs) -> JobSpec:
    small = shrink(large(*args, **kwargs), max_ranks).spec
    assert refusals(small) == []
    assert JobSpec.model_validate(small.model_dump()) == small
    assert small.model.n_params < 200_000
    return small


MOE = {"n_experts": 64, "top_k": 8, "d_ff": 1408, "n_shared_experts": 2, "n_dense_layers": 3}


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ({"dp": 2}, {}),
        ({"tp": 8, "dp": 2}, {}),
        ({"tp": 16}, {}),
        ({"pp": 4, "cp": 2, "tp": 4}, {}),
        ({"cp": 4, "tp": 2, "context_method": "ulysses"}, {}),
        ({"pp": 2, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 4}}, {}),
        ({"pp": 4, "pipeline": {"schedule": "dualpipev", "stages_per_rank": 2}}, {}),
        ({"dp": 4, "tp": 2, "ep": 4, "etp": 2}, {"moe": MOE | {"n_shared_experts": 1}}),
        ({"dp": 2, "tp": 4, "ep": 8}, {"moe": MOE}),
        ({"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1, "recompute": ("none", "full")}, {"moe": MOE}),
        ({"kind": "deepspeed_zero", "stage": 3, "dp": 4}, {}),
        ({"kind": "deepspeed_zero", "stage": 1, "dp": 2, "tp": 2, "cp": 2}, {}),
        ({"kind": "deepspeed_pipeline", "stage": 1, "dp": 2, "pp": 4}, {"n_layers": 30}),
    ],
    ids=str,
)
def test_the_layout_is_kept_exactly(strategy, model):
    before, after = large(strategy, model), tiny(strategy, model)
    assert after.strategy == before.strategy
    assert after.grad_accum_steps >= min(4, before.grad_accum_steps)


def test_what_the_layout_does_to_the_model_is_kept():
    few_kv = tiny({"tp": 8}, {"n_kv_heads": 2}).model
    assert few_kv.n_kv_heads == 2
    assert few_kv.n_heads == 8
    assert tiny({"tp": 4}).model.vocab_size % 4 == 0
    odd = tiny({"tp": 2}, {"vocab_size": 50257, "d_ff": 101, "tie_embeddings": True}).model
    assert odd.vocab_size % 2 == 1
    assert odd.d_ff % 2 == 1
    assert odd.tie_embeddings
    assert tiny({"pp": 4}, {"n_layers": 30}).model.n_layers == 6
    assert tiny({"pp": 4}).model.n_layers == 4
    split = tiny({"pp": 4, "pipeline": {"split": (7, 8, 9, 8)}})
    assert split.strategy.pipeline.split == (1, 2, 3, 2)
    assert split.model.n_layers == 8
    deepspeed = tiny({"kind": "deepspeed_pipeline", "pp": 4, "split": (7, 8, 9, 8)})
    assert deepspeed.strategy.split == (1, 2, 3, 2)
    experts = tiny({"dp": 8, "ep": 8}, {"moe": MOE}).model
    assert experts.moe is not None
    assert (experts.moe.n_experts, experts.moe.top_k, experts.moe.n_shared_experts) == (8, 2, 1)
    assert experts.moe.n_dense_layers == 1
    assert experts.n_layers == 2


def test_dp_is_lowered_first_and_said():
    small = shrink(large({"dp": 16, "tp": 4, "ep": 8}, {"moe": MOE}), max_ranks=32)
    assert small.spec.strategy.mesh.world_size == 32
    assert small.notes == ("dp=16 is lowered to 8: 64 ranks are more than 32",)
    odd = shrink(large({"dp": 8, "ep": 8}, {"moe": MOE}), max_ranks=10)
    assert odd.notes == ()


def test_too_many_ranks_are_refused_with_the_fewest():
    with pytest.raises(SpecError, match=r"64 ranks are too many for this machine \(at most 32.*still 64"):
        shrink(large({"pp": 8, "tp": 8}), max_ranks=32)
    with pytest.raises(SpecError, match="with the smallest dp there are still 8"):
        shrink(large({"dp": 16, "ep": 8}, {"moe": MOE}), max_ranks=4)


def test_low_precision_is_compared_in_fp32_and_said():
    small = shrink(large({"dp": 2}, precision="bf16"), max_ranks=32)
    assert small.spec.train.precision == "fp32"
    assert small.notes == ("precision bf16 is compared in fp32: what differs is then the layout's doing",)
    assert shrink(large({"dp": 2}, precision="fp64"), max_ranks=32).spec.train.precision == "fp64"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_shrunk(name):
    defaults = PRESETS[name].defaults()
    defaults.setdefault("head_dim", defaults["d_model"] // defaults["n_heads"])
    before = large({"dp": 2, "pp": 2}, defaults, seq_len=64)
    after = shrink(before, max_ranks=32).spec
    assert after.model.n_params < 100_000
    assert (after.model.moe is None) == (before.model.moe is None)
    assert after.model.rope_theta == before.model.rope_theta
