"""The decision table with all actions at hand: each class, what repeats, what is left or only observed."""

from dataclasses import replace

import pytest

from jobs.spec.job import ResilienceSection
from ops.blame import Sighting
from ops.decision import DO_NOT_REQUEUE, TODAYS_ACTIONS, Action, Decision
from ops.decision_table import IMMEDIATE_STRIKE, TABLE
from ops.incident import FailureClass, Incident, Nature
from ops.node_book import strikes_of
from ops.policy import PastIncident, decide, is_handled
from ops.quarantine import DEFAULT_RULES, ChangeKind, Cluster, NodeChange, Owner, fold
from ops.signal import Entity, EntityKind
from ops.situation import Situation, decide_growth

BUDGETS = ResilienceSection(max_rank_restarts=10, max_attempts=5, max_no_progress=2)
ALL = frozenset(Action)
HERE = Situation(cluster=Cluster(40), run="r")
IN_PLACE, AGAIN, AWAY = Action.RESTART_RANKS, Action.RESTART, Action.RESTART_WITHOUT_NODE
BACK, STOP, PAGE, OBSERVE = Action.ROLLBACK, Action.STOP, Action.PAGE, Action.OBSERVE
C = FailureClass


def incident(failure_class: FailureClass, node: str = "n1", *, step: int = 10, at: float = 100.0) -> Incident:
    gpu = Entity(EntityKind.GPU, f"GPU of {node}", node)
    return Incident(failure_class, f"rank 1 (node {node})", "the line", step, at, at, gpu)


def made(
    one: Incident,
    history: list[PastIncident] | None = None,
    situation: Situation = HERE,
    *,
    available: frozenset[Action] = ALL,
    shells_alive: bool = True,
) -> Decision:
    return decide(
        one, history or [], BUDGETS, shells_alive=shells_alive, available=available, situation=situation
    )


def in_turn(one: Incident, n: int, situation: Situation = HERE) -> list[Decision]:
    """The same incident again and again without progress."""
    history: list[PastIncident] = []
    decisions = []
    for _ in range(n):
        decisions.append(made(one, history, situation))
        history.append(PastIncident(one, decisions[-1].action, progressed=False))
    return decisions


@pytest.mark.parametrize(
    ("failure_class", "actions"),
    [
        (C.USER_CODE, [STOP]),
        (C.CONFIGURATION, [STOP]),
        (C.ENVIRONMENT, [STOP]),
        (C.GPU_OUT_OF_MEMORY, [IN_PLACE, STOP]),
        (C.HOST_OUT_OF_MEMORY, [IN_PLACE, STOP]),
        (C.GPU_HARDWARE, [AWAY, STOP]),
        (C.NODE_LOST, [AWAY, STOP]),
        (C.NETWORK, [IN_PLACE, AWAY, STOP]),
        (C.HANG, [IN_PLACE, AWAY, STOP]),
        (C.STRAGGLER, [AWAY, STOP]),
        (C.STORAGE, [IN_PLACE, AWAY, STOP]),
        (C.CORRUPT_CHECKPOINT, [BACK, BACK, STOP]),
        (C.NUMERICS, [BACK, BACK, STOP]),
        (C.PREEMPTION, [AWAY] * 12),
        (C.TRACKING, [IN_PLACE, AGAIN, STOP]),
        (C.WORKER_KILLED, [IN_PLACE, AWAY, STOP]),
        (C.BENIGN, [IN_PLACE, AGAIN, STOP]),
        (C.UNKNOWN, [IN_PLACE, AWAY, STOP]),
    ],
)
def test_each_class_climbs_its_ladder(failure_class: FailureClass, actions: list[Action]) -> None:
    decisions = in_turn(incident(failure_class), len(actions))
    assert [decision.action for decision in decisions] == actions
    assert all(decision.wanted is None for decision in decisions)
    away = [decision for decision in decisions if decision.action is AWAY]
    assert all(decision.exclude == ("n1",) for decision in away)


