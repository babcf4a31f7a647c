"""What a run tells Prometheus: the table of every metric, and its text form. Pure.

Names follow Prometheus' conventions: prefix packtrain_, base units (seconds, bytes, ratio) last, counters end
in _total. Every metric has the label `run`. Alert rules and dashboards may use what stands in METRICS and
nothing else (tests hold them to it). Computes no value (metric_values.py) and serves nothing
(service/metrics_server.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

STEP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the histogram of step times, in seconds; one without a bound is added."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric as it is exported."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Besides `run`."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query can use."""
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)

    @property
    def family(self) -> str:
        """The name without the _total that the text form adds to counters."""
        return self.name.removesuffix("_total")


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"packtrain_{name}", "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"packtrain_{name}_total", "counter", text, labels)


METRICS: tuple[MetricSpec, ...] = (
    _gauge("snapshot_timestamp_seconds", "When the figures of this run were last worked out."),
    _gauge("run_info", "1, with how the run is laid out.", "strategy", "layout"),
    _gauge("run_state", "1 for the state that the run is in, 0 for the others.", "state"),
    _gauge("run_phase", "1 for the phase that the run is in now, 0 for the others.", "phase"),
    _gauge("run_created_timestamp_seconds", "When the run was created."),
    _gauge("run_attempt", "Number of the newest attempt, from 0."),
    _gauge("run_generation", "Number of the newest set of ranks in that attempt, from 0."),
    _gauge("run_ranks", "Ranks of the newest attempt."),
    _counter("attempts", "Attempts begun."),
    _counter("rank_restarts", "Times that the ranks were restarted in place."),
    # Progress
    _gauge("step", "Where the run is: the last step, or the one that it was restored to."),
    _gauge("steps_target", "Optimizer steps that the spec asks for."),
    _gauge("generation_steps", "Steps by the ranks that run now; 0 until their first one is done."),
    _gauge("last_step_timestamp_seconds", "When the last step ended."),
    MetricSpec("packtrain_step_duration_seconds", "histogram", "Time of a step, lost ones included."),
    _gauge("step_duration_median_seconds", "Median of the last 100 steps of the newest attempt."),
    _counter("data_wait_seconds", "Time that steps waited for their batch."),
    _counter("steps_trained", "Steps trained, lost ones included."),
    _counter("steps_skipped", "Steps whose gradient was not finite: nothing was updated."),
    _counter("steps_lost", "Steps trained for nothing: a restart went back behind them."),
    _counter("tokens_trained", "Valid tokens trained, lost steps included."),
    _gauge("tokens_seen", "Valid tokens up to the last step, each once."),
    _gauge("tokens_per_second", "Valid tokens a second in the last step."),
    _gauge("mfu_ratio", "Model FLOPs utilisation of the last step, 0 to 1."),
    _gauge("pipeline_bubble_ratio", "Idle part of the pipeline in the last step, 0 to 1."),
    _gauge("memory_bytes", "Peak device (or host) memory of rank 0 in the last step."),
    _gauge("loss", "Training loss of the last step, nats per token."),
    _gauge("gradient_norm", "Global gradient norm of the last step, before clipping."),
    _gauge("learning_rate", "Learning rate of the last step."),
    _gauge("eval_loss", "Loss of the last evaluation, nats per token."),
    # Checkpoints
    _counter("checkpoints", "Saves by how they ended: committed, failed, skipped.", "outcome"),
    _counter("checkpoint_stall_seconds", "Time that training stood still for saves."),
    _gauge("checkpoint_step", "Step of the newest committed checkpoint."),
    _gauge("checkpoint_timestamp_seconds", "When the newest checkpoint was committed."),
    _gauge("checkpoint_bytes", "Size of the newest committed checkpoint."),
    _gauge("checkpoint_write_seconds", "Time that the newest committed checkpoint took to write."),
    _gauge("checkpoint_interval_seconds", "Time between saves: checkpoint.every_steps x median step."),
    # Incidents
    _counter("incidents", "Incidents by class and by what was done.", "class", "action"),
    _counter("node_incidents", "Incidents by the node they are laid to.", "class", "node"),
    _counter(
        "incident_cost_seconds",
        "What incidents cost, by class and part: detect, decide, restart, reload, recompute.",
        "class",
        "part",
    ),
    _gauge("last_incident_info", "1, with the last incident.", "class", "culprit", "action"),
    _gauge("last_incident_timestamp_seconds", "When the last incident was noticed."),
    _gauge("last_incident_detect_seconds", "Failure to notice, of the last incident."),
    _gauge("last_incident_restart_seconds", "Notice to training again, of the last incident."),
    _gauge("last_restore_seconds", "Time that the last restore of a checkpoint took."),
    _gauge("incident_repeats", "Times in a row of the same failure at the same step, no new checkpoint."),
    # Time
    _gauge(
        "phase_seconds",
        "Time of the run by phase; the phases add up to its age. A gauge: steps become lost_work afterwards.",
        "phase",
    ),
    _gauge("goodput_ratio", "Steps that counted as a share of the run's wall time, 0 to 1."),
    _gauge("ettr_ratio", "Steps that counted as a share of the driven time; window is run or 1h.", "window"),
    # Nodes
    _gauge("node_state", "1 for the state that a node is in, 0 for the others.", "node", "state"),
    _gauge("node_strikes", "Strikes against a node, decayed.", "node"),
    _gauge("nodes_quarantined_ratio", "Share of the nodes that are out of service, 0 to 1."),
    _gauge("spares_available", "Spare nodes ready to take over."),
    _gauge("spares_planned", "Spare nodes that the plan holds."),
    _gauge("quarantine_breaker_open", "1 while the breaker refuses to take more nodes out."),
)

