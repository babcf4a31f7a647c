"""From what a run folder says to the values of its metrics. Pure: lines and events in, values out.

A reader that follows a living run feeds new lines to a StepTotals, which is cheap, and now and then has the
whole run accounted, which takes longer with every step; slim_line() of each line is all that this needs.
Names and help texts are in metrics.py; reads no file.
"""

import math
import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.mesh import SIZES, Mesh
from ops.ettr import HOUR_S
from ops.goodput import Goodput, Phase, account
from ops.incident_rows import named_nodes
from ops.ledger import Event, number
from ops.losses import IncidentBill, Who, bill_incidents, judge_steps, who
from ops.metrics import STEP_BUCKETS_S, Histogram, Samples
from ops.quarantine import DEFAULT_RULES, Cluster, NodeChange, NodeState, breaker_refusal, fold

STATES = ("RUNNING", "FINISHED", "FAILED", "STOPPED", "PREEMPTED")
ANY_OTHER_NODE = "(any other node)"
"""Stands for the next node that automation might want to take out, where the breaker is asked."""
OUTCOMES = ("committed", "failed", "skipped")
MEDIAN_STEPS = 100
"""Steps over which the median step time is taken."""
TAIL_LINES = 200
"""Last lines, from which the phase of this moment is told."""
LABEL_CHARS = 120
"""Longest text of a label: a culprit is a name, not a log."""
_LINE_FIELDS = ("kind", "at", "attempt", "generation", "step", "step_time_s", "eval_time_s")
_LAST_STEP = {
    "tokens_per_s": "tokens_per_second",
    "mfu_frac": "mfu_ratio",
    "bubble_frac": "pipeline_bubble_ratio",
    "memory_bytes": "memory_bytes",
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "lr": "learning_rate",
    "tokens_seen": "tokens_seen",
}


