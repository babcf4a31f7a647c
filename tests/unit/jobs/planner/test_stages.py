"""Which stage holds what, and what each schedule refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.planner.stages import (
    plan_stages,
    rank_of_stage,
    recompute_refusal,
    schedule_refusal,
    stage_params,
)
from tests.support.tiny_runs import tiny_model

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]


def layer_counts(stages):
    return [len(stage.layers) for stage in stages]


def test_ten_layers_on_four_ranks():
    stages = plan_stages(tiny_model(n_layers=10), 4)
    assert layer_counts(stages) == [3, 3, 2, 2]
    assert [stage.layers.start for stage in stages] == [0, 3, 6, 8]
    assert [stage.is_first for stage in stages] == [True, False, False, False]
    assert [stage.is_last for stage in stages] == [False, False, False, True]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["layers", "parameters"]))
def test_every_layer_is_on_one_stage_and_none_is_empty(n_layers, pp, each, split):
    model = tiny_model(n_layers=n_layers)
    if n_layers < pp * each:
        with pytest.raises(ValueError, match=rf"{n_layers} layers do not fill {pp * each}"):
            plan_stages(model, pp, "interleaved_1f1b", each, split)
        return
    stages = plan_stages(model, pp, "interleaved_1f1b", each, split)
    assert [layer for stage in stages for layer in stage.layers] == list(range(n_layers))
    assert min(layer_counts(stages)) >= 1
    assert sorted(stage.pp_rank for stage in stages) == sorted(list(range(pp)) * each)


def test_stages_fold_back_on_a_v():
    assert [rank_of_stage("zbv_zero_bubble", 4, i) for i in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [rank_of_stage("interleaved_1f1b", 4, i) for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_list_must_add_up():
    model = tiny_model(n_layers=10)
    assert layer_counts(plan_stages(model, 4, split=(1, 4, 4, 1))) == [1, 4, 4, 1]
    with pytest.raises(ValueError, match=r"has 4 stages and 11 layers; there are 4 .* and 10 layers"):
        plan_stages(model, 4, split=(2, 4, 4, 1))
    with pytest.raises(ValueError, match=r"has 3 stages and 10 layers; there are 4"):
        plan_stages(model, 4, split=(2, 4, 4))


def test_split_by_parameters_spares_the_ends():
    """A vocabulary worth many layers leaves the ends with fewer of them."""
    model = tiny_model(n_layers=12, vocab_size=2000)
    by_layers, by_parameters = (
        stage_params(model, plan_stages(model, 3, split=s)) for s in ("layers", "parameters")
    )
    assert max(by_parameters) < max(by_layers)
    assert layer_counts(plan_stages(model, 3, split="parameters"))[1] > 4


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_stages_add_up(tied):
    model = tiny_model(n_layers=5, tie_embeddings=tied)
    total = sum(stage_params(model, plan_stages(model, 2)))
    assert total == model.n_params + tied * model.vocab_size * model.d_model


@pytest.mark.parametrize(
    ("schedule", "pp", "each", "m", "says"),
    [
        ("gpipe", 2, 2, 4, "stages_per_rank=2; set stages_per_rank to 1"),
        ("1f1b", 4, 1, 3, "needs 4 micro-batches a step or more; there are 3"),
        ("interleaved_1f1b", 2, 1, 4, "with stages_per_rank=1 is 1f1b"),
        ("interleaved_1f1b", 2, 2, 5, "2 equal rounds; 5 of them do not divide: use 4 or 6"),
        ("interleaved_zero_bubble", 4, 2, 9, "use 8 or 12"),
        ("zbv_zero_bubble", 2, 1, 4, "stages_per_rank=1: set it to 2"),
        ("dualpipev", 4, 2, 7, "needs 8 micro-batches"),
    ],
)
def test_refused_schedules_say_what_to_change(schedule, pp, each, m, says):
    assert says in schedule_refusal(schedule, pp, each, m)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_micro_batches_a_stage_are_enough_for_every_schedule(schedule):
    each = 1 if schedule in ("gpipe", "1f1b") else 2
    for pp in (2, 3, 4, 8):
        assert schedule_refusal(schedule, pp, each, 2 * pp) is None


def test_recomputing_layers_does_not_go_with_a_backward_pass_taken_apart():
    for schedule in SCHEDULES:
        assert recompute_refusal(schedule, ["none", "attention"]) is None
        is_refused = schedule in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
        for mode in ("full", "ops"):
            reason = recompute_refusal(schedule, ["none", mode])
            assert (reason is not None) == is_refused
            assert reason is None or f"recompute={mode}" in reason
