"""Incidents and decisions as lines of the ledger, and the decisions made again from those lines. Pure.

What a decision rested on is written beside it, so that a ledger can be asked what another version of the
policy, or other budgets, would have done, and so that who decides knows the run's history after a restart.
Reads no file (ledger.py) and decides nothing itself (policy.py).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from jobs.spec.job import ResilienceSection
from ops.decision import RESTARTS, TODAYS_ACTIONS, Action, Decision
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import Event
from ops.policy import PastIncident, decide
from ops.signal import Entity
from ops.situation import Situation, situation_fields, situation_of


@dataclass(frozen=True)
class Remembered:
    """A decided incident, with what tells later whether the run went on after it."""

    incident: Incident
    action: Action
    committed_step: int
    """Step of the newest committed checkpoint at that moment, 0 for none."""
    is_pending: bool = False
    in_place: bool = True

    def past(self, committed_step: int) -> PastIncident:
        """As the policy takes it, when this is the newest committed step."""
        progressed = committed_step > self.committed_step
        return PastIncident(self.incident, self.action, progressed, self.is_pending, self.in_place)


def incident_fields(
    incident: Incident,
    decision: Decision,
    *,
    shells_alive: bool,
    committed_step: int,
    available: Set[Action],
    situation: Situation,
) -> dict[str, Any]:
    """Fields of the ledger's `incident` event, without attempt and generation where they are not known.

    Args:
        incident: the failure.
        decision: what is done about it.
        shells_alive: as it was told to the policy.
        committed_step: step of the newest committed checkpoint at that moment, 0 for none: progress.
        available: as it was told to the policy.
        situation: as it was told to the policy.
    """
    fields: dict[str, Any] = {
        **_name_fields(incident),
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
    if incident.good_step is not None:
        fields["good_step"] = incident.good_step
    if incident.otherwise is not None:
        fields["otherwise"] = _name_fields(incident.otherwise)
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
        "still_trains": situation.still_trains,
        "available": sorted(available),
        "situation": situation_fields(situation, incident.detected_at),
    }
    return fields | {name: value for name, value in more.items() if value}


def incident_of(event: Event) -> Incident | None:
    """The incident behind a line of the ledger; None where the line is of another kind or class."""
    fields = event.fields
    if event.kind != "incident":
        return None
    try:
        named = _named_by(fields)
        nature = Nature(event.text("nature") or Nature.CLEAR)
        otherwise = _named_by(fields["otherwise"]) if fields.get("otherwise") else None
    except (ValueError, KeyError, TypeError):
        return None
    has_ranks = "attempt" in fields and "generation" in fields
    incident = Incident(
        **named,
        evidence=event.text("evidence"),
        step=event.integer("step"),
        failed_at=event.seconds("failed_at", event.at),
        detected_at=event.seconds("detected_at", event.at),
        nature=nature,
        symptom=event.text("symptom"),
        good_step=event.integer("good_step") if "good_step" in fields else None,
        detector=event.text("detector"),
        generation=(event.integer("attempt"), event.integer("generation")) if has_ranks else None,
    )
    if otherwise is None:
        return incident
    plain = replace(incident, **otherwise, nature=Nature.CLEAR, symptom="", detector="")
    return replace(incident, otherwise=plain)


def kept_off(events: Sequence[Event]) -> tuple[str, ...]:
    """Nodes that the newest decision for a new attempt keeps off; none once the run has ended.

    Args:
        events: the run's ledger, oldest first.
    """
    for event in reversed(events):
        if event.kind == "run_ended":
            break
        is_restart = event.kind == "incident" and event.text("action") in RESTARTS
        # The loss of the coordinator says nothing of nodes, and leaves what was said before.
        if is_restart and not event.fields.get("in_place") and event.text("culprit") != "coordinator":
            return tuple(event.fields.get("exclude", ()))
    return ()


def _name_fields(incident: Incident) -> dict[str, Any]:
    fields: dict[str, Any] = {"class": incident.failure_class.value, "culprit": incident.culprit}
    return fields if incident.entity is None else {**fields, "entity": incident.entity.to_json()}


def _named_by(fields: Mapping[str, Any]) -> dict[str, Any]:
    place = fields.get("entity")
    return {
        "failure_class": FailureClass(str(fields.get("class", ""))),
        "culprit": str(fields.get("culprit", "")),
        "entity": Entity.from_json(place) if place else None,
    }


def remembered(event: Event, newest_step: int = 0) -> Remembered | None:
    """What a line of the ledger says about a decided incident; None where it is none.

    Args:
        event: the line.
        newest_step: of the checkpoints committed before it, for lines that do not say it themselves.
    """
    incident, taken = incident_of(event), event.text("action")
    if incident is None or taken not in set(Action):
        return None
    return Remembered(
        incident,
        Action(taken),
        event.integer("committed_step", newest_step),
        bool(event.fields.get("at_checkpoint", False)),
        bool(event.fields.get("in_place", taken == Action.RESTART_RANKS)),
    )


class History:
    """The incidents of a ledger that bear on the next decision, taken in event by event."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Take in `events`, in the order written."""
        self._decided: list[Remembered] = []
        self._newest_step = 0
        for event in events:
            self.take_in(event)

    def take_in(self, event: Event) -> None:
        """One more event. Who resumes a run that was ended gives it its budgets anew."""
        if event.kind == "run_ended":
            self._decided.clear()
        elif event.kind == "checkpoint_committed":
            self._newest_step = max(self._newest_step, event.integer("step"))
        elif (one := remembered(event, self._newest_step)) is not None:
            self.add(one)

    def add(self, one: Remembered) -> None:
        """One more incident."""
        self._decided.append(one)

    def past(self, committed_step: int) -> list[PastIncident]:
        """As the policy takes them, when this is the newest committed step."""
        return [one.past(committed_step) for one in self._decided]

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint whose commit was taken in."""
        return self._newest_step


def replay(
    events: Sequence[Event], budgets: ResilienceSection, *, available: Set[Action] | None = None
) -> list[tuple[Event, Decision]]:
    """What the policy decides about each incident of a ledger, given what was done about those before it.

    Lines that do not say whether the shells were alive, or which checkpoint was the newest, are taken by what
    was done, and by the commits before them.

    Args:
        events: the ledger, in the order written.
        budgets: limits per kind of restart.
        available: what could be carried out; None takes what each line says.
    """
    decided = []
    history = History()
    for event in events:
        incident = incident_of(event)
        if incident is not None:
            said = [name for name in event.fields.get("available", ()) if name in set(Action)]
            decision = decide(
                incident,
                history.past(event.integer("committed_step", history.newest_step)),
                budgets,
                shells_alive=bool(
                    event.fields.get("shells_alive", event.text("action") == Action.RESTART_RANKS)
                ),
                available=available or {Action(name) for name in said} or TODAYS_ACTIONS,
                situation=situation_of(event.fields.get("situation"), bool(event.fields.get("still_trains"))),
            )
            decided.append((event, decision))
        history.take_in(event)
    return decided