def slim_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of metrics.jsonl that the account of the whole run needs."""
    return {name: line[name] for name in _LINE_FIELDS if name in line}


@dataclass
class StepTotals:
    """Running sums over the lines of metrics.jsonl, each line fed once."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    step_time_s: float = 0.0
    data_time_s: float = 0.0
    n_steps: int = 0
    n_skipped: int = 0
    n_tokens: float = 0.0
    last_step: Mapping[str, Any] = field(default_factory=dict)
    last_eval: Mapping[str, Any] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_STEPS))
    """Times of the last steps of the newest attempt, in seconds."""
    n_of_ranks: int = 0
    """Steps by the ranks of the last one."""
    tail: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def feed(self, line: Mapping[str, Any]) -> None:
        """Count one line."""
        self.tail.append(line)
        if line.get("kind") == "eval":
            self.last_eval = line
        if "kind" in line or number(line.get("step")) is None:
            return
        self.n_steps += 1
        self.n_skipped += bool(line.get("skipped"))
        self.n_tokens += _finite(line.get("n_tokens"))
        self.data_time_s += _finite(line.get("data_time_s"))
        before = self.last_step
        if line.get("attempt", 0) != before.get("attempt", 0):
            self.recent.clear()
        self.n_of_ranks = self.n_of_ranks + 1 if line_ranks(line) == line_ranks(before) else 1
        self.last_step = line
        step_time_s = _finite(line.get("step_time_s"))
        if step_time_s > 0:
            self.step_time_s += step_time_s
            self.buckets[bisect_left(STEP_BUCKETS_S, step_time_s)] += 1
            self.recent.append(step_time_s)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run besides its lines and events."""

    run_id: str
    status: str
    spec: Mapping[str, Any]
    """The resolved spec; empty where it cannot be read."""
    now: float
    """Unix seconds."""
    is_driver_alive: bool

    @property
    def is_live(self) -> bool:
        """Its time goes on."""
        return self.status == "RUNNING" and self.is_driver_alive


@dataclass(frozen=True)
class Accounted:
    """What only a look at the whole run tells."""

    goodput: Goodput
    n_lost_steps: int
    bills: Sequence[IncidentBill]


def account_run(facts: RunFacts, events: Sequence[Event], lines: Sequence[Mapping[str, Any]]) -> Accounted:
    """Account a run: the time it takes grows with its steps.

    Args:
        facts: of the run.
        events: its ledger, in any order.
        lines: its metric lines, slim_line() of each is enough.
    """
    steps = judge_steps(events, lines)
    goodput = account(events, lines, facts.now if facts.is_live else None, steps)
    return Accounted(goodput, sum(not step.is_kept for step in steps), bill_incidents(events, steps))


def run_samples(
    facts: RunFacts,
    events: Sequence[Event],
    totals: StepTotals,
    accounted: Accounted,
    node_changes: Sequence[NodeChange] = (),
) -> Samples:
    """The values of every metric that the run has something to say about. Takes no longer in a long run.

    Args:
        facts: of the run.
        events: its ledger, in any order.
        totals: that was fed its metric lines.
        accounted: may be older than the rest.
        node_changes: the book of nodes of the run's storage, in the order written.
    """
    events = sorted(events, key=lambda event: event.at)
    samples = Samples(facts.run_id)
    samples.put("snapshot_timestamp_seconds", facts.now)
    ranks = _put_run(samples, facts, events)
    _put_steps(samples, events, totals, ranks)
    samples.put("steps_lost_total", accounted.n_lost_steps)
    _put_checkpoints(samples, facts.spec, events, totals)
    _put_incidents(samples, events, accounted.bills)
    current = current_phase(events, totals.tail, facts.now) if facts.is_live else Phase.STOPPED
    samples.put_one_of("run_phase", [phase.value for phase in Phase], current.value)
    _put_time(samples, accounted.goodput)
    _put_nodes(samples, events, node_changes, facts.now)
    return samples


def current_phase(events: Sequence[Event], tail: Iterable[Mapping[str, Any]], now: float) -> Phase:
    """What a living run does at `now` (Unix seconds), from its newest attempt and its last metric lines."""
    ordered = sorted(events, key=lambda event: event.at)
    begun = [place for place, event in enumerate(ordered) if event.kind == "attempt_started"]
    segments = account(ordered[begun[-1] if begun else 0 :], tail, now).segments
    return segments[-1].phase if segments else Phase.SCHEDULING


def repeats_without_progress(events: Iterable[Event]) -> int:
    """How often in a row the last failure came with the same class, culprit and step, and no new checkpoint.

    0 without an incident, 1 for the first of its kind.
    """
    repeats, last = 0, None
    for event in sorted(events, key=lambda event: event.at):
        if event.kind == "checkpoint_committed":
            repeats, last = 0, None
        elif event.kind == "incident":
            print_ = (event.text("class"), event.text("culprit"), event.integer("step"))
            repeats = repeats + 1 if print_ == last else 1
            last = print_
    return repeats


def _put_run(samples: Samples, facts: RunFacts, events: Sequence[Event]) -> Who:
    strategy = facts.spec.get("strategy")
    if isinstance(strategy, Mapping):
        sizes = {axis: strategy[axis] for axis in SIZES if isinstance(strategy.get(axis), int)}
        samples.put("run_info", 1, str(strategy.get("kind", "")), str(Mesh(**sizes).factors))
    samples.put_one_of("run_state", STATES, facts.status)
    attempts = [event for event in events if event.kind == "attempt_started"]
    started = [event for event in events if event.kind == "ranks_started"]
    ranks = max((who(event) for event in (*attempts, *started)), default=(0, 0))
    created = next((event.at for event in events if event.kind == "run_created"), None)
    samples.put("run_created_timestamp_seconds", created)
    samples.put("run_attempt", ranks[0])
    samples.put("run_generation", ranks[1])
    samples.put("run_ranks", attempts[-1].integer("world_size") if attempts else None)
    samples.put("attempts_total", len({event.integer("attempt") for event in attempts}))
    samples.put("rank_restarts_total", sum(event.integer("generation") > 0 for event in started))
    return ranks


def _put_steps(samples: Samples, events: Sequence[Event], totals: StepTotals, ranks: Who) -> None:
    own = totals.n_of_ranks if line_ranks(totals.last_step) == ranks else 0
    restored = [event for event in events if event.kind == "restored" and who(event) == ranks]
    step = number(totals.last_step.get("step")) or 0.0
    samples.put("step", restored[-1].integer("step") if restored and not own else step)
    samples.put("generation_steps", own)
    samples.put("last_step_timestamp_seconds", number(totals.last_step.get("at")))
    samples.put("steps_trained_total", totals.n_steps)
    samples.put("steps_skipped_total", totals.n_skipped)
    samples.put("tokens_trained_total", totals.n_tokens)
    samples.put("data_wait_seconds_total", totals.data_time_s)
    samples.put("step_duration_median_seconds", _median(totals.recent))
    for name, metric in _LAST_STEP.items():
        samples.put(metric, number(totals.last_step.get(name)))
    samples.put("eval_loss", number(totals.last_eval.get("loss")))
    histogram = Histogram(tuple(totals.buckets), totals.step_time_s)
    samples.histograms["packtrain_step_duration_seconds"] = histogram


def _put_checkpoints(
    samples: Samples, spec: Mapping[str, Any], events: Sequence[Event], totals: StepTotals
) -> None:
    of = {outcome: [e for e in events if e.kind == f"checkpoint_{outcome}"] for outcome in OUTCOMES}
    for outcome, found in of.items():
        samples.put("checkpoints_total", len(found), outcome)
    stalls = (event.seconds("blocked_s") for event in events if event.kind == "checkpoint_blocked")
    samples.put("checkpoint_stall_seconds_total", sum(max(0.0, stall_s) for stall_s in stalls))
    if of["committed"]:
        newest = of["committed"][-1]
        samples.put("checkpoint_step", newest.integer("step"))
        samples.put("checkpoint_timestamp_seconds", newest.at)
        samples.put("checkpoint_bytes", newest.integer("n_bytes"))
        samples.put("checkpoint_write_seconds", newest.seconds("write_s"))
    every, target = _of(spec, "checkpoint", "every_steps"), _of(spec, "train", "steps")
    median_s = _median(totals.recent)
    samples.put("checkpoint_interval_seconds", every * median_s if every and median_s else None)
    samples.put("steps_target", target)


def _put_incidents(samples: Samples, events: Sequence[Event], bills: Sequence[IncidentBill]) -> None:
    restores = [event.seconds("load_s") for event in events if event.kind == "restored"]
    samples.put("last_restore_seconds", restores[-1] if restores else None)
    samples.put("incident_repeats", repeats_without_progress(events))
    counts = Counter((_class(bill), bill.event.text("action", "none")) for bill in bills)
    for labels, count in counts.items():
        samples.put("incidents_total", count, *labels)
    blamed = Counter((_class(bill), node) for bill in bills for node in named_nodes(bill.event))
    for labels, count in blamed.items():
        samples.put("node_incidents_total", count, *labels)
    costs: dict[tuple[str, str], float] = {}
    for bill in bills:
        parts = {
            "detect": bill.detect_s,
            "decide": bill.decide_s,
            "restart": bill.relaunch_s,
            "reload": bill.reload_s,
            "recompute": bill.redo_s,
        }
        for part, cost_s in parts.items():
            costs[_class(bill), part] = costs.get((_class(bill), part), 0.0) + cost_s
    for labels, cost_s in costs.items():
        samples.put("incident_cost_seconds_total", cost_s, *labels)
    if bills:
        last = bills[-1]
        culprit = last.event.text("culprit")[:LABEL_CHARS]
        samples.put("last_incident_info", 1, _class(last), culprit, last.event.text("action", "none"))
        samples.put("last_incident_timestamp_seconds", last.event.seconds("detected_at", last.event.at))
        samples.put("last_incident_detect_seconds", last.detect_s)
        samples.put("last_incident_restart_seconds", last.restart_s)


def _put_time(samples: Samples, goodput: Goodput) -> None:
    for phase, us in goodput.phases_us.items():
        samples.put("phase_seconds", us / 1e6, phase.value)
    samples.put("goodput_ratio", goodput.goodput_frac)
    samples.put("ettr_ratio", goodput.ettr_frac, "run")
    hour = goodput.between(goodput.end_us - round(HOUR_S * 1e6), goodput.end_us)
    samples.put("ettr_ratio", hour.ettr_frac, "1h")


def _put_nodes(samples: Samples, events: Sequence[Event], changes: Sequence[NodeChange], now: float) -> None:
    """The standing of every node that anything was ever said about; spares, where the ledger has a word."""
    fleet = fold(changes)
    for node, record in fleet.records.items():
        samples.put_one_of("node_state", [state.value for state in NodeState], record.state(now).value, node)
        samples.put("node_strikes", record.strikes_at(now, DEFAULT_RULES.half_life_s), node)
    n_nodes = max((change.n_nodes for change in changes), default=0)
    if n_nodes:
        n_nodes = max(n_nodes, len(fleet.records))
        samples.put("nodes_quarantined_ratio", len(fleet.out_of_service) / n_nodes)
        refusal = breaker_refusal(fleet, [ANY_OTHER_NODE], Cluster(n_nodes), now)
        samples.put("quarantine_breaker_open", refusal is not None)
    for event in events:
        if event.kind == "spares":
            samples.put("spares_available", event.integer("available"))
            samples.put("spares_planned", event.integer("planned"))


def line_ranks(line: Mapping[str, Any]) -> Who:
    """(attempt, generation) of a metric line."""
    return (int(_finite(line.get("attempt"))), int(_finite(line.get("generation"))))


def _class(bill: IncidentBill) -> str:
    return bill.event.text("class", "unknown")


def _finite(value: Any) -> float:
    found = number(value)
    return found if found is not None and math.isfinite(found) else 0.0


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _of(spec: Mapping[str, Any], section: str, name: str) -> float | None:
    part = spec.get(section)
    return number(part.get(name)) if isinstance(part, Mapping) else None
