"""An incident of the ledger with its bill as one row, for whoever shows it: report, status, MLflow, metrics.

Pure. Computes no bill (losses.py) and decides nothing (policy.py).
"""

from collections.abc import Iterable
from typing import Any

from ops.blame import blamed_nodes
from ops.ledger import Event, plain_value
from ops.losses import IncidentBill
from ops.replay import incident_of

COLUMNS = (
    "class",
    "culprit",
    "nodes",
    "action",
    "reason",
    "detector",
    "symptom",
    "step",
    "attempt",
    "generation",
    "detected_at",
    "detect_s",
    "decide_s",
    "restart_s",
    "relaunch_s",
    "reload_s",
    "redo_s",
    "total_s",
    "lost_steps",
    "exclude",
    "strikes",
    "evidence",
)
"""Of the table of a run's incidents, in order."""


def incident_row(bill: IncidentBill) -> dict[str, Any]:
    """One incident with its bill, as plain values."""
    event = bill.event
    return {
        "class": event.text("class", "unknown"),
        "culprit": event.text("culprit"),
        "action": event.text("action"),
        "reason": event.text("reason"),
        "step": event.integer("step"),
        "attempt": event.integer("attempt"),
        "generation": event.integer("generation"),
        "detected_at": event.seconds("detected_at", event.at),
        "detect_s": round(bill.detect_s, 6),
        "decide_s": round(bill.decide_s, 6),
        "restart_s": round(bill.restart_s, 6),
        "relaunch_s": round(bill.relaunch_s, 6),
        "reload_s": round(bill.reload_s, 6),
        "lost_steps": bill.lost_steps,
        "redo_s": round(bill.redo_s, 6),
        "total_s": round(bill.total_s, 6),
        **handling(event),
        "evidence": event.text("evidence"),
    }


def handling(event: Event) -> dict[str, Any]:
    """Whose word an incident is, which nodes it names, and what was done about nodes; plain values."""
    return {
        "detector": event.text("detector"),
        "symptom": event.text("symptom"),
        "nature": event.text("nature"),
        "nodes": list(named_nodes(event)),
        "wanted": event.text("wanted"),
        "exclude": [str(node) for node in _listed(event, "exclude")],
        "strikes": _strikes(event),
        "calls_people": bool(event.fields.get("calls_people")),
    }


def handling_words(event: Event) -> str:
    """The same in a few words; empty where a process ended by itself and no node was left or struck."""
    said = handling(event)
    strikes = ", ".join(f"{node} +{weight:g}" for node, weight in said["strikes"])
    parts = [
        f"seen by {said['detector']}" if said["detector"] else "",
        said["symptom"],
        f"wanted {said['wanted']}" if said["wanted"] else "",
        f"keeps off {', '.join(said['exclude'])}" if said["exclude"] else "",
        f"strikes: {strikes}" if strikes else "",
        "calls people" if said["calls_people"] else "",
    ]
    return "; ".join(part for part in parts if part)


def named_nodes(event: Event) -> tuple[str, ...]:
    """Addresses of the nodes that an incident is laid to, sorted; empty where its evidence names none."""
    incident = incident_of(event)
    return tuple(sorted(blamed_nodes(incident))) if incident is not None else ()


def incident_table(bills: Iterable[IncidentBill]) -> dict[str, Any]:
    """The incidents as a table in MLflow's form: {"columns": [...], "data": [[...], ...]}."""
    rows = [incident_row(bill) for bill in bills]
    data = [[_cell(row[name]) for name in COLUMNS] for row in rows]
    return {"columns": list(COLUMNS), "data": data}


def _cell(value: Any) -> Any:
    """Lists as text: viewers of tables show plain values."""
    if not isinstance(value, list):
        return plain_value(value)
    return ", ".join(f"{item[0]} +{item[1]:g}" if isinstance(item, list) else str(item) for item in value)


def _strikes(event: Event) -> list[list[Any]]:
    """[[node, weight], ...]; what is no such pair is left out."""
    pairs = [pair for pair in _listed(event, "strikes") if isinstance(pair, list | tuple) and len(pair) == 2]
    return [
        [str(node), float(weight)]
        for node, weight in pairs
        if isinstance(weight, int | float) and not isinstance(weight, bool)
    ]


def _listed(event: Event, name: str) -> list[Any]:
    value = event.fields.get(name)
    return list(value) if isinstance(value, list | tuple) else []