BY_NAME: Mapping[str, MetricSpec] = {spec.name: spec for spec in METRICS}
SERIES: frozenset[str] = frozenset(name for spec in METRICS for name in spec.series)
"""Every name that an alert rule or a dashboard can ask for."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Histogram:
    """Counts by upper bound, not cumulated; the last is of what lies above all bounds."""

    counts: tuple[int, ...]
    sum_value: float


@dataclass
class Samples:
    """The values of one run's metrics at one moment."""

    run: str
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    """Metric name -> values of its labels (without run) -> value."""
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Set one value; nothing where it is None.

        Raises:
            KeyError: METRICS has no such metric.
            ValueError: another number of labels than the metric has.
        """
        spec = BY_NAME[f"packtrain_{name}"]
        if len(labels) != len(spec.labels):
            raise ValueError(f"{spec.name} has the labels {spec.labels}, not {len(labels)} of them")
        if value is not None:
            self.values.setdefault(spec.name, {})[labels] = float(value)

    def put_one_of(self, name: str, all_states: Iterable[str], current: str, *labels: str) -> None:
        """Set 1 for the current state and 0 for the others; the state is the last label."""
        for state in {*all_states, current}:
            self.put(name, float(state == current), *labels, state)


class SamplesCollector:
    """Hands the samples of runs to prometheus-client; one family a metric, whatever the number of runs."""

    def __init__(self, samples: Sequence[Samples]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """The families that have a value."""
        for spec in METRICS:
            family = _family(spec, self._samples)
            if family is not None:
                yield family


def render(samples: Sequence[Samples]) -> str:
    """The text exposition of some runs, in the format of Prometheus 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SamplesCollector(samples))
    return generate_latest(registry).decode()


def _family(spec: MetricSpec, samples: Sequence[Samples]) -> Metric | None:
    labels = ("run", *spec.labels)
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=labels)
        for one in samples:
            if spec.name in one.histograms:
                found = one.histograms[spec.name]
                histogram.add_metric([one.run], _buckets(found), sum_value=found.sum_value)
        return histogram if histogram.samples else None
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(spec.family, spec.help, labels=labels)
    for one in samples:
        for values, value in sorted(one.values.get(spec.name, {}).items()):
            family.add_metric([one.run, *values], value)
    return family if family.samples else None


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    n_below, buckets = 0, []
    for bound, count in zip((*map(str, STEP_BUCKETS_S), "+Inf"), histogram.counts, strict=True):
        n_below += count
        buckets.append((bound, float(n_below)))
    return buckets
