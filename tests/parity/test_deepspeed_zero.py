"""ZeRO 0 to 3 against plain torch loops in one process: the same losses, gradient norms and weights."""

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension

from jobs.comm.groups import Groups
from jobs.engines.deepspeed_start import deepspeed
from jobs.engines.deepspeed_state import MOMENTS
from jobs.engines.deepspeed_zero import DeepspeedZeroEngine
from jobs.engines.native import NativeEngine
from jobs.engines.preload import preload_modules
from jobs.models.llama import Llama
from jobs.spec.job import JobSpec
from tests.support.deepspeed_runs import (
    CLIP,
    CPU,
    assemble,
    global_batch,
    make_spec,
    reference_loop,
    reference_loss,
    rows,
    same,
    save,
    train_one,
    zero_spec,
)
from tests.support.ranks import run_ranks

RANKS_PRELOAD = preload_modules("deepspeed_zero")
pytestmark = pytest.mark.parity

N_STEPS = 20
TOLERANCE = 1e-5

# One fp32 rounding of a weight near 1 is 6e-8; 20 steps at lr 1e-2 with Adam's division by small moments.
WEIGHT_TOLERANCE = 2e-5


def _train(spec: JobSpec, groups: Groups, n_steps: int) -> dict[str, Any]:
    engine = DeepspeedZeroEngine(spec, groups, CPU)
    steps = [train_one(engine, step, groups) for step in range(n_steps)]
    assert not any(step.skipped for step in steps)
    evaluated = engine.evaluate(rows(global_batch(99), groups.dp.rank, groups.dp.rank + 1))
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "state": save(engine),
        "evaluated": evaluated,
        "optimizer": spec.optim.kind,
    }


def _run_fp32(groups: Groups) -> dict[str, dict[str, Any]]:
    dp = groups.dp.size
    cases: dict[str, dict[str, Any]] = {}
    for stage in range(4):
        cases[f"adamw {stage}"] = _train(zero_spec(dp, stage), groups, N_STEPS)
        cases[f"sgd {stage}"] = _train(zero_spec(dp, stage, optimizer="sgd"), groups, 1)
    return cases


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_fp32_equals_one_process(dp: int, tmp_path: Path) -> None:
    ranks = run_ranks(_run_fp32, dp, tmp_path)
    for optimizer, n_steps in (("adamw", N_STEPS), ("sgd", 1)):
        reference = reference_loop(zero_spec(dp, 1, optimizer=optimizer), n_steps)
        for stage in range(4):
            _assert_equal([rank[f"{optimizer} {stage}"] for rank in ranks], reference, n_steps)


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0 tied": (0, {"tied": True}),
    "stage 1 tied": (1, {"tied": True}),
    "stage 2 tied": (2, {"tied": True}),
    "stage 3 tied": (3, {"tied": True}),
    "stage 3 all parameters stay gathered": (3, {"options": {"stage3_param_persistence_threshold": 10**6}}),
    "stage 3 small sub-groups": (3, {"options": {"sub_group_size": 500}}),
    "stage 2 small buckets": (2, {"options": {"reduce_bucket_size": 700, "round_robin_gradients": True}}),
    "stage 1 aligned, overlapped": (1, {"options": {"parameter_alignment": True, "overlap_comm": True}}),
}
N_VARIANT_STEPS = 6


def _run_variants(groups: Groups) -> dict[str, dict[str, Any]]:
    return {
        name: _train(zero_spec(groups.dp.size, stage, **changes), groups, N_VARIANT_STEPS)
        for name, (stage, changes) in VARIANTS.items()
    }


def test_tied_embeddings_and_zero_options(tmp_path: Path) -> None:
    ranks = run_ranks(_run_variants, 2, tmp_path)
    references = {tied: reference_loop(zero_spec(2, 1, tied=tied), N_VARIANT_STEPS) for tied in (False, True)}
    for name, (_, changes) in VARIANTS.items():
        _assert_equal([rank[name] for rank in ranks], references[changes.get("tied", False)], N_VARIANT_STEPS)


def _assert_equal(
    ranks: list[dict[str, Any]], reference: tuple[list[float], list[float], Llama], n_steps: int
) -> None:
    """Losses, norms and evaluation on every rank, and the state that all ranks together write."""
    losses, norms, model = reference
    assert max(norms) > CLIP, "the test wants clipping to be active"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=TOLERANCE)
        assert rank["norms"] == pytest.approx(norms, abs=TOLERANCE)
        assert rank["evaluated"] == pytest.approx(
            reference_loss(model, rows(global_batch(99), 0, len(ranks))), rel=TOLERANCE
        )
    whole = assemble([rank["state"] for rank in ranks])
    weights = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    names = set(weights)
    if ranks[0]["optimizer"] == "adamw":
        names |= {name.replace("model/", f"optim/{moment}/") for moment in MOMENTS for name in weights}
        names.add("optim/step")
        assert whole["optim/step"].tolist() == [n_steps]
    assert set(whole) == names
    for name, weight in weights.items():
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=WEIGHT_TOLERANCE)


