import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.goodput import Phase, account
from ops.ledger import Event
from ops.losses import bill_incidents, judge_steps


def event(at, kind, **fields):
    return Event(at=at, kind=kind, writer="supervisor", fields=fields)


def step(at, number, attempt=0, generation=0, step_time_s=1.0):
    return {
        "at": at,
        "step": number,
        "attempt": attempt,
        "generation": generation,
        "step_time_s": step_time_s,
        "loss": 1.0,
    }


def incident(failed_at, detected_at, action="RESTART_RANKS", **fields):
    more = {"class": "process_killed", "culprit": "rank 1", "evidence": "exit -9", **fields}
    return event(detected_at, "incident", action=action, failed_at=failed_at, detected_at=detected_at, **more)


def seconds(goodput):
    return {phase: us / 1e6 for phase, us in goodput.phases_us.items() if us}


CRASH_EVENTS = [
    event(100.0, "run_created"),
    event(101.0, "attempt_started", attempt=0, world_size=2),
    event(105.0, "ranks_started", attempt=0, generation=0),
    event(108.0, "restored", attempt=0, generation=0, step=0, load_s=0.0),
    event(110.25, "checkpoint_blocked", step=2, blocked_s=0.25),
    event(110.75, "checkpoint_committed", step=2, n_bytes=10, write_s=0.5, path="step-00000002"),
    incident(112.75, 113.0, attempt=0, generation=0, step=4),
    event(113.5, "ranks_started", attempt=0, generation=1),
    event(115.5, "restored", attempt=0, generation=1, step=2, load_s=0.5),
    event(119.0, "training_ended", attempt=0, generation=1, step=5, outcome="finished"),
    event(120.0, "attempt_ended", attempt=0, outcome="finished", error=None),
    event(120.5, "run_ended", status="FINISHED"),
]
CRASH_METRICS = [
    step(109.0, 1),
    step(110.0, 2),
    step(111.25, 3),
    step(112.25, 4),
    step(116.5, 3, generation=1),
    step(117.5, 4, generation=1),
    step(118.5, 5, generation=1),
    {"kind": "eval", "at": 119.0, "step": 5, "loss": 1.0, "eval_time_s": 0.5, "attempt": 0, "generation": 1},
]


def test_a_crash_is_cut_into_phases_by_hand():
    goodput = account(CRASH_EVENTS, CRASH_METRICS, now=None)
    assert seconds(goodput) == {
        Phase.SCHEDULING: 5.0,  # 100 -> 105
        Phase.INIT: 3.0 + 1.5,
        Phase.LOAD: 0.5,
        Phase.STEP: 2.0 + 3.0,  # steps 1 and 2, then 3 to 5 of the second generation
        Phase.SAVE_STALL: 0.25,
        Phase.LOST_WORK: 1.0 + 1.0 + 0.5,  # steps 3 and 4, and the half of step 5 that was under way
        Phase.DETECTION: 0.25,
        Phase.RESTART: 0.5,
        Phase.EVALUATION: 0.5,
        Phase.FINISH: 1.0,
        Phase.IDLE: 0.5,
    }
    assert sum(goodput.phases_us.values()) == goodput.wall_us == 20_500_000
    assert goodput.goodput_frac == pytest.approx(5.0 / 20.5)


def test_the_bill_of_a_crash():
    steps = judge_steps(CRASH_EVENTS, CRASH_METRICS)
    assert [(s.generation, s.step) for s in steps if not s.is_kept] == [(0, 3), (0, 4)]
    (bill,) = bill_incidents(CRASH_EVENTS, steps)
    assert (bill.detect_s, bill.restart_s, bill.lost_steps, bill.redo_s) == (0.25, 2.5, 2, 2.0)


def test_two_failures_before_a_step_share_the_bill_without_counting_twice():
    events = [
        event(0.0, "run_created"),
        event(0.0, "attempt_started", attempt=0),
        event(1.0, "ranks_started", attempt=0, generation=0),
        event(2.0, "restored", attempt=0, generation=0, step=0),
        incident(5.0, 6.0, attempt=0, generation=0),
        event(7.0, "ranks_started", attempt=0, generation=1),
        incident(8.0, 8.5, attempt=0, generation=1),
        event(9.0, "ranks_started", attempt=0, generation=2),
        event(10.0, "restored", attempt=0, generation=2, step=1, load_s=0.25),
    ]
    metrics = [step(3.0, 1), step(4.0, 2), step(5.0, 3), step(11.0, 2, generation=2)]
    bills = bill_incidents(events, judge_steps(events, metrics))
    assert [bill.lost_steps for bill in bills] == [2, 0]
    assert [bill.restart_s for bill in bills] == [2.0, 1.5]


