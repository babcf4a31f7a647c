"""The native engine on 1, 2 and 4 ranks against a plain loop in one process, on the same global batches."""

import pytest
import torch

from jobs.engines.build import build_engine
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import STEPS, engine_step, plain_loop, share, tiny_model, tiny_spec, whole_batch

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5
CPU = torch.device("cpu")


def _train(groups, spec, n_steps):
    """Results of each step, and the final weights."""
    engine = build_engine(spec, groups, CPU)
    results = [engine_step(engine, spec, groups.dp.rank, step) for step in range(n_steps)]
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return [(r.loss, r.grad_norm, r.skipped) for r in results], weights


def _worst_difference(model, weights):
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    return max(((found[name] - weights[name]).abs().max().item(), name) for name in found)


def _check(tmp_path, spec, n_steps=STEPS):
    losses, norms, model = plain_loop(spec, n_steps)
    for results, weights in run_ranks(_train, spec.strategy.dp, tmp_path, spec, n_steps):
        assert not any(skipped for _, _, skipped in results)
        assert [loss for loss, _, _ in results] == pytest.approx(losses, abs=TOLERANCE, rel=0)
        assert [norm for _, norm, _ in results] == pytest.approx(norms, rel=TOLERANCE)
        difference, name = _worst_difference(model, weights)
        assert difference < TOLERANCE, name
    return losses, norms


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_adamw_equals_a_plain_loop_over_20_steps(tmp_path, dp, accum):
    losses, norms = _check(tmp_path, tiny_spec(dp, accum))
    assert losses[-1] < losses[0]
    assert sum(norm > 0.5 for norm in norms) > STEPS / 2, "clipping must be at work in this test"


def test_tied_embeddings_without_clipping(tmp_path):
    _check(tmp_path, tiny_spec(2, 1, model=tiny_model(tie_embeddings=True), grad_clip_norm=None))


@pytest.mark.parametrize("clip", [0.5, None])
def test_one_sgd_step_moves_every_weight_as_a_plain_loop(tmp_path, clip):
    """SGD's step is the gradient itself: a wrong scale, which AdamW forgives, shows at once."""
    spec = tiny_spec(2, 3, kind="sgd", lr=4.0, grad_clip_norm=clip)
    _check(tmp_path, spec, n_steps=1)


def _one_step_of_a_wrong_scale(groups, spec, n_valid_factor):
    engine = build_engine(spec, groups, CPU)
    batch = whole_batch(0)
    n_tokens = int((batch.labels != -100).sum())
    batches = share(batch, groups.dp.rank, groups.dp.size, spec.grad_accum_steps)
    engine.train_step(batches, n_tokens * n_valid_factor, spec.optim.lr / 4)
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("factor", [1, 2])
def test_a_wrong_gradient_scale_would_be_noticed(tmp_path, factor):
    """Dividing by the ranks once more, as averaging does, must break the comparison that others make."""
    spec = tiny_spec(2, 1, kind="sgd", lr=4.0, grad_clip_norm=None)
    _, _, model = plain_loop(spec, 1)
    weights = run_ranks(_one_step_of_a_wrong_scale, 2, tmp_path, spec, factor)[0]
    worst, _ = _worst_difference(model, weights)
    assert worst < TOLERANCE if factor == 1 else worst > 100 * TOLERANCE


def test_replicas_stay_bitwise_equal_without_being_compared(tmp_path):
    ranks = run_ranks(_train, 4, tmp_path, tiny_spec(4, 1, precision="bf16"), 5)
    for results, weights in ranks[1:]:
        assert results == ranks[0][0]
        assert all(torch.equal(weights[name], ranks[0][1][name]) for name in weights)


def test_bf16_follows_fp32_at_the_distance_of_its_rounding(tmp_path):
    losses, _, _ = plain_loop(tiny_spec())
    (results, weights), _ = run_ranks(_train, 2, tmp_path, tiny_spec(2, 1, precision="bf16"), STEPS)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    distances = [abs(loss - found[0]) for loss, found in zip(losses, results, strict=True)]
    assert 1e-5 < max(distances) < 0.05