def _run_bf16(groups: Groups) -> dict[Any, dict[str, Any]]:
    results: dict[Any, dict[str, Any]] = {}
    for stage in (1, 2, 3):
        results[stage] = _train(zero_spec(groups.dp.size, stage, precision="bf16"), groups, N_STEPS)
    results["again"] = _train(zero_spec(groups.dp.size, 1, precision="bf16"), groups, N_STEPS)
    native = NativeEngine(make_spec(groups.dp.size, precision="bf16"), groups, CPU)
    steps = [train_one(native, step, groups) for step in range(N_STEPS)]
    results["native"] = {"losses": [step.loss for step in steps], "norms": [step.grad_norm for step in steps]}
    return results


def test_bf16_follows_native(tmp_path: Path) -> None:
    """fp32 masters and reduction: only roundings of bf16 weights and gradients that fall differently remain.

    Tolerance: a bf16 value is off by up to 2^-9 = 2e-3 of itself. The loss is a mean over some 240 tokens
    with independent errors: 2e-3 / sqrt(240) of a loss of 4 is 5e-4, and twice that is allowed. For the norm,
    which is about 1, the rounding itself is: 2e-3.
    """
    ranks = run_ranks(_run_bf16, 2, tmp_path)
    native = ranks[0]["native"]
    for stage in (1, 2, 3):
        assert ranks[0][stage]["losses"] == pytest.approx(native["losses"], abs=1e-3)
        assert ranks[0][stage]["norms"] == pytest.approx(native["norms"], abs=2e-3)
        assert ranks[0][stage]["losses"] == ranks[1][stage]["losses"]
        whole = assemble([rank[stage]["state"] for rank in ranks])
        assert whole["optim/step"].tolist() == [N_STEPS]
        for name, tensor in whole.items():
            assert name == "optim/step" or not torch.equal(tensor, tensor.bfloat16().float()), (
                f"{name} is rounded"
            )
    for rank in ranks:
        assert rank["again"]["losses"] == rank[1]["losses"]
        assert rank["again"]["norms"] == rank[1]["norms"]
        assert same(rank["again"]["state"], rank[1]["state"])


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("something is compiled, or a compiler is looked for")


def _run_odd(groups: Groups) -> dict[str, Any]:
    """Three ranks (deepspeedai/DeepSpeed#3982), none of which may start a program or build an extension."""
    subprocess.Popen.__init__ = _refuse  # type: ignore[method-assign]
    torch.utils.cpp_extension.load = _refuse
    torch.utils.cpp_extension.load_inline = _refuse
    seen = {}
    for stage, precision in STAGES:
        seen[stage, precision] = _train(zero_spec(groups.dp.size, stage, precision=precision), groups, 2)
    seen["world_size"] = deepspeed.comm.get_world_size()
    return seen


STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]


def test_three_ranks_see_each_other_and_compile_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(_run_odd, 3, tmp_path)
    assert [rank["world_size"] for rank in ranks] == [3, 3, 3]
    for stage, precision in STAGES:
        losses, _, _ = reference_loop(zero_spec(3, 1, precision=precision), 2)
        tolerance = TOLERANCE if precision == "fp32" else 1e-3
        assert ranks[2][stage, precision]["losses"] == pytest.approx(losses, abs=tolerance)
        assemble([rank[stage, precision]["state"] for rank in ranks])


def _run_skip(groups: Groups) -> dict[Any, list[str]]:
    """Train with and without one poisoned step in between; returns what differs."""
    wrong: dict[Any, list[str]] = {}
    for stage, precision in STAGES:
        spec = zero_spec(groups.dp.size, stage, precision=precision)
        clean = DeepspeedZeroEngine(spec, groups, CPU)
        for step in range(4):
            last = train_one(clean, step, groups)
        engine = DeepspeedZeroEngine(spec, groups, CPU)
        for step in range(2):
            train_one(engine, step, groups)
        before = save(engine)
        _, parameter = next(p for p in engine.model.named_parameters() if "k_proj" in p[0])
        poison = torch.inf if stage % 2 else torch.nan
        handle = parameter.register_hook(lambda g, r=groups.rank, p=poison: g * p if r == 1 else g)
        skipped = train_one(engine, 2, groups)
        handle.remove()
        after = save(engine)
        for step in range(2, 4):
            result = train_one(engine, step, groups)
        wrong[stage, precision] = [
            text
            for text, is_wrong in {
                "not skipped": not skipped.skipped,
                "norm is finite": math.isfinite(skipped.grad_norm),
                "loss is not finite": not math.isfinite(skipped.loss),
                "state changed": not same(before, after),
                "later steps differ": result != last or not same(save(clean), save(engine)),
            }.items()
            if is_wrong
        ]
    return wrong


def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    for rank in run_ranks(_run_skip, 2, tmp_path):
        assert rank == {case: [] for case in STAGES}
