"""The native engine by itself: skipped steps, evaluation, state as chunks, stop and resume bit for bit."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from jobs.engines.base import MicroBatch
from jobs.engines.build import build_engine
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import engine_step, n_valid, plain_loop, share, tiny_spec, whole_batch

CPU = torch.device("cpu")


def _state(engine):
    """A copy of every chunk, by name and offsets."""
    return {(c.name, c.offsets): c.tensor.clone() for c in engine.chunks()}


def _is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Stop and resume


def _stop_and_resume(groups, spec):
    unbroken = build_engine(spec, groups, CPU)
    for step in range(3):
        engine_step(unbroken, spec, groups.dp.rank, step)
    saved = _state(unbroken)
    resumed = build_engine(
        spec.model_copy(update={"run": spec.run.model_copy(update={"seed": 99})}), groups, CPU
    )
    for chunk in resumed.chunks():
        chunk.tensor.copy_(saved[chunk.name, chunk.offsets])
    resumed.after_load(spec.optim.lr)
    results = [
        [engine_step(engine, spec, groups.dp.rank, step) for step in range(3, 8)]
        for engine in (unbroken, resumed)
    ]
    forward = [dict(engine.model.named_parameters()) for engine in (unbroken, resumed)]
    return (
        results[0] == results[1]
        and _is_same(_state(unbroken), _state(resumed))
        and all(torch.equal(forward[0][name], forward[1][name]) for name in forward[0])
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_resumed_run_is_bitwise_the_unbroken_one(tmp_path, dp, precision):
    assert run_ranks(_stop_and_resume, dp, tmp_path, tiny_spec(dp, 3, precision)) == [True] * dp


def test_sgd_resumes_from_weights_alone(tmp_path):
    assert run_ranks(_stop_and_resume, 1, tmp_path, tiny_spec(1, 1, kind="sgd")) == [True]


def _states_at_another_number_of_ranks(groups, spec, whole):
    engine = build_engine(spec, groups, CPU)
    if whole is not None:
        for chunk in engine.chunks():
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
            chunk.tensor.copy_(whole[chunk.name][box])
        engine.after_load(spec.optim.lr)
    first = 0 if whole is None else 5
    losses = [engine_step(engine, spec, groups.dp.rank, step).loss for step in range(first, first + 5)]
    return losses, [
        (c.name, c.global_shape, c.offsets, c.tensor.clone(), c.is_writer) for c in engine.chunks()
    ]


def _assemble(ranks):
    """Whole tensors from what is written, which must tile each tensor exactly once."""
    whole, count = {}, {}
    for chunks in ranks:
        for name, shape, offsets, tensor, is_writer in chunks:
            if is_writer:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
                whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box] = tensor
                count.setdefault(name, torch.zeros(shape, dtype=torch.int64))[box] += 1
    assert all(bool((found == 1).all()) for found in count.values())
    return whole


def test_four_ranks_save_equal_shares_and_two_go_on(tmp_path):
    """deepspeedai/DeepSpeed#2898: another number of ranks goes on, moments included."""
    ranks = run_ranks(_states_at_another_number_of_ranks, 4, tmp_path, tiny_spec(4), None)
    saved = [chunks for _, chunks in ranks]
    written = [
        sum(t.numel() * t.element_size() for *_, t, is_writer in chunks if is_writer) for chunks in saved
    ]
    assert max(written) < 1.1 * min(written)
    whole = _assemble(saved)
    assert whole["optim/step"].tolist() == [5]
    assert len([name for name in whole if name.startswith("optim/exp_avg_sq/")]) == 21
    losses, _, _ = plain_loop(tiny_spec(), 10)
    for found, _ in run_ranks(_states_at_another_number_of_ranks, 2, tmp_path, tiny_spec(2), whole):
        assert found == pytest.approx(losses[5:], abs=1e-5, rel=0)


# Skipped steps


def _one_bad_gradient(groups, spec, bad_steps, bad):
    """Inject `bad` into one element of one gradient, on rank 1 only."""
    engine = build_engine(spec, groups, CPU)
    is_bad = False

    def poison(gradient):
        if is_bad:
            gradient = gradient.clone()
            gradient.view(-1)[3] = bad
        return gradient

    if groups.rank == groups.world_size - 1:
        engine.model.get_parameter("layers.0.mlp.up_proj.weight").register_hook(poison)
    skipped, unchanged, norms = [], [], []
    for step in range(6):
        is_bad = step in bad_steps
        before = _state(engine)
        result = engine_step(engine, spec, groups.dp.rank, step)
        skipped.append(result.skipped)
        unchanged.append(_is_same(before, _state(engine)))
        norms.append(result.grad_norm)
    return skipped, unchanged, norms, int(_state(engine)["optim/step", (0,)])