def test_every_class_has_a_row() -> None:
    assert set(TABLE) == set(FailureClass)
    assert DEFAULT_RULES.quarantine_at == IMMEDIATE_STRIKE


@pytest.mark.parametrize(
    ("failure_class", "exit_code"),
    [
        (C.USER_CODE, DO_NOT_REQUEUE),
        (C.CONFIGURATION, DO_NOT_REQUEUE),
        (C.NUMERICS, DO_NOT_REQUEUE),
        (C.GPU_OUT_OF_MEMORY, DO_NOT_REQUEUE),
        (C.HANG, 1),
        (C.WORKER_KILLED, 1),
        (C.STORAGE, 1),
    ],
)
def test_a_run_that_would_fail_the_same_way_is_not_requeued(
    failure_class: FailureClass, exit_code: int
) -> None:
    last = in_turn(incident(failure_class), 3)[-1]
    assert (last.action, last.exit_code, last.calls_people) == (STOP, exit_code, True)


def test_a_rollback_goes_further_back_each_time_and_skips_data_only_for_numbers() -> None:
    numbers = in_turn(incident(C.NUMERICS), 2)
    assert [(d.checkpoints_back, d.skips_data) for d in numbers] == [(1, True), (2, True)]
    files = in_turn(incident(C.CORRUPT_CHECKPOINT), 2)
    assert [(d.checkpoints_back, d.skips_data) for d in files] == [(1, False), (2, False)]
    moved_on = [PastIncident(incident(C.NUMERICS, "n5", step=9), BACK, progressed=False)]
    assert made(incident(C.NUMERICS), moved_on).checkpoints_back == 2
    assert made(incident(C.NUMERICS), [replace(moved_on[0], progressed=True)]).checkpoints_back == 1


def test_a_step_that_is_clean_elsewhere_convicts_the_chip() -> None:
    decision = made(incident(C.NUMERICS), situation=replace(HERE, is_clean_elsewhere=True))
    assert (decision.action, decision.strikes) == (AWAY, (("n1", IMMEDIATE_STRIKE),))
    assert "clean on other nodes" in decision.reason


def test_user_code_that_failed_after_many_good_steps_gets_one_restart() -> None:
    situation = replace(HERE, good_steps=500)
    decisions = in_turn(incident(C.USER_CODE, step=900), 2, situation)
    assert [d.action for d in decisions] == [IN_PLACE, STOP]
    assert decisions[1].exit_code == DO_NOT_REQUEUE
    assert made(incident(C.USER_CODE), situation=replace(HERE, good_steps=3)).action is STOP


def test_progress_begins_a_ladder_anew_and_keeps_the_nodes_that_were_left_out_until_then() -> None:
    left = PastIncident(incident(C.GPU_HARDWARE, "n7"), AWAY, progressed=False)
    assert made(incident(C.NODE_LOST), [left]).exclude == ("n1", "n7")
    assert made(incident(C.NODE_LOST), [replace(left, progressed=True)]).exclude == ("n1",)


def test_what_comes_again_on_other_nodes_follows_the_code() -> None:
    history = [
        PastIncident(incident(C.HANG), IN_PLACE, progressed=False),
        PastIncident(incident(C.HANG), AWAY, progressed=False),
    ]
    decision = made(incident(C.HANG, "n2"), history)
    assert (decision.action, decision.exit_code) == (STOP, DO_NOT_REQUEUE)
    assert "follows the code" in decision.reason
    assert made(incident(C.HANG, "n2", step=11), history).action is IN_PLACE


def ambiguous(node: str = "n1", step: int = 10) -> Incident:
    return replace(incident(C.GPU_HARDWARE, node, step=step), nature=Nature.AMBIGUOUS, symptom="xid 31")


