"""From an incident and the run's history to a decision. Pure: no clock, no I/O, nothing executed here."""

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.spec.job import ResilienceSection
from ops.decision import Action, Decision
from ops.incident import FailureClass, Incident

NEVER_RETRIED = frozenset(
    {FailureClass.USER_CODE, FailureClass.CONFIGURATION, FailureClass.ENVIRONMENT, FailureClass.NUMERICS}
)
"""A restart cannot cure these: the same input gives the same error, at the price of the cluster."""

NEEDS_NEW_ATTEMPT = frozenset({FailureClass.NODE_LOST})
"""The shells themselves are gone: restarting ranks in place is impossible."""


@dataclass(frozen=True)
class PastIncident:
    """An earlier incident of this run, what was done, and whether a checkpoint was committed after it."""

    incident: Incident
    action: Action
    progressed: bool
    """A newer checkpoint was committed between this incident and the one being decided."""


def decide(
    incident: Incident, history: Sequence[PastIncident], budgets: ResilienceSection, *, shells_alive: bool
) -> Decision:
    """What to do about `incident`.

    Args:
        incident: the new failure.
        history: the run's earlier incidents, oldest first.
        budgets: limits per kind of restart; only incidents without progress since count against them.
        shells_alive: every worker shell of the attempt still answers, so ranks can be restarted in place.
    """
    if incident.failure_class in NEVER_RETRIED:
        return Decision(
            Action.STOP, f"{incident.failure_class} is never retried: the same input fails the same way"
        )
    spent = _since_progress(history)
    repeats = 0
    for past in reversed(spent):
        if past.incident.fingerprint != incident.fingerprint:
            break
        repeats += 1
    if repeats >= budgets.max_no_progress:
        return Decision(
            Action.STOP,
            f"{incident.failure_class} of {incident.culprit} at step {incident.step}, "
            f"{repeats + 1} times in a row without progress "
            f"(resilience.max_no_progress={budgets.max_no_progress})",
        )
    if incident.failure_class is FailureClass.GPU_OUT_OF_MEMORY and incident.step == 0:
        return Decision(Action.STOP, "out of device memory before the first step: the layout does not fit")
    in_place = shells_alive and incident.failure_class not in NEEDS_NEW_ATTEMPT
    action = Action.RESTART_RANKS if in_place else Action.RESTART
    limit = budgets.max_rank_restarts if in_place else budgets.max_attempts
    name = "max_rank_restarts" if in_place else "max_attempts"
    used = sum(past.action is action for past in spent)
    if used >= limit:
        return Decision(
            Action.STOP,
            f"{used} restarts of this kind since the last committed checkpoint; resilience.{name}={limit}",
        )
    return Decision(
        action, f"{incident.failure_class}: restart {used + 1} of {limit} since the last committed checkpoint"
    )


def _since_progress(history: Sequence[PastIncident]) -> list[PastIncident]:
    """The incidents after the last one that was followed by a newly committed checkpoint."""
    spent: list[PastIncident] = []
    for past in reversed(history):
        if past.progressed:
            break
        spent.append(past)
    spent.reverse()
    return spent
