import math
import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.goodput import Phase
from ops.ledger import Event
from ops.metric_values import (
    RunFacts,
    StepTotals,
    account_run,
    current_phase,
    repeats_without_progress,
    run_samples,
    slim_line,
)
from ops.metrics import BY_NAME, METRICS, SERIES, STEP_BUCKETS_S, Samples, render
from ops.quarantine import ChangeKind, NodeChange, Owner


def event(at, kind, **fields):
    return Event(at=at, kind=kind, writer="supervisor", fields=fields)


def incident(at, step=4, culprit="rank 1", action="RESTART_RANKS"):
    what = {"class": "hang", "action": action, "culprit": culprit, "step": step}
    times = {"failed_at": at - 1.0, "detected_at": at}
    return event(at + 0.5, "incident", attempt=0, generation=0, **what, **times)


EVENTS = [
    event(100.0, "run_created"),
    event(101.0, "attempt_started", attempt=0, world_size=2),
    event(102.0, "ranks_started", attempt=0, generation=0),
    event(103.0, "restored", attempt=0, generation=0, step=0, load_s=0.0),
    event(105.5, "checkpoint_blocked", step=2, blocked_s=0.25),
    event(105.75, "checkpoint_committed", step=2, n_bytes=2048, write_s=0.5, path="step-00000002"),
    event(105.9, "checkpoint_failed", step=3, error="disk full"),
    incident(109.0),
    event(110.0, "ranks_started", attempt=0, generation=1),
    event(112.0, "restored", attempt=0, generation=1, step=2, load_s=0.75),
    event(112.5, "spares", available=0, planned=2),
]
CHANGES = [
    NodeChange(112.0, "10.0.0.2", ChangeKind.STRIKE, Owner.POLICY, weight=1.5, n_nodes=4),
    NodeChange(112.0, "10.0.0.2", ChangeKind.CORDON, Owner.POLICY, n_nodes=4),
    NodeChange(112.0, "10.0.0.3", ChangeKind.STRIKE, Owner.AGENT, weight=0.1, n_nodes=4),
]
LINES = [
    {
        "at": at,
        "step": step,
        "attempt": 0,
        "generation": generation,
        "step_time_s": 1.0,
        "data_time_s": 0.125,
        "n_tokens": 100,
        "tokens_seen": 100 * step,
        "tokens_per_s": 100.0,
        "loss": 5.0 - step,
        "grad_norm": math.inf,
        "lr": 1e-3,
        "mfu_frac": 0.5,
        "skipped": step == 3,
    }
    for at, step, generation in ((104.0, 1, 0), (105.0, 2, 0), (106.5, 3, 0), (107.5, 4, 0), (113.0, 3, 1))
]
SPEC = {
    "train": {"steps": 6},
    "checkpoint": {"every_steps": 2},
    "strategy": {"kind": "native", "dp": 2},
}


def samples(events=EVENTS, lines=LINES, status="RUNNING", now=114.0, spec=SPEC, changes=()):
    totals = StepTotals()
    for line in lines:
        totals.feed(line)
    facts = RunFacts("demo", status, spec, now, is_driver_alive=status == "RUNNING")
    accounted = account_run(facts, events, [slim_line(line) for line in lines])
    return run_samples(facts, events, totals, accounted, changes)