def test_an_ambiguous_fault_restarts_in_place_until_it_follows_something() -> None:
    first = made(ambiguous())
    assert (first.action, first.strikes) == (IN_PLACE, (("n1", 0.5),))
    in_this_run = [PastIncident(ambiguous(step=4), IN_PLACE, progressed=True)]
    in_another = [Sighting(50.0, "xid 31", "GPU of n1", "other", 3)]
    for decision in (
        made(ambiguous(), in_this_run),
        made(ambiguous(), situation=replace(HERE, sightings=tuple(in_another))),
    ):
        assert (decision.action, decision.strikes) == (AWAY, (("n1", IMMEDIATE_STRIKE),))
        assert "follows the GPU" in decision.reason
    code = made(ambiguous(), [PastIncident(ambiguous("n2"), IN_PLACE, progressed=False)])
    assert (code.action, code.exit_code, code.strikes) == (STOP, DO_NOT_REQUEUE, ())


def test_a_contained_fault_is_noted_and_the_third_within_days_puts_the_node_out() -> None:
    contained = replace(incident(C.GPU_HARDWARE), nature=Nature.CONTAINED, symptom="xid 94")
    trains = replace(HERE, still_trains=True)
    decision = made(contained, situation=trains)
    assert (decision.action, decision.strikes) == (OBSERVE, (("n1", 1.0),))
    assert made(contained).action is IN_PLACE
    changes = strikes_of(decision, contained, "run", 4)
    assert [(c.node, c.weight, c.symptom, c.n_nodes) for c in changes] == [("n1", 1.0, "xid 94", 4)]
    assert fold(changes * 3).out_of_service == frozenset()


def test_a_straggler_is_told_and_replaced_at_a_checkpoint_if_it_stays_one() -> None:
    trains = replace(HERE, still_trains=True)
    slow = incident(C.STRAGGLER)
    assert made(slow, situation=trains).action is PAGE
    told = PastIncident(slow, PAGE, progressed=False)
    assert made(replace(slow, step=12), [told], trains).action is OBSERVE
    again = made(replace(slow, step=40), [replace(told, progressed=True)], trains)
    assert (again.action, again.at_checkpoint, again.exclude) == (AWAY, True, ("n1",))
    other = made(incident(C.STRAGGLER, "n2"), [replace(told, progressed=True)], trains)
    assert other.action is PAGE


def test_a_failed_save_never_stops_training() -> None:
    trains = replace(HERE, still_trains=True)
    save = incident(C.STORAGE)
    history = [PastIncident(save, PAGE, progressed=False)]
    assert made(save, situation=trains).action is PAGE
    assert {made(save, history * n, trains).action for n in (1, 5, 50)} == {OBSERVE}
    assert made(incident(C.TRACKING), history * 50, trains).action is PAGE


def test_one_flap_of_a_link_is_tolerated_and_two_within_minutes_swap_the_common_end() -> None:
    trains = replace(HERE, still_trains=True)

    def flap(ends: str, at: float) -> Incident:
        return replace(incident(C.NETWORK, at=at), entity=Entity(EntityKind.LINK, ends), culprit=ends)

    assert made(flap("n1-n2", 0.0), situation=trains).action is OBSERVE
    told = [PastIncident(flap("n1-n2", 0.0), OBSERVE, progressed=False)]
    second = made(flap("n2-n3", 250.0), told, trains)
    assert (second.action, second.exclude, second.strikes) == (AWAY, ("n2",), (("n2", 1.0),))
    assert made(flap("n2-n3", 350.0), told, trains).action is OBSERVE


def test_a_drain_notice_waits_for_the_checkpoint_and_a_crash_meanwhile_does_not() -> None:
    trains = replace(HERE, still_trains=True)
    notice = replace(incident(C.PREEMPTION), generation=(0, 0))
    drain = made(notice, situation=trains)
    assert (drain.action, drain.at_checkpoint, drain.strikes) == (AWAY, True, ())
    waiting = [PastIncident(notice, AWAY, progressed=False, is_pending=True)]
    assert made(notice, waiting, trains).action is OBSERVE
    crash = replace(incident(C.WORKER_KILLED, "n2"), generation=(0, 0))
    after = made(crash, waiting)
    assert (after.action, after.in_place) == (IN_PLACE, True)


