import math

from ops.ledger import Event
from ops.tracking.points import Counts, points_of_event, points_of_lines


def line(step, **fields):
    return {"at": 100.0 + step, "attempt": 0, "generation": 0, "step": step, "loss": 2.0, **fields}


def test_fields_of_a_step_get_their_names():
    points, counts = points_of_lines(
        [line(3, tokens_per_s=50.0, mfu_frac=0.4, mine=7, skipped=False)], Counts()
    )
    assert {(p.name, p.value, p.step, p.at) for p in points} == {
        ("train/loss", 2.0, 3, 103.0),
        ("perf/tokens_per_s", 50.0, 3, 103.0),
        ("perf/mfu_frac", 0.4, 3, 103.0),
        ("extra/mine", 7.0, 3, 103.0),
    }
    assert counts.last_step == 3


def test_non_finite_figures_are_counted_and_never_sent():
    lines = [line(1, loss="nan"), line(2, loss=math.inf, grad_norm="-inf"), line(3)]
    points, counts = points_of_lines(lines, Counts())
    assert all(math.isfinite(p.value) for p in points)
    assert all(abs(p.value) < 1e300 for p in points)
    assert [(p.step, p.value) for p in points if p.name == "ops/nonfinite_points"] == [(1, 1), (2, 3)]
    assert [p.step for p in points if p.name == "train/loss"] == [3]
    assert counts.nonfinite_points == 3


def test_only_every_nth_step_is_sent_but_every_evaluation():
    lines = [line(n) for n in range(1, 11)] + [{**line(7), "kind": "eval", "loss": 3.0}]
    points, _ = points_of_lines(lines, Counts(), log_every_steps=5)
    assert [p.step for p in points if p.name == "train/loss"] == [1, 5, 10]
    assert [(p.step, p.value) for p in points if p.name == "eval/loss"] == [(7, 3.0)]


def test_events_become_points_with_running_totals():
    counts = Counts(last_step=9)
    names = []
    for event in (
        Event(1.0, "incident", "s", {"step": 4, "failed_at": 0.25, "detected_at": 1.0}),
        Event(2.0, "incident", "s", {"step": 6}),
        Event(2.5, "ranks_started", "s", {"attempt": 0, "generation": 0}),
        Event(3.0, "ranks_started", "s", {"attempt": 0, "generation": 1}),
        Event(4.0, "checkpoint_committed", "s", {"step": 8, "n_bytes": 10, "write_s": 0.5}),
    ):
        points, counts = points_of_event(event, counts)
        names += [(p.name, p.value, p.step) for p in points]
    assert ("ops/detect_s", 0.75, 4) in names
    assert ("ops/incidents", 2.0, 6) in names
    assert ("ops/restarts", 1.0, 9) in names
    assert ("ops/checkpoint_step", 8.0, 8) in names
    assert (counts.incidents, counts.restarts, counts.checkpoints) == (2, 1, 1)
