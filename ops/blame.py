"""Which nodes a failure is laid to, and whether an ambiguous one follows the GPU or the code. Pure.

Works on what was blamed before; who failed first in a generation is the business of diagnosis/.
"""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from ops.incident import Incident, Nature
from ops.ledger import Event
from ops.quarantine import Cluster
from ops.signal import Entity, EntityKind

SIGHTINGS_WINDOW_S = 7 * 86400.0
"""Older sightings of a GPU say nothing any more."""
LINKS_WINDOW_S = 3600.0
"""Two links are laid to the endpoint that they share when they fail within so long."""
STEP_REPLAYED = "step_replayed"
"""Kind of the ledger's event."""
_NODES_IN_TEXT = re.compile(r"\bnode ([^\s,()]+(?:, [^\s,()]+)*)")


class Follows(StrEnum):
    """What a failure stays with when the other thing changes."""

    GPU = "gpu"
    CODE = "code"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Sighting:
    """One ambiguous fault, as it was seen in some run."""

    at: float
    """Wall clock, unix seconds."""
    symptom: str
    """As in Incident.symptom: "xid 31"."""
    gpu: str
    """UUID, or PCI address with the node."""
    run: str
    step: int


def follows(this: Sighting, others: Iterable[Sighting]) -> tuple[Follows, str]:
    """Whether a fault follows the GPU or the code, by what was seen within a week before it.

    The same GPU at another step or in another run speaks for the GPU; the same step of the same run on
    another GPU speaks for the code. The more frequent wins.

    Returns:
        The verdict, and the sentence with its counts.
    """
    seen = {
        (other.gpu, other.run, other.step)
        for other in others
        if other.symptom == this.symptom and this.at - SIGHTINGS_WINDOW_S < other.at <= this.at
    }
    places = {(run, step) for gpu, run, step in seen if gpu == this.gpu} - {(this.run, this.step)}
    gpus = {gpu for gpu, run, step in seen if (run, step) == (this.run, this.step)} - {this.gpu}
    if len(places) > len(gpus):
        return Follows.GPU, f"{this.symptom} on {this.gpu} at {len(places)} other steps or runs within a week"
    if len(gpus) > len(places):
        return Follows.CODE, f"{this.symptom} at step {this.step} on {len(gpus)} other GPUs"
    return Follows.UNDECIDED, f"{this.symptom}: nothing tells the chip from the code yet"


def sighting_of(incident: Incident, run: str) -> Sighting | None:
    """An ambiguous incident as a sighting of a run; None for one that is clear or names no GPU."""
    if incident.nature is not Nature.AMBIGUOUS or incident.entity is None:
        return None
    return Sighting(incident.detected_at, incident.symptom, incident.entity.name, run, incident.step)


def blamed_nodes(
    incident: Incident, earlier: Sequence[Incident] = (), cluster: Cluster | None = None
) -> frozenset[str]:
    """Addresses of the nodes that an incident is laid to; empty where the evidence names none.

    A link is laid to the endpoint that it shares with the last link that failed within an hour before; two
    failures of the same link blame both ends, a single one neither. A fault of the fabric takes in all nodes
    of the failure domain.

    Args:
        incident: the failure.
        earlier: what failed before it in the same run, oldest first.
        cluster: knows the failure domains.
    """
    since = incident.detected_at - LINKS_WINDOW_S
    nodes = _nodes_of(incident, [past for past in earlier if past.detected_at >= since])
    if incident.nature is Nature.FABRIC and cluster is not None:
        nodes = nodes.union(*(cluster.domain_members(node) for node in nodes))
    return nodes


def _nodes_of(incident: Incident, earlier: Sequence[Incident]) -> frozenset[str]:
    entity = incident.entity
    if entity is None:
        found = _NODES_IN_TEXT.findall(incident.culprit)
        return frozenset(name for names in found for name in names.split(", ")) - {"unknown"}
    match entity.kind:
        case EntityKind.NODE:
            return frozenset({entity.name} - {""})
        case EntityKind.LINK:
            links = [past.entity for past in earlier if past.entity and past.entity.kind is EntityKind.LINK]
            return link_ends(entity) & link_ends(links[-1]) if links else frozenset()
        case _:
            return frozenset({entity.node} - {""})


def link_ends(link: Entity) -> frozenset[str]:
    """The two nodes of a link named "node-node", whose names may hold dashes; empty where it is none."""
    parts = link.name.split("-")
    half, rest = divmod(len(parts), 2)
    if rest or "" in parts:
        return frozenset()
    return frozenset({"-".join(parts[:half]), "-".join(parts[half:])})


def is_clean_elsewhere(events: Iterable[Event], completed: int, nodes: Set[str]) -> bool | None:
    """Whether the step that was not finite is so on another machine too; None where none was asked.

    Args:
        events: the run's ledger: `packtrain replay` writes there what came out.
        completed: steps that were completed when it was found; the step is that one or the next.
        nodes: addresses of the nodes that ran it.
    """
    answers = {"clean_here": True, "same_fault": False}
    told = [
        event
        for event in events
        if event.kind == STEP_REPLAYED
        and event.integer("step") in (completed, completed + 1)
        and event.text("verdict") in answers
        and not nodes & set(event.fields.get("addresses", ()))
    ]
    return answers[told[-1].text("verdict")] if told else None