def test_preemptions_cost_nobody_elses_budget() -> None:
    preempted = [PastIncident(incident(C.PREEMPTION, f"n{i}"), AWAY, progressed=False) for i in range(50)]
    assert made(incident(C.NODE_LOST), preempted).action is AWAY
    lost = [PastIncident(incident(C.NODE_LOST, f"n{i}"), AWAY, progressed=False) for i in range(5)]
    assert made(incident(C.NODE_LOST, "n9"), lost).action is STOP
    assert made(incident(C.PREEMPTION, "n9"), lost).action is AWAY
    cannot_move = made(incident(C.PREEMPTION, "n9"), lost, available=TODAYS_ACTIONS, shells_alive=False)
    assert cannot_move.action is STOP  # it may come back to the node that goes away: that must not be endless


def test_the_same_ranks_are_not_acted_on_twice() -> None:
    rank = replace(incident(C.WORKER_KILLED), generation=(0, 1))
    done = [PastIncident(rank, IN_PLACE, progressed=False)]
    node = replace(incident(C.NODE_LOST), generation=(0, 1))
    assert is_handled(node, done, shells_alive=True)
    assert made(node, done).action is OBSERVE
    assert made(replace(node, generation=(0, 0)), done).action is OBSERVE
    assert made(replace(node, generation=(0, 2)), done).action is AWAY
    assert made(node, done, shells_alive=False).action is AWAY  # nobody is left to restart the ranks in place


def test_a_detector_that_observes_moves_nothing_and_blames_nobody() -> None:
    watched = replace(HERE, observing=frozenset({"straggler"}))
    hang = replace(incident(C.HANG), detector="straggler")
    trains = made(hang, situation=replace(watched, still_trains=True))
    assert (trains.action, trains.wanted, trains.strikes) == (OBSERVE, IN_PLACE, ())
    assert "would have been RESTART_RANKS" in trains.reason
    faulty = replace(incident(C.GPU_HARDWARE), detector="straggler")
    history: list[PastIncident] = []
    for action in (IN_PLACE, AGAIN, STOP):  # ranks that are down come back, as of an unknown cause
        decision = made(faulty, history, watched)
        assert (decision.action, decision.exclude, decision.strikes) == (action, (), ())
        history.append(PastIncident(faulty, decision.action, progressed=False))
    assert made(replace(faulty, detector="xid"), situation=watched).action is AWAY


def test_what_a_detector_that_observes_says_leaves_what_the_exits_say() -> None:
    """A kill beside an Xid is told as the GPU's, and acted on as the kill that it is."""
    watched = replace(HERE, observing=frozenset({"kernel_log"}))
    plain = incident(C.WORKER_KILLED)
    named = replace(incident(C.GPU_HARDWARE), detector="kernel_log", otherwise=plain)
    with_it, without = ([], []), ([], [])
    for one, (history, actions) in ((named, with_it), (plain, without)):
        for _ in range(4):
            decision = made(one, history, watched)
            history.append(PastIncident(one, decision.action, progressed=False))
            actions.append((decision.action, decision.exclude))
    assert with_it[1] == without[1]
    assert with_it[1][0][0] is IN_PLACE
    assert AWAY in [action for action, _ in with_it[1]]


def cordoned(*nodes: str, owner: Owner = Owner.HUMAN) -> Situation:
    fleet = fold(NodeChange(0.0, node, ChangeKind.CORDON, owner) for node in nodes)
    return replace(HERE, fleet=fleet)


