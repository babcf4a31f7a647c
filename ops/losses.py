"""What failures cost in work: which steps counted in the end, and the bill of each incident.

Pure. A step is lost when the ranks were later restored to a step before it, or trained it again. "Later"
is by attempt and generation, never by clock: the clocks of nodes need not agree. Does not share out the
time of the run: see goodput.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.ledger import Event, number

Who = tuple[int, int]
"""(attempt, generation): which set of rank processes."""

UNTOUCHED_ACTIONS = frozenset({"PAGE", "NONE", "OBSERVE"})
"""Actions that leave the ranks running: the incident costs no time."""


@dataclass(frozen=True)
class StepLine:
    """One step of metrics.jsonl, and whether its work counted in the end."""

    at: float
    """Unix seconds of the step's end."""
    attempt: int
    generation: int
    step: int
    step_time_s: float
    lost_to: Who | None
    """The first ranks that went back behind this step; None where the step counted."""

    @property
    def is_kept(self) -> bool:
        """The step counted."""
        return self.lost_to is None


@dataclass(frozen=True)
class IncidentBill:
    """What one incident cost."""

    event: Event
    detect_s: float
    """Failure to notice."""
    decide_s: float
    """Part of restart_s: notice to decision."""
    restart_s: float
    """Notice to training again: processes, initialisation and load included; 0 when nothing came after."""
    reload_s: float
    """Part of restart_s: the checkpoint was read back."""
    lost_steps: int
    """Steps after the restored checkpoint that had been trained and counted for nothing."""
    redo_s: float
    """Time that the lost steps had taken: they are computed again."""

    @property
    def relaunch_s(self) -> float:
        """Part of restart_s: decision to ranks that are ready to read the checkpoint."""
        return max(0.0, self.restart_s - self.decide_s - self.reload_s)

    @property
    def total_s(self) -> float:
        """What it cost: to notice, to train again, and to be where it was."""
        return self.detect_s + self.restart_s + self.redo_s


def who(event: Event, default: Who = (0, 0)) -> Who:
    """Which ranks an event speaks of; what it does not say is taken from `default`."""
    attempt = event.integer("attempt", default[0])
    return (attempt, event.integer("generation", default[1] if attempt == default[0] else 0))


def does_restart(event: Event) -> bool:
    """Whether an incident's decision takes the ranks down."""
    return event.text("action").upper() not in UNTOUCHED_ACTIONS


def failed_and_detected(event: Event) -> tuple[float, float]:
    """Unix seconds of an incident's failure and notice, in order; the event's own instant where unknown."""
    detected = event.seconds("detected_at", event.at)
    return min(event.seconds("failed_at", detected), detected), detected


def judge_steps(events: Sequence[Event], metrics: Iterable[Mapping[str, Any]]) -> list[StepLine]:
    """The step lines by (attempt, generation, step), each with the verdict whether it counted."""
    rows = sorted(_rows(metrics), key=lambda row: (*row[0], row[1], row[2]))
    restores = sorted((who(e), e.integer("step")) for e in events if e.kind == "restored")
    judged: list[StepLine] = []
    ahead: list[tuple[Who, int]] = []
    lowest = math.inf
    trained_by: dict[int, Who] = {}
    for ranks, step, at, step_time_s in reversed(rows):
        while restores and restores[-1][0] > ranks:
            ahead.append(restores.pop())
            lowest = min(lowest, ahead[-1][1])
        lost_to = trained_by.get(step)
        if lowest < step:
            went_back = next(other for other, to_step in reversed(ahead) if to_step < step)
            lost_to = min(went_back, lost_to or went_back)
        trained_by[step] = ranks
        judged.append(StepLine(at, *ranks, step, step_time_s, lost_to))
    return judged[::-1]


def bill_incidents(events: Sequence[Event], steps: Sequence[StepLine]) -> list[IncidentBill]:
    """The bill of each incident, by time of notice.

    A lost step is on the bill of the first incident of its ranks, or of ranks between them and those that
    went back. Steps that were lost with the driver are on nobody's bill.
    """
    incidents = sorted((e for e in events if e.kind == "incident"), key=lambda e: failed_and_detected(e)[1])
    ranks = [_ranks_of(event, events) for event in incidents]
    costly = [index for index, event in enumerate(incidents) if does_restart(event)]
    n_lost = [0] * len(incidents)
    redo_s = [0.0] * len(incidents)
    for step in steps:
        own = (step.attempt, step.generation)
        for index in costly if step.lost_to else ():
            if own <= ranks[index] < (step.lost_to or own):
                n_lost[index] += 1
                redo_s[index] += step.step_time_s
                break
    again = _returns(events, steps)
    loads_s = {who(e): max(0.0, e.seconds("load_s")) for e in events if e.kind == "restored"}
    bills = []
    for index, event in enumerate(incidents):
        failed, detected = failed_and_detected(event)
        back, came = min(
            ((at, other) for other, at in again if other > ranks[index] and at >= detected),
            default=(detected, None),
        )
        restart_s = back - detected if index in costly else 0.0
        decide_s = min(max(0.0, event.seconds("decided_at", event.at) - detected), restart_s)
        reload_s = min(loads_s.get(came, 0.0) if came else 0.0, restart_s - decide_s)
        lost = (n_lost[index], redo_s[index])
        bills.append(IncidentBill(event, detected - failed, decide_s, restart_s, reload_s, *lost))
    return bills


def _rows(metrics: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Who, int, float, float]]:
    """(ranks, step, at, step_time_s) of each whole step line."""
    for line in metrics:
        step, at = number(line.get("step")), number(line.get("at"))
        if "kind" in line or step is None or at is None or not math.isfinite(step + at):
            continue
        ranks = (int(number(line.get("attempt")) or 0), int(number(line.get("generation")) or 0))
        step_time_s = number(line.get("step_time_s")) or 0.0
        yield ranks, int(step), at, step_time_s if 0 < step_time_s < math.inf else 0.0


def _ranks_of(incident: Event, events: Sequence[Event]) -> Who:
    """The ranks an incident took down: those it names, else those that were running when it was noticed."""
    noticed = failed_and_detected(incident)[1]
    running = [who(e) for e in events if e.kind == "ranks_started" and e.at <= noticed]
    return who(incident, max(running, default=(0, 0)))


def _returns(events: Sequence[Event], steps: Sequence[StepLine]) -> list[tuple[Who, float]]:
    """When each set of ranks was ready to train (restored, or began its first step) or failed in turn."""
    returns = [(who(e), e.at) for e in events if e.kind == "restored"]
    returns += [
        (who(e), failed_and_detected(e)[0]) for e in events if e.kind == "incident" and does_restart(e)
    ]
    first: dict[Who, float] = {}
    for step in steps:
        first.setdefault((step.attempt, step.generation), step.at - step.step_time_s)
    return [*returns, *first.items()]