@pytest.mark.parametrize(("bad", "precision"), [(math.inf, "fp32"), (math.nan, "fp32"), (-math.inf, "bf16")])
def test_one_bad_gradient_on_one_rank_skips_the_step_on_all(tmp_path, bad, precision):
    """deepspeedai/DeepSpeed#1773."""
    for skipped, unchanged, norms, n_updates in run_ranks(
        _one_bad_gradient, 2, tmp_path, tiny_spec(2, 3, precision), (2, 3), bad
    ):
        assert skipped == [False, False, True, True, False, False]
        assert unchanged == skipped
        assert [math.isfinite(norm) for norm in norms] == [not one for one in skipped]
        assert n_updates == 4


def _one_infinite_loss(groups, spec):
    """The loss of the last rank is infinite in step 1, its gradient is not."""
    engine = build_engine(spec, groups, CPU)
    model = engine.model
    whole = model.operations
    engine_step(engine, spec, groups.dp.rank, 0)
    before = _state(engine)
    if groups.rank == 1:
        model.operations = replace(whole, loss=lambda logits, labels: whole.loss(logits, labels) + math.inf)
    result = engine_step(engine, spec, groups.dp.rank, 1)
    unchanged = _is_same(before, _state(engine))
    model.operations = whole
    return result, unchanged, engine_step(engine, spec, groups.dp.rank, 1).skipped


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_kahan"])
def test_an_infinite_loss_with_a_finite_gradient_skips_the_step_on_all(tmp_path, precision):
    results = run_ranks(_one_infinite_loss, 2, tmp_path, tiny_spec(2, 1, precision))
    for result, unchanged, is_next_skipped in results:
        assert (result.skipped, unchanged, is_next_skipped) == (True, True, False)
        assert (math.isfinite(result.grad_norm), math.isfinite(result.loss)) == (True, False)
    assert [result.is_cause for result, _, _ in results] == [False, True]


# Evaluation, overlap, and what a user may get wrong


def _evaluate(groups, spec):
    engine = build_engine(spec, groups, CPU)
    before = _state(engine)
    found = [engine.evaluate(part) for part in share(whole_batch(0), groups.dp.rank, groups.dp.size, 3)]
    return found, _is_same(before, _state(engine))


def test_evaluation_sums_over_ranks_and_changes_nothing(tmp_path):
    spec = tiny_spec(2, 3)
    _, _, model = plain_loop(spec, 0)
    batch = whole_batch(0)
    with torch.no_grad():
        loss_sum = cross_entropy_sum(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)
    for found, is_untouched in run_ranks(_evaluate, 2, tmp_path, spec):
        assert sum(loss for loss, _ in found) == pytest.approx(loss_sum.item(), rel=1e-6)
        assert sum(n for _, n in found) == n_valid(batch)
        assert is_untouched


def _order_of_events(groups, spec):
    engine = build_engine(spec, groups, CPU)
    events = []
    launch = torch.distributed.all_reduce

    def watch(*args, **kwargs):
        events.append("reduce" if kwargs.get("async_op") else "blocking")
        return launch(*args, **kwargs)

    torch.distributed.all_reduce = watch
    for parameter in engine.model.parameters():
        parameter.register_hook(lambda _: events.append("gradient"))
    engine_step(engine, spec, groups.dp.rank, 0)
    torch.distributed.all_reduce = launch
    return events


def test_buckets_are_reduced_while_the_last_backward_pass_runs(tmp_path):
    """Nothing is sent before the last micro-batch, most buckets before its last gradient; figures last."""
    for events in run_ranks(_order_of_events, 2, tmp_path, tiny_spec(2, 3)):
        n_parameters = 21
        assert events.count("gradient") == 3 * n_parameters
        reduces = [place for place, event in enumerate(events) if event == "reduce"]
        assert len(reduces) > 4
        assert all(earlier < later for earlier, later in pairwise(reduces))
        assert events[: reduces[0]].count("gradient") > 2 * n_parameters
        assert events[-3:] == ["gradient", "reduce", "blocking"]
        assert events.count("blocking") == 1


def _without_any_label(groups, spec):
    engine = build_engine(spec, groups, CPU)
    batch = whole_batch(0)
    empty = MicroBatch(batch.tokens, torch.full_like(batch.labels, IGNORED_LABEL), batch.positions, None)
    result = engine.train_step([empty], 0, 1e-3)
    return result.loss, result.grad_norm, result.skipped


def test_a_batch_without_labels_has_no_loss_and_no_gradient(tmp_path):
    assert run_ranks(_without_any_label, 1, tmp_path, tiny_spec()) == [(0.0, 0.0, False)]


def test_groups_of_another_size_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="asks for 4 ranks, the groups hold 1"):
        run_ranks(_stop_and_resume, 1, tmp_path, tiny_spec(4))