def test_ranks_are_not_restarted_in_place_on_a_node_that_is_out_of_service() -> None:
    situation = replace(cordoned("n3"), nodes=frozenset({"n1", "n3"}))
    decision = made(incident(C.WORKER_KILLED), situation=situation)
    assert (decision.action, decision.exclude, decision.in_place) == (AGAIN, ("n3",), False)
    back = made(incident(C.NUMERICS), situation=situation)
    assert (back.action, back.in_place, back.exclude) == (BACK, False, ("n3",))


def test_behind_an_open_breaker_the_node_stays_and_people_are_called() -> None:
    situation = cordoned("n2", "n3", "n4", "n5")
    decision = made(incident(C.GPU_HARDWARE), situation=situation)
    assert (decision.action, decision.wanted, decision.calls_people) == (IN_PLACE, AWAY, True)
    assert "breaker: 5 of 40 nodes" in decision.reason
    assert made(incident(C.NODE_LOST), situation=situation).action is AWAY
    assert made(incident(C.PREEMPTION), situation=situation).action is AWAY


def test_without_a_spare_the_run_shrinks_and_grows_back() -> None:
    slots = {f"n{i}": 8 for i in range(4)}
    full = replace(HERE, n_ranks=32, slots=slots, can_shrink_to=16)
    decision = made(incident(C.NODE_LOST), situation=full)
    assert (decision.action, decision.n_ranks, decision.exclude) == (Action.SHRINK, 24, ("n1",))
    assert made(incident(C.NODE_LOST), situation=replace(full, slots=slots | {"n9": 8})).action is AWAY
    waits = made(incident(C.NODE_LOST), situation=replace(full, can_shrink_to=32))
    assert (waits.action, waits.calls_people) == (AWAY, True)
    assert "waits for nodes" in waits.reason
    assert made(incident(C.NODE_LOST), situation=full, available=ALL - {Action.SHRINK}).action is AWAY
    growth = decide_growth(24, full)
    assert growth is not None
    assert (growth.action, growth.at_checkpoint) == (AGAIN, True)
    assert decide_growth(32, full) is None
    assert decide_growth(24, replace(full, fleet=cordoned("n2").fleet)) is None


def test_a_fault_of_the_fabric_leaves_the_whole_domain() -> None:
    rack = Cluster(100, {"n1": "rack", "n2": "rack"})
    fault = replace(incident(C.GPU_HARDWARE), nature=Nature.FABRIC)
    decision = made(fault, situation=replace(HERE, cluster=rack))
    assert decision.exclude == ("n1", "n2")
    assert [node for node, _ in decision.strikes] == ["n1", "n2"]


def test_what_cannot_be_carried_out_is_replaced_and_said() -> None:
    gpu = made(incident(C.GPU_HARDWARE), available=TODAYS_ACTIONS)
    assert (gpu.action, gpu.wanted) == (IN_PLACE, AWAY)
    assert "cannot be carried out here (n1 may be used again)" in gpu.reason
    numbers = made(incident(C.NUMERICS), available=TODAYS_ACTIONS)
    assert (numbers.action, numbers.exit_code) == (STOP, DO_NOT_REQUEUE)
    assert "ROLLBACK is called for" in numbers.reason
    slow = made(
        incident(C.GPU_HARDWARE),
        available=TODAYS_ACTIONS | {PAGE},
        situation=replace(HERE, still_trains=True),
    )
    assert (slow.action, slow.wanted) == (PAGE, AWAY)
    nameless = made(replace(incident(C.GPU_HARDWARE), entity=None, culprit="controller"))
    assert (nameless.action, nameless.wanted) == (IN_PLACE, AWAY)
    assert "names no node" in nameless.reason


def test_callers_that_cannot_do_what_they_ask_for_are_told() -> None:
    with pytest.raises(ValueError, match="PAGE or OBSERVE"):
        made(incident(C.HANG), situation=replace(HERE, still_trains=True), available=TODAYS_ACTIONS)
    with pytest.raises(ValueError, match=r"situation\.cluster"):
        made(incident(C.HANG), situation=Situation())