def test_a_restart_before_the_first_checkpoint_is_billed_up_to_its_first_step():
    events = [
        event(0.0, "run_created"),
        event(0.0, "attempt_started", attempt=0),
        event(1.0, "ranks_started", attempt=0, generation=0),
        incident(4.0, 4.5, attempt=0, generation=0),
        event(5.0, "ranks_started", attempt=0, generation=1),
    ]
    metrics = [step(3.0, 1), step(4.0, 2), step(8.0, 1, generation=1), step(9.0, 2, generation=1)]
    (bill,) = bill_incidents(events, judge_steps(events, metrics))
    assert (bill.restart_s, bill.lost_steps, bill.redo_s) == (2.5, 2, 2.0)
    assert seconds(account(events, metrics, now=9.0)) == {
        Phase.SCHEDULING: 1.0,
        Phase.INIT: 1.0 + 2.0,
        Phase.LOST_WORK: 2.0,
        Phase.DETECTION: 0.5,
        Phase.RESTART: 0.5,
        Phase.STEP: 2.0,
    }


def test_steps_behind_a_restore_are_lost_before_they_are_trained_again():
    events = [event(5.0, "restored", attempt=1, generation=0, step=2)]
    judged = judge_steps(events, [step(float(n), n) for n in range(1, 5)])
    assert [s.step for s in judged if s.is_kept] == [1, 2]
    assert {s.lost_to for s in judged if not s.is_kept} == {(1, 0)}


def test_steps_are_judged_by_generation_when_clocks_disagree():
    judged = judge_steps([], [step(100.0, 1), step(50.0, 1, generation=1)])
    assert [(s.generation, s.is_kept) for s in judged] == [(0, False), (1, True)]


def test_a_dead_driver_and_a_resume_leave_stopped_time():
    events = [
        event(0.0, "run_created"),
        event(0.0, "attempt_started", attempt=0),
        event(1.0, "ranks_started", attempt=0, generation=0),
        event(2.0, "restored", attempt=0, generation=0, step=0),
        event(100.0, "attempt_started", attempt=1),
        event(101.0, "ranks_started", attempt=1, generation=0),
        event(102.0, "restored", attempt=1, generation=0, step=2),
        event(104.0, "training_ended", attempt=1, generation=0, step=4, outcome="finished"),
        event(104.0, "attempt_ended", attempt=1, outcome="finished"),
        event(104.0, "run_ended", status="FINISHED"),
    ]
    metrics = [step(n + 2.0, n) for n in (1, 2, 3)] + [step(n + 100.0, n, attempt=1) for n in (3, 4)]
    goodput = account(events, metrics, now=None)
    assert seconds(goodput) == {
        Phase.SCHEDULING: 2.0,
        Phase.INIT: 2.0,
        Phase.STEP: 4.0,
        Phase.LOST_WORK: 1.0,
        Phase.STOPPED: 95.0,
    }
    assert goodput.wall_us == 104_000_000


def test_a_clean_stop_and_resume_leave_stopped_time():
    events = [
        event(0.0, "run_created"),
        event(0.0, "attempt_started", attempt=0),
        event(1.0, "attempt_ended", attempt=0, outcome="stopped"),
        event(1.0, "run_ended", status="STOPPED"),
        event(50.0, "attempt_started", attempt=1),
    ]
    assert seconds(account(events, [], now=52.0)) == {Phase.SCHEDULING: 3.0, Phase.STOPPED: 49.0}
    assert seconds(account(events[:4], [], now=52.0)) == {Phase.SCHEDULING: 1.0}


def test_a_live_run_counts_up_to_now_and_a_dead_one_to_its_last_word():
    events = [
        event(0.0, "run_created"),
        event(0.0, "attempt_started", attempt=0),
        event(1.0, "ranks_started", attempt=0, generation=0),
        event(2.0, "restored", attempt=0, generation=0, step=0),
    ]
    metrics = [step(3.0, 1)]
    assert account(events, metrics, now=10.0).wall_us == 10_000_000
    assert account(events, metrics, now=None).wall_us == 3_000_000


def test_an_incident_that_only_pages_costs_no_time():
    events = [*CRASH_EVENTS, incident(109.25, 109.5, action="PAGE", attempt=0, generation=0)]
    assert (
        account(events, CRASH_METRICS, None).phases_us == account(CRASH_EVENTS, CRASH_METRICS, None).phases_us
    )
    bills = bill_incidents(events, judge_steps(events, CRASH_METRICS))
    assert [(bill.restart_s, bill.lost_steps) for bill in bills] == [(0.0, 0), (2.5, 2)]


def test_a_late_word_of_the_last_generation_does_not_stop_the_clock_of_the_next():
    events = [*CRASH_EVENTS, incident(112.75, 116.0, attempt=0, generation=0)]
    assert account(events, CRASH_METRICS, None).phases_us[Phase.STEP] == 5_000_000


