"""A layout that is right passes, and every kind of wrong one is told apart by what it gets wrong."""

from dataclasses import replace

import pytest

from jobs.engines.preload import preload_modules
from jobs.parity.compare import compare, compare_layout
from jobs.parity.rank import Piece, RankNumbers
from jobs.parity.reference import reference
from jobs.spec.job import JobSpec
from tests.support.parity_runs import runner

RANKS_PRELOAD = (*preload_modules("deepspeed_zero"), "jobs.parity.rank")


def tiny(strategy=None, **train) -> JobSpec:
    model = {"vocab_size": 37, "n_layers": 2, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    return JobSpec.model_validate(
        {
            "run": {"seed": 3},
            "model": model | {"d_ff": 21, "max_seq_len": 32, "init_std": 0.1},
            "data": {"seq_len": 16},
            "optim": {"lr": 1e-2},
            "train": {"steps": 10, "global_batch_size": 8, "micro_batch_size": 2} | train,
            "strategy": {"kind": "native"} | (strategy or {}),
        }
    )


@pytest.mark.parametrize(
    "strategy",
    [{"dp": 2}, {"dp": 4, "zero_stage": 1}, {"kind": "deepspeed_zero", "stage": 3, "dp": 2}],
    ids=str,
)
def test_layouts_of_data_parallelism_equal_one_process(strategy, tmp_path):
    spec = tiny(strategy)
    report = compare_layout(spec, runner(tmp_path), n_steps=5)
    assert report.problems == ()
    assert report.layout["dp"] == spec.strategy.dp


MOE = {"n_experts": 4, "top_k": 2, "d_ff": 10, "n_shared_experts": 1, "n_dense_layers": 1}
MOE |= {"router": "sigmoid", "bias_update_rate": 0.01, "balance_loss_coef": 0.01, "z_loss_coef": 0.001}


def test_experts_with_router_losses_and_moving_biases_equal_one_process_in_fp64(tmp_path):
    spec = tiny({"dp": 2, "ep": 2}, precision="fp64")
    spec = JobSpec.model_validate(spec.model_dump() | {"model": spec.model.model_dump() | {"moe": MOE}})
    report = compare_layout(spec, runner(tmp_path), n_steps=3)
    assert report.problems == ()
    bias = "layers.1.mlp.gate.e_score_correction_bias"
    assert [difference.rel for difference in report.after_adamw if difference.name == bias] == [0.0]


def as_pieces(whole):
    """What a rank that holds everything would tell, in fp32."""
    return [
        Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.float(), True)
        for name, tensor in whole.items()
    ]


@pytest.fixture(scope="module")
def one():
    return reference(tiny(), 3)


@pytest.fixture
def rank(one):
    return RankNumbers(
        one.loss,
        one.grad_norm,
        as_pieces(one.gradients),
        as_pieces(one.after_adamw),
        as_pieces(one.after_sgd),
        list(one.losses),
    )


def changed(pieces, name, change):
    return [replace(p, tensor=change(p.tensor)) if p.name == name else p for p in pieces]


def test_one_process_equals_itself(one, rank):
    report = compare(tiny(), [rank], one)
    assert report.ok
    assert report.gradients[0].rel < 1e-7
    json = report.to_json()
    assert json["ok"] is True
    assert set(json["worst_grad"]) == {"name", "rel"}
    assert {"loss_abs", "grad_norm_rel", "layout"} <= set(json)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r: {"loss": r.loss + 2e-6}, "loss differs by 2.00e-06, more than 1e-06"),
        (lambda r: {"loss": float("nan")}, "loss differs by nan, more than 1e-06"),
        (
            lambda r: {"grad_norm": r.grad_norm * (1 + 2e-6)},
            "gradient norm differs by 2.00e-06, more than 1e-06",
        ),
        (
            lambda r: {"losses": [*r.losses[:-1], r.losses[-1] - 2e-5]},
            "loss over 3 steps differs by 2.00e-05, more than 1e-05",
        ),
        (
            lambda r: {"gradients": changed(r.gradients, "norm.weight", lambda t: t * (1 + 2e-5))},
            "gradient of norm.weight differs by 2.00e-05, more than 1e-05",
        ),
        (
            lambda r: {"gradients": changed(r.gradients, "layers.1.mlp.up_proj.weight", lambda t: t[1:])},
            "gradient of layers.1.mlp.up_proj.weight differs by nan, more than 1e-05",
        ),
        (
            lambda r: {"after_sgd": changed(r.after_sgd, "lm_head.weight", lambda t: t + 1e-3)},
            "weight after one SGD step of lm_head.weight differs by",
        ),
        (
            lambda r: {"after_adamw": changed(r.after_adamw, "lm_head.weight", lambda t: t + 1e-3)},
            "weight after one AdamW step of lm_head.weight differs by",
        ),
    ],
)
def test_each_kind_of_difference_is_told_on_any_rank(one, rank, wrong, message):
    other = replace(rank, **wrong(rank))
    silent = replace(
        other,
        **{
            field: [replace(p, is_writer=False) for p in getattr(other, field)]
            for field in ("gradients", "after_adamw", "after_sgd")
        },
    )
    report = compare(tiny(), [rank, silent], one)
    # A piece that a rank lacks is held by the other one, so it is told where it is the only one.
    if "differs by nan" in message and "gradient of" in message:
        report = compare(tiny(), [other], one)
    assert [problem for problem in report.problems if problem.startswith(message)] == list(report.problems)
    assert len(report.problems) == 1


def test_pieces_written_twice_or_never_are_told(one, rank):
    twice = compare(tiny(), [rank, rank], one)
    assert "norm.weight: its elements are written by 2 to 2 ranks, not by one each" in twice.problems
    never = replace(rank, after_adamw=[replace(p, is_writer=False) for p in rank.after_adamw])
    assert "norm.weight: its elements are written by 0 to 0 ranks, not by one each" in (
        compare(tiny(), [never], one).problems
    )


def test_fp64_is_held_to_tolerances_four_orders_tighter(one, rank):
    spec = tiny()
    double = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": "fp64"})})
    report = compare(double, [rank], one)
    assert any(problem.startswith("gradient of") for problem in report.problems)  # the pieces are fp32
    assert report.tolerances.loss_abs == pytest.approx(1e-10)
