"""The loop over a real engine and synthetic batches, on one rank and on two."""

import gc
import math
import time

import pytest
import torch

from jobs.data.batches import StepBatches
from jobs.engines.build import build_engine
from jobs.errors import NumericError
from jobs.events import Progress
from jobs.optim.schedule import lr_at
from jobs.spec.job import ResilienceSection
from jobs.trainer import train
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.tiny_runs import (
    GLOBAL_BATCH,
    SEQ_LEN,
    STEPS,
    n_valid,
    plain_loop,
    share,
    tiny_spec,
    whole_batch,
)


class SyntheticSource:
    """Batches by ordinal, as jobs.data.batches.BatchSource gives them."""

    def __init__(self, spec, groups, n_validation=2):
        self.spec, self.groups, self.n_validation = spec, groups, n_validation

    def step_at(self, ordinal):
        whole = whole_batch(ordinal // GLOBAL_BATCH)
        return StepBatches(
            sample_ordinal=ordinal,
            next_ordinal=ordinal + GLOBAL_BATCH,
            batches=share(whole, self.groups.dp.rank, self.groups.dp.size, self.spec.grad_accum_steps),
            n_valid_tokens=n_valid(whole),
            n_padding_tokens=GLOBAL_BATCH * SEQ_LEN - n_valid(whole),
        )

    def validation_batches(self):
        for number in range(self.n_validation):
            yield share(whole_batch(1000 + number), self.groups.dp.rank, self.groups.dp.size, 1)[0]


class Recorder:
    """Notes every call; `at_step` runs what a test wants to happen after some step."""

    def __init__(self, at_step=None):
        self.records, self.evaluations, self.calls, self.at_step = [], [], [], at_step

    def on_start(self, engine, progress):
        self.calls.append(("start", progress.step))

    def after_step(self, record, engine):
        self.records.append(record)
        self.calls.append(("step", record.step))
        if self.at_step is not None:
            self.at_step(record.step)

    def after_evaluate(self, record):
        self.evaluations.append(record)
        self.calls.append(("evaluate", record.step))

    def on_end(self, outcome, engine, progress):
        self.calls.append((outcome, progress.step))


def _with(spec, **train_changes):
    return spec.model_copy(update={"train": spec.train.model_copy(update=train_changes)})


def _never():
    return False


def _run(groups, spec, progress=None, should_stop=_never, at_step=None):
    engine = build_engine(spec, groups, torch.device("cpu"))
    recorder = Recorder(at_step)
    source = SyntheticSource(spec, groups)
    outcome = train(spec, engine, source, progress or Progress(), [recorder], groups, should_stop)
    return outcome, recorder.records, recorder.evaluations, recorder.calls


def test_records_of_a_whole_run(tmp_path):
    spec = _with(tiny_spec(2), evaluate_every_steps=8)
    losses, norms, _ = plain_loop(spec)
    for outcome, records, evaluations, calls in run_ranks(_run, 2, tmp_path, spec):
        assert outcome.kind == "finished"
        assert [record.loss for record in records] == pytest.approx(losses, abs=1e-5, rel=0)
        assert [record.grad_norm for record in records] == pytest.approx(norms, rel=1e-5)
        assert [record.lr for record in records] == [lr_at(spec.optim, STEPS, step) for step in range(STEPS)]
        assert [record.step for record in records] == list(range(1, STEPS + 1))
        tokens = [n_valid(whole_batch(step)) for step in range(STEPS)]
        assert [record.n_tokens for record in records] == tokens
        assert all(r.n_tokens + r.n_padding_tokens == GLOBAL_BATCH * SEQ_LEN for r in records)
        assert outcome.progress == Progress(STEPS, STEPS * GLOBAL_BATCH, sum(tokens))
        assert records[-1].sample_ordinal == STEPS * GLOBAL_BATCH
        assert all(0.0 < record.data_time_s < record.step_time_s for record in records)
        assert calls[0] == ("start", 0)
        assert calls[-1] == ("finished", STEPS)
        assert [call for call in calls if call[0] == "evaluate"] == [("evaluate", 8), ("evaluate", 16)]
        assert calls.index(("evaluate", 8)) == calls.index(("step", 8)) + 1
        assert [e.n_tokens for e in evaluations] == [
            n_valid(whole_batch(1000)) + n_valid(whole_batch(1001))
        ] * 2
        assert 0.0 < evaluations[1].loss < math.log(259) + 2


def test_it_goes_on_from_any_progress_and_counts_on(tmp_path):
    (result,) = run_ranks(_run, 1, tmp_path, tiny_spec(), Progress(17, 17 * GLOBAL_BATCH, 12_345))
    outcome, records, _, _ = result
    assert [record.step for record in records] == [18, 19, 20]
    assert records[0].lr == lr_at(tiny_spec().optim, STEPS, 17)
    assert records[0].tokens_seen == 12_345 + n_valid(whole_batch(17))
    assert outcome.progress.sample_ordinal == 20 * GLOBAL_BATCH


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    (result,) = run_ranks(_run, 1, tmp_path, tiny_spec(), Progress(STEPS, STEPS * GLOBAL_BATCH, 1))
    assert result[3] == [("start", STEPS), ("finished", STEPS)]


# Stopping


def _stop_one_rank(groups, spec, stop_step, when):
    """Rank 1 alone is told to stop: before a step's question, or while the step runs (after its question)."""
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return groups.rank == 1 and asked > stop_step + (when == "during")

    return _run(groups, spec, should_stop=should_stop)


@pytest.mark.parametrize(("when", "last_step"), [("before", 5), ("during", 6)])
def test_a_stop_on_one_rank_ends_all_at_the_same_step(tmp_path, when, last_step):
    for outcome, _, _, calls in run_ranks(_stop_one_rank, 2, tmp_path, tiny_spec(2), 4, when):
        assert outcome.kind == "stopped"
        assert outcome.progress.step == last_step
        assert outcome.progress.sample_ordinal == last_step * GLOBAL_BATCH
        assert calls[-2:] == [("step", last_step), ("stopped", last_step)]


def _stop_during_evaluation(groups, spec):
    """The 6th question is that of the second evaluation batch after step 4."""
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return groups.rank == 0 and asked >= 6

    return _run(groups, spec, should_stop=should_stop)


def test_a_stop_cuts_an_evaluation_short_at_the_step_before_it(tmp_path):
    spec = _with(tiny_spec(2), evaluate_every_steps=4)
    for outcome, _, evaluations, calls in run_ranks(_stop_during_evaluation, 2, tmp_path, spec):
        assert (outcome.kind, outcome.progress.step) == ("stopped", 4)
        assert evaluations == []
        assert calls[-2:] == [("step", 4), ("stopped", 4)]


def test_a_stop_at_the_last_step_is_a_finished_run(tmp_path):
    for outcome, _, _, _ in run_ranks(_stop_one_rank, 2, tmp_path, tiny_spec(2), STEPS - 1, "before"):
        assert outcome.kind == "finished"


# Bad gradients


def _poisoned(groups, spec, bad_steps):
    """inf in one gradient of rank 1 in some steps."""
    engine = build_engine(spec, groups, torch.device("cpu"))
    recorder = Recorder()
    if groups.rank == 1:
        weight = engine.model.get_parameter("layers.1.self_attn.v_proj.weight")
        weight.register_hook(lambda grad: grad * math.inf if len(recorder.records) + 1 in bad_steps else grad)
    caught = None
    try:
        train(spec, engine, SyntheticSource(spec, groups), Progress(), [recorder], groups, _never)
    except NumericError as error:
        caught = str(error)
    adam_step = next(int(c.tensor) for c in engine.chunks() if c.name == "optim/step")
    return caught, [record.skipped for record in recorder.records], adam_step, gc.isenabled()


def _lenient():
    spec = tiny_spec(2)
    return spec.model_copy(update={"resilience": ResilienceSection(on_bad_loss="skip")})


def _bad_samples(groups, spec):
    """NaN in the activations of one sequence, which rank 1 has in step 5."""
    engine = build_engine(spec, groups, torch.device("cpu"))
    recorder = Recorder()
    last = []

    def spoil(_module, _inputs, hidden):
        return hidden * math.nan if groups.rank == 1 and len(recorder.records) == 4 else hidden

    engine.model.embed_tokens.register_forward_hook(spoil)
    before = None

    def keep(step):
        nonlocal before
        if step == 4:
            before = [(chunk.name, chunk.tensor.clone()) for chunk in engine.chunks()]

    recorder.at_step = keep
    try:
        train(spec, engine, SyntheticSource(spec, groups), Progress(), [recorder], groups, _never)
    except NumericError as error:
        last = [type(error).__name__, str(error)]
    is_same = all(
        torch.equal(tensor, chunk.tensor) for (_, tensor), chunk in zip(before, engine.chunks(), strict=True)
    )
    return last, is_same, recorder.records[-1]


@pytest.mark.parametrize("policy", ["rollback", "stop"])
def test_a_loss_that_is_not_finite_ends_the_loop_and_the_rank_is_named_on_all(tmp_path, policy):
    spec = tiny_spec(2).model_copy(update={"resilience": ResilienceSection(on_bad_loss=policy)})
    results = run_ranks(_bad_samples, 2, tmp_path, spec)
    for (_, text), is_same, record in results:
        assert text.startswith("step 5: loss or gradient was not finite (loss nan")
        assert "; the loss of rank 1 was not finite)" in text
        assert is_same
        assert (record.step, record.skipped) == (5, True)
    assert [last[0] for last, _, _ in results] == ["NumericEchoError", "NumericError"]


def test_an_overflow_is_skipped_by_all_and_counted_as_a_step(tmp_path):
    for caught, skipped, adam_step, _ in run_ranks(_poisoned, 2, tmp_path, _lenient(), (5, 9, 10)):
        assert caught is None
        assert [step + 1 for step, one in enumerate(skipped) if one] == [5, 9, 10]
        assert len(skipped) == STEPS
        assert adam_step == STEPS - 3


def test_too_many_in_a_row_stop_the_run_on_all_ranks_at_the_same_step(tmp_path):
    """deepspeedai/DeepSpeed#1773: a run whose every gradient overflows ends with a reason."""
    for caught, skipped, adam_step, gc_is_on in run_ranks(
        _poisoned, 2, tmp_path, _lenient(), tuple(range(10, 99))
    ):
        assert caught.startswith("step 13: the gradient was not finite in it and the 3 steps before it")
        assert "resilience.max_skipped_steps=3" in caught
        assert skipped == [False] * 9 + [True] * 4
        assert adam_step == 9
        assert gc_is_on


# Time


def _slow_hook(groups, spec):
    """One hook call of 0.5 s (a save, say), and one batch that is 0.5 s late."""
    engine = build_engine(spec, groups, torch.device("cpu"))
    recorder = Recorder(at_step=lambda step: time.sleep(0.5) if step == 5 else None)
    source = SyntheticSource(spec, groups)
    step_at = source.step_at

    def late(ordinal):
        if ordinal == 9 * GLOBAL_BATCH:
            time.sleep(0.5)
        return step_at(ordinal)

    source.step_at = late
    train(spec, engine, source, Progress(), [recorder], groups, _never)
    return recorder.records


def test_a_slow_batch_shows_in_its_step_alone_and_a_slow_hook_in_none(tmp_path):
    """allenai/open-instruct#1032: rates are of one step, not of everything since the start."""
    (records,) = run_ranks(_slow_hook, 1, tmp_path, tiny_spec())
    by_time = sorted(records, key=lambda record: record.step_time_s)
    assert by_time[-1].step == 10
    assert by_time[-1].data_time_s > 0.3
    assert by_time[-1].step_time_s > 0.3 + by_time[len(by_time) // 2].step_time_s


def test_an_error_in_the_data_comes_out(tmp_path):
    with pytest.raises(RankFailedError, match="no such sample"):
        run_ranks(_broken_source, 1, tmp_path, tiny_spec())


def _broken_source(groups, spec):
    engine = build_engine(spec, groups, torch.device("cpu"))
    source = SyntheticSource(spec, groups)
    step_at = source.step_at

    def broken(ordinal):
        if ordinal == 3 * GLOBAL_BATCH:
            raise LookupError("no such sample")
        return step_at(ordinal)

    source.step_at = broken
    train(spec, engine, source, Progress(), [], groups, _never)