def test_waiting_for_nodes_after_a_loss_is_idle_not_restart():
    events = [
        event(0.0, "nodes_awaited", world_size=2),
        event(2.0, "run_created"),
        event(2.0, "nodes_awaited", world_size=2),
        event(5.0, "attempt_started", attempt=0),
        event(6.0, "ranks_started", attempt=0, generation=0),
        event(7.0, "restored", attempt=0, generation=0, step=0),
        event(9.0, "attempt_ended", attempt=0),
        incident(8.0, 9.5, action="RESTART", attempt=0, generation=0),
        event(10.0, "nodes_awaited", world_size=2),
        event(70.0, "attempt_started", attempt=1),
        event(71.0, "ranks_started", attempt=1, generation=0),
        event(72.0, "nodes_awaited", world_size=2),  # out of place: ranks are up
        event(73.0, "restored", attempt=1, generation=0, step=0, load_s=1.0),
    ]
    goodput = account(events, [step(74.0, 1, attempt=1)], now=None)
    assert seconds(goodput) == {
        Phase.SCHEDULING: 1.0 + 1.0,
        Phase.INIT: 1.0 + 1.0,
        Phase.LOAD: 1.0,
        Phase.STEP: 1.0,
        Phase.LOST_WORK: 1.0,
        Phase.DETECTION: 1.5,
        Phase.RESTART: 0.5,
        Phase.IDLE: 3.0 + 60.0,
    }
    (bill,) = bill_incidents(events, judge_steps(events, []))
    assert (bill.detect_s, bill.restart_s, bill.reload_s) == (1.5, 63.5, 1.0)


def test_the_parts_of_a_bill_add_up():
    events = [*CRASH_EVENTS]
    events[6] = incident(112.75, 113.0, attempt=0, generation=0, step=4, decided_at=113.125)
    (bill,) = bill_incidents(events, judge_steps(events, CRASH_METRICS))
    assert (bill.decide_s, bill.relaunch_s, bill.reload_s) == (0.125, 1.875, 0.5)
    assert bill.decide_s + bill.relaunch_s + bill.reload_s == bill.restart_s == 2.5
    assert bill.total_s == 0.25 + 2.5 + 2.0


def test_nothing_at_all():
    goodput = account([], [], now=None)
    assert (goodput.wall_us, goodput.goodput_frac, goodput.segments) == (0, 0.0, ())


TIMES = st.floats(min_value=1e9, max_value=1e9 + 500, allow_nan=False)
SPANS = st.floats(min_value=-1, max_value=30, allow_nan=False)
NUMBERS = st.integers(min_value=0, max_value=3)
KINDS = st.sampled_from(
    [
        "run_created",
        "attempt_started",
        "ranks_started",
        "restored",
        "checkpoint_blocked",
        "checkpoint_committed",
        "training_ended",
        "attempt_ended",
        "run_ended",
        "nodes_awaited",
    ]
)
EVENTS = st.one_of(
    st.builds(
        lambda at, kind, a, g, s, span: event(
            at, kind, attempt=a, generation=g, step=s, load_s=span, blocked_s=span, outcome="failed"
        ),
        TIMES,
        KINDS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        SPANS,
    ),
    st.builds(
        lambda failed, detected, action, a, g: incident(failed, detected, action, attempt=a, generation=g),
        TIMES,
        TIMES,
        st.sampled_from(["RESTART_RANKS", "RESTART", "STOP", "PAGE"]),
        NUMBERS,
        NUMBERS,
    ),
)
LINES = st.one_of(
    st.builds(step, TIMES, NUMBERS, NUMBERS, NUMBERS, SPANS),
    st.builds(
        lambda at, s, span: {"kind": "eval", "at": at, "step": s, "eval_time_s": span}, TIMES, NUMBERS, SPANS
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=25), st.lists(LINES, max_size=25), st.one_of(st.none(), TIMES))
def test_every_microsecond_is_in_exactly_one_phase(events, metrics, now):
    goodput = account(events, metrics, now)
    assert sum(goodput.phases_us.values()) == goodput.wall_us
    assert 0.0 <= goodput.goodput_frac <= 1.0
    at = goodput.start_us
    for segment in goodput.segments:
        assert segment.start_us == at
        assert segment.end_us > at
        at = segment.end_us
    assert at == goodput.end_us
    with pytest.MonkeyPatch.context() as patch:  # steps left out because they change nothing change nothing
        patch.setattr("ops.goodput._thinned", lambda steps, _others_us: list(steps))
        assert account(events, metrics, now) == goodput
    steps = judge_steps(events, metrics)
    assert account(events, metrics, now, steps) == goodput
    assert len(steps) == sum("kind" not in line for line in metrics)
    bills = bill_incidents(events, steps)
    assert len(bills) == sum(e.kind == "incident" for e in events)
    assert sum(bill.lost_steps for bill in bills) <= sum(not s.is_kept for s in steps)
    assert all(bill.detect_s >= 0 and bill.restart_s >= 0 for bill in bills)
    parts = [bill.decide_s + bill.relaunch_s + bill.reload_s for bill in bills]
    assert parts == pytest.approx([bill.restart_s for bill in bills])
    kept = [s.step for s in steps if s.is_kept]
    assert len(kept) == len(set(kept))
