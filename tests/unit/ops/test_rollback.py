"""Where a run goes back to, and what it passes over."""

import json
from pathlib import Path

import pytest

from jobs.spec.job import ResilienceSection
from ops.checkpoint.layout import committed_steps, folder_name
from ops.checkpoint.set_aside import SET_ASIDE_DIR, set_aside
from ops.decision import Action, Decision
from ops.incident import FailureClass, Incident
from ops.ledger import Event
from ops.policy import decide
from ops.rollback import (
    DueRollback,
    RollbackPlan,
    due_rollback,
    merged,
    plan_rollback,
    skipped_so_far,
    still_due,
)


def incident(failure_class: FailureClass = FailureClass.NUMERICS, good_step: int | None = None) -> Incident:
    return Incident(failure_class, "rank 0", "", 35, 1.0, 2.0, good_step=good_step)


def plan(due: DueRollback, *committed: int, next_ordinal: int | None = 350) -> RollbackPlan:
    return plan_rollback(due, committed, lambda step: step * 10, next_ordinal)


@pytest.mark.parametrize(
    ("back", "committed", "expected"),
    [
        (1, (10, 20, 30), RollbackPlan(20, (30,), ((200, 350),))),
        (2, (10, 20, 30), RollbackPlan(10, (20, 30), ((100, 350),))),
        (4, (10, 20, 30), RollbackPlan(10, (20, 30), ((100, 350),))),
        (1, (30,), RollbackPlan(30, (), ((300, 350),))),
        (1, (), RollbackPlan(0, (), ((0, 350),))),
    ],
)
def test_so_many_checkpoints_back_and_the_data_since_is_passed_over(
    back: int, committed: tuple[int, ...], expected: RollbackPlan
) -> None:
    assert plan(DueRollback(back, True, None), *committed) == expected


def test_no_data_is_passed_over_unasked_or_where_its_end_is_not_known() -> None:
    assert plan(DueRollback(1, False, None), 10, 20).skipped == ()
    assert plan(DueRollback(1, True, None), 10, 20, next_ordinal=None).skipped == ()


def test_state_after_the_last_good_step_is_not_trusted() -> None:
    assert plan(DueRollback(0, False, 25), 10, 20, 30) == RollbackPlan(20, (30,), ())
    assert plan(DueRollback(1, False, 35), 10, 20, 30) == RollbackPlan(20, (30,), ())
    assert plan(DueRollback(0, False, 5), 10, 20) == RollbackPlan(10, (20,), ())


def test_a_run_with_checkpoints_that_cannot_be_read_never_begins_anew_by_itself() -> None:
    assert plan(DueRollback(2, False, None), 10) == RollbackPlan(10, (), ())


def test_what_a_decision_asks_for() -> None:
    back = Decision(Action.ROLLBACK, "", checkpoints_back=2, skips_data=True)
    assert due_rollback(incident(), back) == DueRollback(2, True, None)
    corrupt = incident(FailureClass.CORRUPT_CHECKPOINT)
    assert due_rollback(corrupt, Decision(Action.ROLLBACK, "", checkpoints_back=1)) == DueRollback(
        1, False, None
    )
    move = Decision(Action.RESTART_WITHOUT_NODE, "")
    assert due_rollback(incident(), move) is None
    assert due_rollback(incident(good_step=20), move) == DueRollback(0, False, 20)
    assert due_rollback(incident(good_step=20), Decision(Action.OBSERVE, "")) is None


def test_a_ledger_says_what_is_still_due_and_what_was_passed_over() -> None:
    decided = Event(
        1.0,
        "incident",
        "coordinator",
        {"action": "ROLLBACK", "class": "numerics", "checkpoints_back": 2, "skips_data": True},
    )
    later = Event(2.0, "incident", "coordinator", {"action": "RESTART_RANKS", "class": "worker_killed"})
    done = Event(3.0, "rolled_back", "coordinator", {"step": 10, "skip_samples": [[40, 80]]})
    again = Event(4.0, "rolled_back", "coordinator", {"step": 10, "skip_samples": [[60, 90], [200, 210]]})
    assert still_due([decided, later]) == DueRollback(2, True, None)
    assert still_due([decided, later, done]) is None
    assert still_due([decided, done, decided]) == DueRollback(2, True, None)
    assert still_due([later]) is None
    assert skipped_so_far([decided, done, later, again]) == ((40, 90), (200, 210))


def test_ranges_are_merged() -> None:
    assert merged([(5, 7), (1, 3), (3, 4), (9, 9), (6, 12)]) == ((1, 4), (5, 12))


def test_checkpoints_are_moved_whole_and_never_over_one_another(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for number in range(3):
        path = folder / folder_name(20)
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps(number))
        assert committed_steps(folder) == [20]
        moved = set_aside(folder, [20, 30])
        assert moved == [tmp_path / SET_ASIDE_DIR / f"step-00000020-{number + 1:03d}"]
        assert committed_steps(folder) == []
    kept = sorted((tmp_path / SET_ASIDE_DIR).glob("*/manifest.json"))
    assert [path.read_text() for path in kept] == ["0", "1", "2"]


def test_a_run_that_is_to_stop_for_a_bad_loss_is_not_rolled_back() -> None:
    available = frozenset({Action.ROLLBACK, Action.RESTART_RANKS, Action.STOP})
    made = [
        decide(
            incident(), [], ResilienceSection(on_bad_loss=policy), shells_alive=True, available=available
        ).action
        for policy in ("rollback", "skip", "stop")
    ]
    assert made == [Action.ROLLBACK, Action.ROLLBACK, Action.STOP]
