"""The pipeline's bubble: what the ranks' traces of a step show, and what the schedule promises. Pure.

    rank 0   F0 F1 F2 F3 .  .  B0 . B1 . B2 . B3      busy: letters
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3               bubble: the rest of ranks x span

Runs nothing and measures nothing: jobs/parallel/pipeline.py records the traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from jobs.spec.strategy import PipelineSchedule

ActionKind = Literal["forward", "loss", "backward", "backward_input", "backward_weight"]
"""What a rank computes. "backward" is both of the parts that the zero-bubble schedules take apart."""


@dataclass(frozen=True)
class Action:
    """One computation of one stage on one micro-batch; waiting for tensors is never part of it."""

    kind: ActionKind
    stage: int
    micro_batch: int
    start_s: float
    """Since this rank began the step."""
    end_s: float


Trace = tuple[Action, ...]
"""One rank's actions of one step, in the order in which it ran them."""


def busy_s(trace: Trace) -> float:
    """Seconds that a rank computed."""
    return sum(action.end_s - action.start_s for action in trace)


def span_s(trace: Trace) -> float:
    """Seconds from the step's begin to the end of a rank's last action."""
    return max((action.end_s for action in trace), default=0.0)


def bubble_frac(traces: Sequence[Trace]) -> float:
    """Idle part of a step: 1 - busy / (ranks * span), where the span is the longest of any rank.

    The ranks begin a step together (the previous one ended with a sum over all of them), so each may count
    from its own begin and no two clocks are compared.

    Args:
        traces: one of each rank of one pipeline.
    """
    return bubble_of(sum(busy_s(trace) for trace in traces), [span_s(trace) for trace in traces])


def bubble_of(busy: float, spans: Sequence[float]) -> float:
    """The same from the ranks' busy seconds together and each one's span; 0 where nothing ran.

    Sums over several pipelines of one layout give the bubble of them all.
    """
    longest = max(spans, default=0.0)
    return max(0.0, 1.0 - busy / (len(spans) * longest)) if longest > 0 else 0.0


def ideal_bubble(
    schedule: PipelineSchedule, pp: int, n_micro_batches: int, stages_per_rank: int = 1
) -> float:
    """Idle part of the span that a schedule has where stages are equal and sending costs nothing.

    With p ranks, m micro-batches and v stages a rank (arXiv 2104.04473, 2.2: the bubble over *busy* time is
    (p - 1) / m, and (p - 1) / (v m) interleaved), over the span, as here: (p - 1) / (v m + p - 1).
    Schedules that take the backward pass apart assume that forward, input and weight part last equally long:
    their bubble is a third of that (arXiv 2401.10241, table 1: (p - 1)(F + B - W)), and none at all in ZB-V
    with 2 p - 1 micro-batches or more.

    Args:
        schedule: the schedule.
        pp: pipeline ranks.
        n_micro_batches: micro-batches of a step.
        stages_per_rank: virtual stages on each rank.
    """
    chunks = n_micro_batches * stages_per_rank
    match schedule:
        case "gpipe" | "1f1b" | "interleaved_1f1b":
            return (pp - 1) / (chunks + pp - 1)
        case "interleaved_zero_bubble" | "dualpipev":
            return (pp - 1) / (3 * chunks + pp - 1)
        case "zbv_zero_bubble":
            missing = max(0, 2 * pp - 1 - n_micro_batches)
            return missing / (n_micro_batches + missing)
    assert_never(schedule)