def values_of(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("run") == "demo"
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


def test_the_values_of_a_run_with_one_crash():
    found = values_of(render([samples(changes=CHANGES)]))
    expected = {
        ("packtrain_run_state", "RUNNING"): 1,
        ("packtrain_run_state", "FAILED"): 0,
        ("packtrain_run_phase", "step"): 1,
        ("packtrain_run_phase", "restart"): 0,
        ("packtrain_run_ranks",): 2,
        ("packtrain_run_generation",): 1,
        ("packtrain_rank_restarts_total",): 1,
        ("packtrain_step",): 3,
        ("packtrain_steps_target",): 6,
        ("packtrain_generation_steps",): 1,
        ("packtrain_last_step_timestamp_seconds",): 113.0,
        ("packtrain_step_duration_median_seconds",): 1.0,
        ("packtrain_steps_trained_total",): 5,
        ("packtrain_steps_lost_total",): 2,
        ("packtrain_steps_skipped_total",): 2,
        ("packtrain_tokens_trained_total",): 500,
        ("packtrain_tokens_seen",): 300,
        ("packtrain_data_wait_seconds_total",): 0.625,
        ("packtrain_mfu_ratio",): 0.5,
        ("packtrain_loss",): 2.0,
        ("packtrain_gradient_norm",): math.inf,
        ("packtrain_checkpoints_total", "committed"): 1,
        ("packtrain_checkpoints_total", "failed"): 1,
        ("packtrain_checkpoint_stall_seconds_total",): 0.25,
        ("packtrain_checkpoint_timestamp_seconds",): 105.75,
        ("packtrain_checkpoint_bytes",): 2048,
        ("packtrain_checkpoint_interval_seconds",): 2.0,
        ("packtrain_incidents_total", "RESTART_RANKS", "hang"): 1,
        ("packtrain_incident_cost_seconds_total", "detect", "hang"): 1.0,
        ("packtrain_incident_cost_seconds_total", "decide", "hang"): 0.5,
        ("packtrain_incident_cost_seconds_total", "hang", "restart"): 1.75,
        ("packtrain_incident_cost_seconds_total", "hang", "reload"): 0.75,
        ("packtrain_incident_cost_seconds_total", "hang", "recompute"): 2.0,
        ("packtrain_last_incident_info", "RESTART_RANKS", "hang", "rank 1"): 1,
        ("packtrain_incident_repeats",): 1,
        ("packtrain_last_restore_seconds",): 0.75,
        ("packtrain_step_duration_seconds_bucket", "0.5"): 0,
        ("packtrain_step_duration_seconds_bucket", "1.0"): 5,
        ("packtrain_step_duration_seconds_bucket", "+Inf"): 5,
        ("packtrain_step_duration_seconds_sum",): 5.0,
        ("packtrain_node_state", "10.0.0.2", "quarantined"): 1,
        ("packtrain_node_state", "10.0.0.3", "quarantined"): 0,
        ("packtrain_node_state", "10.0.0.3", "healthy"): 1,
        ("packtrain_node_strikes", "10.0.0.2"): pytest.approx(1.5, rel=1e-4),
        ("packtrain_nodes_quarantined_ratio",): 0.25,
        ("packtrain_spares_available",): 0,
        ("packtrain_quarantine_breaker_open",): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    phases = [value for key, value in found.items() if key[0] == "packtrain_phase_seconds"]
    assert sum(phases) == pytest.approx(14.0)
    assert found["packtrain_ettr_ratio", "run"] == pytest.approx(
        found["packtrain_phase_seconds", "step"] / 14.0
    )


@pytest.mark.parametrize(
    ("n_events", "n_lines", "phase", "step"),
    [
        (1, 0, Phase.SCHEDULING, 0),
        (3, 0, Phase.INIT, 0),
        (4, 0, Phase.STEP, 0),
        (7, 4, Phase.STEP, 4),
        (8, 4, Phase.RESTART, 4),
        (9, 4, Phase.INIT, 4),
        (10, 4, Phase.STEP, 2),  # restored: back at the checkpoint
        (10, 5, Phase.STEP, 3),
    ],
)
def test_phase_and_step_of_each_moment(n_events, n_lines, phase, step):
    events, lines = EVENTS[:n_events], LINES[:n_lines]
    at = max([events[-1].at, *(line["at"] for line in lines)]) + 0.5
    now = samples(events=events, lines=lines, now=at)
    assert now.values["packtrain_run_phase"][phase.value,] == 1
    assert sum(now.values["packtrain_run_phase"].values()) == 1
    assert now.values["packtrain_step"][()] == step


def test_the_phase_of_this_moment_is_that_of_the_whole_account():
    waiting = [event(50.0, "run_created"), *EVENTS[1:], event(120.0, "attempt_ended", attempt=0)]
    later = [
        *waiting,
        event(121.0, "nodes_awaited", world_size=2),
        event(150.0, "attempt_started", attempt=1),
    ]
    for events in (waiting, later[:-1], later):
        facts = RunFacts("demo", "RUNNING", {}, 200.0, is_driver_alive=True)
        whole = account_run(facts, events, LINES).goodput.segments[-1].phase
        assert current_phase(events, LINES, 200.0) == whole


def test_what_is_not_known_is_not_exported():
    found = values_of(render([samples(events=EVENTS[:1], lines=[], status="FAILED", spec={})]))
    names = {key[0] for key in found}
    assert names.isdisjoint(
        {
            "packtrain_loss",
            "packtrain_checkpoint_timestamp_seconds",
            "packtrain_spares_available",
            "packtrain_node_state",
            "packtrain_ettr_ratio",
            "packtrain_last_incident_info",
            "packtrain_run_info",
        }
    )
    assert found["packtrain_run_phase", "stopped"] == 1
    assert found["packtrain_run_state", "FAILED"] == 1
    assert render([]) == ""


def test_an_ended_run_does_not_age():
    ended = [*EVENTS, event(115.0, "run_ended", status="STOPPED")]
    early, late = (samples(events=ended, status="STOPPED", now=now) for now in (120.0, 9e9))
    early.values.pop("packtrain_snapshot_timestamp_seconds")
    late.values.pop("packtrain_snapshot_timestamp_seconds")
    assert early.values == late.values


def test_two_runs_are_one_family_with_two_series():
    one, two = samples(), samples()
    two.run = 'an "odd"\nname'
    text = render([one, two])
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "packtrain_loss"]
    assert [sample.labels["run"] for sample in family.samples] == ["demo", 'an "odd"\nname']


def test_repeats_count_the_same_failure_without_progress():
    saved = event(20.0, "checkpoint_committed", step=5)
    assert repeats_without_progress([]) == 0
    assert repeats_without_progress([incident(10), incident(11), incident(12)]) == 3
    assert repeats_without_progress([incident(10), incident(11, step=5), incident(12, step=5)]) == 2
    assert repeats_without_progress([incident(10), incident(11, culprit="rank 0")]) == 1
    assert repeats_without_progress([incident(10), saved, incident(21)]) == 1
    assert repeats_without_progress([incident(10), incident(11), saved]) == 0


def test_a_step_on_a_bound_is_below_it_and_a_long_one_above_all():
    totals = StepTotals()
    for step, step_time_s in enumerate((*STEP_BUCKETS_S, 601.0, math.nan)):
        totals.feed({"step": step, "at": 1.0, "step_time_s": step_time_s})
    assert totals.buckets == [1] * (len(STEP_BUCKETS_S) + 1)


def test_the_median_forgets_the_last_attempt():
    totals = StepTotals()
    for attempt, step_time_s in ((0, 100.0), (0, 100.0), (1, 2.0)):
        totals.feed({"step": 1, "at": 1.0, "attempt": attempt, "step_time_s": step_time_s})
    assert list(totals.recent) == [2.0]


def test_names_are_by_the_conventions():
    assert len(BY_NAME) == len(METRICS)
    for spec in METRICS:
        assert re.fullmatch(r"packtrain_[a-z][a-z0-9_]*", spec.name)
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert not re.search(r"_(ms|s|frac|pct|percent|mb|gib|kib)(_|$)", spec.name), spec.name
        assert spec.help.endswith(".")
        assert "run" not in spec.labels
    assert "packtrain_step_duration_seconds_bucket" in SERIES
    with pytest.raises(KeyError):
        Samples("demo").put("no_such_metric", 1.0)
    with pytest.raises(ValueError, match="labels"):
        Samples("demo").put("run_state", 1.0)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about():
    command, text = ["promtool", "check", "metrics"], render([samples(changes=CHANGES)])
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
