"""Incidents and decisions as lines of the ledger, and the decisions made again from those lines. Pure.

What a decision rested on is written beside it, so that a ledger can be asked what another version of the
policy, or other budgets, would have done. Reads no file (ledger.py) and decides nothing itself (policy.py).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from jobs.spec.job import ResilienceSection
from ops.decision import TODAYS_ACTIONS, Action, Decision
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import Event
from ops.policy import PastIncident, decide
from ops.signal import Entity, EntityKind
from ops.situation import Situation


def incident_fields(
    incident: Incident, decision: Decision, *, shells_alive: bool, committed_step: int, still_trains: bool
) -> dict[str, Any]:
    """Fields of the ledger's `incident` event, without attempt and generation where they are not known.

    Args:
        incident: the failure.
        decision: what is done about it.
        shells_alive: as it was told to the policy.
        committed_step: step of the newest committed checkpoint at that moment, 0 for none: progress.
        still_trains: as it was told to the policy.
    """
    fields: dict[str, Any] = {
        "class": incident.failure_class.value,
        "culprit": incident.culprit,
        "action": decision.action.value,
        "reason": decision.reason,
        "step": incident.step,
        "failed_at": incident.failed_at,
        "detected_at": incident.detected_at,
        "evidence": incident.evidence[-4000:],
        "shells_alive": shells_alive,
        "committed_step": committed_step,
        "in_place": decision.in_place,
    }
    if incident.generation is not None:
        fields["attempt"], fields["generation"] = incident.generation
    if incident.entity is not None:
        entity = incident.entity
        fields["entity"] = {"kind": entity.kind.value, "name": entity.name, "node": entity.node}
    more = {
        "nature": "" if incident.nature is Nature.CLEAR else incident.nature.value,
        "symptom": incident.symptom,
        "detector": incident.detector,
        "wanted": decision.wanted.value if decision.wanted else "",
        "exclude": list(decision.exclude),
        "strikes": [list(strike) for strike in decision.strikes],
        "checkpoints_back": decision.checkpoints_back,
        "skips_data": decision.skips_data,
        "at_checkpoint": decision.at_checkpoint,
        "n_ranks": decision.n_ranks,
        "calls_people": decision.calls_people,
        "exit_code": decision.exit_code,
        "still_trains": still_trains,
    }
    return fields | {name: value for name, value in more.items() if value}


def incident_of(event: Event) -> Incident | None:
    """The incident behind a line of the ledger; None where the line is of another kind or class."""
    fields = event.fields
    if event.kind != "incident":
        return None
    try:
        failure_class = FailureClass(event.text("class"))
        nature = Nature(event.text("nature") or Nature.CLEAR)
        place = fields.get("entity")
        entity = (
            Entity(EntityKind(str(place["kind"])), str(place["name"]), str(place["node"])) if place else None
        )
    except (ValueError, KeyError, TypeError):
        return None
    has_ranks = "attempt" in fields and "generation" in fields
    return Incident(
        failure_class=failure_class,
        culprit=event.text("culprit"),
        evidence=event.text("evidence"),
        step=event.integer("step"),
        failed_at=event.seconds("failed_at", event.at),
        detected_at=event.seconds("detected_at", event.at),
        entity=entity,
        nature=nature,
        symptom=event.text("symptom"),
        detector=event.text("detector"),
        generation=(event.integer("attempt"), event.integer("generation")) if has_ranks else None,
    )


def replay(
    events: Sequence[Event],
    budgets: ResilienceSection,
    *,
    available: Set[Action] = TODAYS_ACTIONS,
    situation_at: Callable[[Event], Situation] = lambda _: Situation(),
) -> list[tuple[Event, Decision]]:
    """What the policy decides about each incident of a ledger, given what was done about those before it.

    Lines that do not say whether the shells were alive, or which checkpoint was the newest, are taken by what
    was done, and by the commits before them.

    Args:
        events: the ledger, in the order written.
        budgets: limits per kind of restart.
        available: what could be carried out.
        situation_at: what else was known: from the book of nodes up to that moment, say.
    """
    past: list[tuple[int, PastIncident]] = []
    decided = []
    newest_step = 0
    for event in events:
        if event.kind == "checkpoint_committed":
            newest_step = max(newest_step, event.integer("step"))
        incident = incident_of(event)
        if incident is None:
            continue
        committed_step = event.integer("committed_step", newest_step)
        history = [replace(one, progressed=committed_step > then) for then, one in past]
        in_place = event.text("action") == Action.RESTART_RANKS
        shells_alive = bool(event.fields.get("shells_alive", in_place))
        decision = decide(
            incident,
            history,
            budgets,
            shells_alive=shells_alive,
            available=available,
            situation=situation_at(event),
        )
        decided.append((event, decision))
        taken = event.text("action")
        action = Action(taken) if taken in set(Action) else decision.action
        is_pending = bool(event.fields.get("at_checkpoint", False))
        was_in_place = bool(event.fields.get("in_place", in_place))
        past.append((committed_step, PastIncident(incident, action, False, is_pending, was_in_place)))
    return decided
