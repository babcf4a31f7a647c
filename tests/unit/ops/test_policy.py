"""The decision is a pure function: tables, and properties over random histories."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.job import ResilienceSection
from ops.decision import Action
from ops.incident import FailureClass, Incident
from ops.policy import NEVER_RETRIED, PastIncident, decide

BUDGETS = ResilienceSection(max_rank_restarts=3, max_attempts=2, max_no_progress=2)


def incident(
    failure_class: FailureClass = FailureClass.WORKER_KILLED, step: int = 10, culprit: str = "rank 1"
) -> Incident:
    return Incident(failure_class, culprit, "killed", step, failed_at=100.0, detected_at=100.5)


def past(
    action: Action, *, step: int = 10, progressed: bool = False, culprit: str = "rank 1"
) -> PastIncident:
    return PastIncident(incident(step=step, culprit=culprit), action, progressed)


@pytest.mark.parametrize("failure_class", sorted(NEVER_RETRIED))
def test_what_a_restart_cannot_cure_stops_at_once(failure_class: FailureClass) -> None:
    assert decide(incident(failure_class), [], BUDGETS, shells_alive=True).action is Action.STOP


def test_checkpoints_that_cannot_be_read_are_tried_again_within_the_budgets() -> None:
    """A storage may come back; checkpoints that stay unreadable stop the run."""
    unreadable = incident(FailureClass.CORRUPT_CHECKPOINT)
    history: list[PastIncident] = []
    actions = []
    for _ in range(BUDGETS.max_no_progress + 1):
        actions.append(decide(unreadable, history, BUDGETS, shells_alive=True).action)
        history.append(PastIncident(unreadable, actions[-1], progressed=False))
    assert actions == [Action.RESTART_RANKS] * BUDGETS.max_no_progress + [Action.STOP]


def test_a_killed_rank_is_restarted_in_place_and_a_lost_node_in_a_new_attempt() -> None:
    assert decide(incident(), [], BUDGETS, shells_alive=True).action is Action.RESTART_RANKS
    assert decide(incident(), [], BUDGETS, shells_alive=False).action is Action.RESTART
    assert decide(incident(FailureClass.NODE_LOST), [], BUDGETS, shells_alive=True).action is Action.RESTART


def test_the_same_failure_at_the_same_step_stops_after_max_no_progress() -> None:
    history = [past(Action.RESTART_RANKS)]
    assert decide(incident(), history, BUDGETS, shells_alive=True).action is Action.RESTART_RANKS
    decision = decide(incident(), history * 2, BUDGETS, shells_alive=True)
    assert decision.action is Action.STOP
    assert "max_no_progress=2" in decision.reason
    assert "step 10" in decision.reason
    assert decide(incident(step=11), history * 2, BUDGETS, shells_alive=True).action is Action.RESTART_RANKS


def test_a_budget_counts_only_what_came_after_progress() -> None:
    spent = [past(Action.RESTART_RANKS, step=step) for step in (1, 2, 3)]
    assert decide(incident(step=4), spent, BUDGETS, shells_alive=True).action is Action.STOP
    cleared = [*spent[:2], replace(spent[2], progressed=True)]
    assert decide(incident(step=4), cleared, BUDGETS, shells_alive=True).action is Action.RESTART_RANKS


histories = st.lists(
    st.builds(
        past,
        st.sampled_from([Action.RESTART_RANKS, Action.RESTART]),
        step=st.integers(0, 5),
        progressed=st.booleans(),
        culprit=st.sampled_from(["rank 0", "rank 1", "controller"]),
    ),
    max_size=20,
)


@given(histories, st.sampled_from(list(FailureClass)), st.booleans(), st.integers(0, 5))
def test_budgets_are_never_exceeded(
    history: list[PastIncident], failure_class: FailureClass, shells_alive: bool, step: int
) -> None:
    decision = decide(incident(failure_class, step), history, BUDGETS, shells_alive=shells_alive)
    spent: list[PastIncident] = []
    for entry in reversed(history):
        if entry.progressed:
            break
        spent.append(entry)
    limits = {Action.RESTART_RANKS: BUDGETS.max_rank_restarts, Action.RESTART: BUDGETS.max_attempts}
    if decision.action in limits:
        assert sum(entry.action is decision.action for entry in spent) < limits[decision.action]
        assert failure_class not in NEVER_RETRIED
    if decision.action is Action.RESTART_RANKS:
        assert shells_alive
    assert decision == decide(incident(failure_class, step), history, BUDGETS, shells_alive=shells_alive)
