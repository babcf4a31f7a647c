"""What the policy knows beside an incident and its history; and when a shrunk run grows back. Pure values.

Gathered by who calls policy.decide: from Ray's list of nodes, the book of nodes, the planner, the detectors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ops.blame import Sighting
from ops.decision import Action, Decision
from ops.quarantine import ChangeKind, Cluster, Fleet, NodeChange, NodeRecord, Owner


@dataclass(frozen=True)
class Situation:
    """What else is known when a decision is due. Every default means that it is not known."""

    still_trains: bool = False
    """The ranks go on training: nothing has to be done at once. PAGE or OBSERVE must be available."""
    good_steps: int | None = None
    """Steps completed since these ranks began."""
    nodes: frozenset[str] = frozenset()
    """Addresses of the nodes that the attempt runs on."""
    n_ranks: int = 0
    """Ranks of the layout that the spec asks for."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Ranks that each live node can hold, by address; empty leaves the waiting for nodes to the caller."""
    can_shrink_to: int = 1
    """The fewest ranks that a legal layout has."""
    fleet: Fleet = field(default_factory=Fleet)
    """The book of nodes."""
    cluster: Cluster | None = None
    """For the breaker; needed where RESTART_WITHOUT_NODE is available."""
    sightings: tuple[Sighting, ...] = ()
    """Ambiguous faults of all runs within the last week."""
    run: str = ""
    """Run id, as in sightings."""
    is_clean_elsewhere: bool | None = None
    """The failed step was replayed on other nodes and came out clean: the chip did it, not the data."""
    observing: frozenset[str] = frozenset()
    """Detectors that only observe: what their word would lead to is told and not done."""


def decide_growth(n_ranks_now: int, situation: Situation) -> Decision | None:
    """Whether a shrunk run goes back to its full layout, at the next checkpoint; None where it stays.

    Args:
        n_ranks_now: ranks of the layout that it runs with.
        situation: slots, fleet and n_ranks are looked at.
    """
    out = situation.fleet.out_of_service
    room = sum(n for node, n in situation.slots.items() if node not in out)
    full = situation.n_ranks
    if n_ranks_now >= full or room < full:
        return None
    return Decision(
        Action.RESTART,
        f"nodes are back: {n_ranks_now} of {full} ranks run, and there is room for {room}",
        exclude=tuple(sorted(out)),
        at_checkpoint=True,
    )


def situation_fields(situation: Situation, now: float) -> dict[str, Any]:
    """What the policy looks at, as plain values for the ledger; whatever says nothing is left out.

    Of the book of nodes it holds who is out of service and what automation took out within an hour before
    `now` (unix seconds), which is all that a decision rests on.
    """
    fleet, cluster = situation.fleet, situation.cluster
    retired = sorted(n for n, record in fleet.records.items() if record.retired is not None)
    fields: dict[str, Any] = {
        "nodes": sorted(situation.nodes),
        "n_ranks": situation.n_ranks,
        "slots": _grouped({node: str(n) for node, n in situation.slots.items()}),
        "can_shrink_to": situation.can_shrink_to if situation.can_shrink_to != 1 else 0,
        "out": sorted(fleet.out_of_service - set(retired)),
        "retired": retired,
        "cordons": [[c.at, c.node] for c in fleet.cordons if now - 3600.0 < c.at],
        "sightings": [[one.at, one.symptom, one.gpu, one.run, one.step] for one in situation.sightings],
        "run": situation.run,
        "observing": sorted(situation.observing),
    }
    fields = {name: value for name, value in fields.items() if value}
    if cluster is not None:
        fields["cluster"] = {"n_nodes": cluster.n_nodes, "domains": _grouped(cluster.domains)}
    if situation.good_steps is not None:
        fields["good_steps"] = situation.good_steps
    if situation.is_clean_elsewhere is not None:
        fields["is_clean_elsewhere"] = situation.is_clean_elsewhere
    return fields


def situation_of(fields: Mapping[str, Any] | None, still_trains: bool) -> Situation:
    """The situation behind situation_fields; all unknown where there are none."""
    if not fields:
        return Situation(still_trains=still_trains)
    held = NodeRecord(holds=(NodeChange(0.0, "", ChangeKind.CORDON, Owner.HUMAN),))
    gone = NodeRecord(retired=NodeChange(0.0, "", ChangeKind.RETIRED, Owner.HUMAN))
    records = dict.fromkeys(fields.get("out", ()), held) | dict.fromkeys(fields.get("retired", ()), gone)
    cordons = [
        NodeChange(at, node, ChangeKind.CORDON, Owner.POLICY) for at, node in fields.get("cordons", ())
    ]
    told = fields.get("cluster")
    cluster = Cluster(told["n_nodes"], _ungrouped(told["domains"])) if told else None
    return Situation(
        still_trains=still_trains,
        good_steps=fields.get("good_steps"),
        nodes=frozenset(fields.get("nodes", ())),
        n_ranks=fields.get("n_ranks", 0),
        slots={node: int(n) for node, n in _ungrouped(fields.get("slots", {})).items()},
        can_shrink_to=fields.get("can_shrink_to", 1),
        fleet=Fleet(records, tuple(cordons)),
        cluster=cluster,
        sightings=tuple(Sighting(*one) for one in fields.get("sightings", ())),
        run=fields.get("run", ""),
        is_clean_elsewhere=fields.get("is_clean_elsewhere"),
        observing=frozenset(fields.get("observing", ())),
    )


def _grouped(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by value: thousands of nodes share few."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, value in sorted(values.items()):
        groups[value].append(key)
    return dict(groups)


def _ungrouped(groups: Mapping[str, list[str]]) -> dict[str, str]:
    return {key: value for value, keys in groups.items() for key in keys}
