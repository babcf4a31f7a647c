"""Which nodes are out of service, since when, by whose word: states as a fold over a list of changes. Pure.

    healthy <-> suspect     strikes, which fade with time
       |           |
       +-----------+--cordon--> quarantined --repair_begun--> repairing --repair_done--> healthy
                                 |  ^   ^                        |
                            uncordon|   +------repair_failed-----+
                                 v  strikes
                             healthy                  any --retired--> retired --returned--> healthy

Each owner (a human, a node agent, the policy) has a hold of its own on a node, and automation can lift only
its own: a node goes back to work when no hold is left. What automation takes out passes the breaker.

Does not read or write the file (node_book.py), judge failures (policy.py) or move anything in Ray.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jobs.errors import PacktrainError
from ops.ledger import number

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives each node by itself."""


class NodeState(StrEnum):
    """What a node may be used for."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """In use, with strikes against it."""
    QUARANTINED = "quarantined"
    REPAIRING = "repairing"
    RETIRED = "retired"


OUT_OF_SERVICE = frozenset({NodeState.QUARANTINED, NodeState.REPAIRING, NodeState.RETIRED})
"""No work is placed on nodes in these states."""


class Owner(StrEnum):
    """Whose word a change rests on."""

    HUMAN = "human"
    AGENT = "agent"
    """A node agent that saw its own node."""
    POLICY = "policy"


class ChangeKind(StrEnum):
    """What can happen to a node's standing."""

    STRIKE = "strike"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    REPAIR_BEGUN = "repair_begun"
    REPAIR_DONE = "repair_done"
    REPAIR_FAILED = "repair_failed"
    RETIRED = "retired"
    RETURNED = "returned"


class QuarantineError(PacktrainError):
    """A change that the node's state, or the owner of its quarantine, does not allow."""


@dataclass(frozen=True)
class NodeChange:
    """One line of the book of nodes."""

    at: float
    """Wall clock, unix seconds."""
    node: str
    """Its address."""
    kind: ChangeKind
    owner: Owner
    reason: str = ""
    weight: float = 0.0
    """Strikes that it counts for."""
    symptom: str = ""
    """What was seen: a failure class, or "xid 79"."""
    run: str = ""
    """Run in which it was seen."""
    n_nodes: int = 0
    """Nodes of that run; 0 where not known."""

    def to_json(self) -> dict[str, Any]:
        """As a line of the book."""
        return {
            "at": self.at,
            "node": self.node,
            "kind": self.kind.value,
            "owner": self.owner.value,
            "reason": self.reason,
            "weight": self.weight,
            "symptom": self.symptom,
            "run": self.run,
            "n_nodes": self.n_nodes,
        }


def change_from_json(line: Mapping[str, Any]) -> NodeChange | None:
    """A line of the book; None where it is none (of a later version, or damaged)."""
    at, weight, n_nodes = number(line.get("at")), number(line.get("weight", 0.0)), line.get("n_nodes", 0)
    node = line.get("node")
    if at is None or weight is None or not isinstance(node, str) or not node or not isinstance(n_nodes, int):
        return None
    try:
        kind, owner = ChangeKind(str(line.get("kind"))), Owner(str(line.get("owner")))
    except ValueError:
        return None
    texts = [str(line.get(name, "")) for name in ("reason", "symptom", "run")]
    return NodeChange(at, node, kind, owner, texts[0], weight, texts[1], texts[2], n_nodes)


@dataclass(frozen=True)
class QuarantineRules:
    """When strikes put a node out, and when the breaker stops automation from taking out more."""

    half_life_s: float = 7 * 86400.0
    """A strike counts half after so long."""
    quarantine_at: float = 2.5
    """Faded strikes that put a node out: three within about four days."""
    suspect_at: float = 0.25
    """Faded strikes below which a node is healthy again."""
    max_out_frac: float = 0.1
    """Breaker: share of all nodes that may be out of service by anybody's word when automation acts..."""
    min_out: int = 1
    """...but on small clusters so many."""
    max_domains_per_hour: int = 4
    """Breaker: failure domains (racks, NVLink domains; the node where none is known) automation touches."""


DEFAULT_RULES = QuarantineRules()


@dataclass(frozen=True)
class Cluster:
    """What the breaker needs to know of the cluster."""

    n_nodes: int
    domains: Mapping[str, str] = field(default_factory=dict)
    """Failure domain by node address."""

    def domain(self, node: str) -> str:
        """The node's failure domain; the node itself where none is known."""
        return self.domains.get(node, node)

    def domain_members(self, node: str) -> frozenset[str]:
        """All nodes that share the node's failure domain: what a fault of the fabric takes with it."""
        own = self.domain(node)
        return frozenset({node, *(other for other, domain in self.domains.items() if domain == own)})


@dataclass(frozen=True)
class NodeRecord:
    """The standing of one node."""

    holds: tuple[NodeChange, ...] = ()
    """The cordons in force, one an owner at most."""
    strikes: tuple[NodeChange, ...] = ()
    repair: NodeChange | None = None
    """The repair under way."""
    retired: NodeChange | None = None

    def strikes_at(self, now: float, half_life_s: float) -> float:
        """Sum of the strikes, each faded to a half in every `half_life_s`."""
        ages_s = [max(0.0, now - struck.at) for struck in self.strikes]
        return sum(
            struck.weight * math.exp2(-age_s / half_life_s)
            for struck, age_s in zip(self.strikes, ages_s, strict=True)
        )

    def state(self, now: float, rules: QuarantineRules = DEFAULT_RULES) -> NodeState:
        """What the node is now."""
        if self.retired is not None:
            return NodeState.RETIRED
        if self.repair is not None:
            return NodeState.REPAIRING
        if self.holds:
            return NodeState.QUARANTINED
        is_suspect = self.strikes_at(now, rules.half_life_s) >= rules.suspect_at
        return NodeState.SUSPECT if is_suspect else NodeState.HEALTHY

    @property
    def in_force(self) -> NodeChange | None:
        """The change that keeps it out of service; the strongest owner's where there are several."""
        ranked = sorted(self.holds, key=lambda hold: list(Owner).index(hold.owner))
        return self.retired or self.repair or (ranked[0] if ranked else None)


@dataclass(frozen=True)
class Fleet:
    """The standing of all nodes that anything was ever said about; every other node is healthy."""

    records: Mapping[str, NodeRecord] = field(default_factory=dict)
    cordons: tuple[NodeChange, ...] = ()
    """Every cordon by automation, in order: what the breaker counts by the hour."""

    def record(self, node: str) -> NodeRecord:
        """The record of a node."""
        return self.records.get(node, NodeRecord())

    @property
    def out_of_service(self) -> frozenset[str]:
        """Nodes that no work may be placed on."""
        return frozenset(n for n, r in self.records.items() if r.state(0.0) in OUT_OF_SERVICE)


def fold(changes: Iterable[NodeChange]) -> Fleet:
    """The standing after all changes, in the order written. One that was not allowed changes nothing."""
    records: dict[str, NodeRecord] = {}
    cordons = []
    for change in changes:
        record = records.get(change.node, NodeRecord())
        if refusal(record, change) is None:
            records[change.node] = _after(record, change)
            if change.kind is ChangeKind.CORDON and change.owner is not Owner.HUMAN:
                cordons.append(change)
    return Fleet(records, tuple(cordons))


def apply_change(fleet: Fleet, change: NodeChange) -> Fleet:
    """The fleet after one more change.

    Raises:
        QuarantineError: the change is not allowed.
    """
    record = fleet.record(change.node)
    reason = refusal(record, change)
    if reason is not None:
        raise QuarantineError(reason)
    is_counted = change.kind is ChangeKind.CORDON and change.owner is not Owner.HUMAN
    return Fleet(
        {**fleet.records, change.node: _after(record, change)},
        (*fleet.cordons, change) if is_counted else fleet.cordons,
    )


_ALLOWED: Mapping[NodeState, frozenset[ChangeKind]] = {
    NodeState.HEALTHY: frozenset({ChangeKind.STRIKE, ChangeKind.CORDON, ChangeKind.RETIRED}),
    NodeState.SUSPECT: frozenset({ChangeKind.STRIKE, ChangeKind.CORDON, ChangeKind.RETIRED}),
    NodeState.QUARANTINED: frozenset(
        {
            ChangeKind.STRIKE,
            ChangeKind.CORDON,
            ChangeKind.UNCORDON,
            ChangeKind.REPAIR_BEGUN,
            ChangeKind.RETIRED,
        }
    ),
    NodeState.REPAIRING: frozenset(
        {
            ChangeKind.STRIKE,
            ChangeKind.CORDON,
            ChangeKind.REPAIR_DONE,
            ChangeKind.REPAIR_FAILED,
            ChangeKind.RETIRED,
        }
    ),
    NodeState.RETIRED: frozenset({ChangeKind.RETURNED}),
}


def refusal(record: NodeRecord, change: NodeChange) -> str | None:
    """Why a change is not allowed, as one sentence; None where it is."""
    state = record.state(change.at)
    if change.kind not in _ALLOWED[state]:
        wanted = change.kind.value.replace("_", " ")
        return f"node {change.node} is {state}: {wanted} does not apply to it"
    if change.owner is Owner.HUMAN:
        return None
    if change.kind in (ChangeKind.RETIRED, ChangeKind.RETURNED):
        return f"node {change.node}: only a human retires a node or takes it back, not the {change.owner}"
    if change.kind is ChangeKind.UNCORDON and not any(h.owner is change.owner for h in record.holds):
        owners = ", ".join(sorted(hold.owner for hold in record.holds))
        return f"node {change.node} was taken out by {owners}: the {change.owner} lifts only its own entries"
    if change.kind is ChangeKind.REPAIR_BEGUN and any(h.owner is not change.owner for h in record.holds):
        return f"node {change.node} is held by others too: the {change.owner} repairs only what it took out"
    is_end = change.kind in (ChangeKind.REPAIR_DONE, ChangeKind.REPAIR_FAILED)
    if is_end and record.repair is not None and record.repair.owner is not change.owner:
        by = record.repair.owner
        return (
            f"node {change.node} is being repaired by the {by}: it is not for the {change.owner} to end that"
        )
    return None


def _after(record: NodeRecord, change: NodeChange) -> NodeRecord:
    """The record after an allowed change."""
    others = tuple(hold for hold in record.holds if hold.owner is not change.owner)
    is_human = change.owner is Owner.HUMAN
    match change.kind:
        case ChangeKind.STRIKE:
            return replace(record, strikes=(*record.strikes, change))
        case ChangeKind.CORDON:
            return replace(record, holds=(*others, change))
        case ChangeKind.UNCORDON:
            return NodeRecord() if is_human else replace(record, holds=others)
        case ChangeKind.REPAIR_BEGUN:
            return replace(record, repair=change)
        case ChangeKind.REPAIR_DONE:
            return NodeRecord() if is_human else NodeRecord(holds=others)
        case ChangeKind.REPAIR_FAILED:
            return replace(record, repair=None)
        case ChangeKind.RETIRED:
            return replace(record, retired=change)
        case ChangeKind.RETURNED:
            return NodeRecord()


def breaker_refusal(
    fleet: Fleet,
    nodes: Collection[str],
    cluster: Cluster,
    now: float,
    rules: QuarantineRules = DEFAULT_RULES,
) -> str | None:
    """Why automation may not take these nodes out now, with both numbers; None where it may.

    A detector that is wrong blames node after node: past these limits a human has to look.
    """
    retired = {n for n, record in fleet.records.items() if record.retired is not None}
    out = fleet.out_of_service - retired
    wanted = out | set(nodes)
    if wanted - out and len(wanted) >= cluster.n_nodes:
        return f"breaker: none of {cluster.n_nodes} nodes would be left in service"
    limit = max(rules.min_out, int(rules.max_out_frac * cluster.n_nodes))
    if wanted - out and len(wanted) > limit:
        return (
            f"breaker: {len(wanted)} of {cluster.n_nodes} nodes would be out of service, more than {limit}; "
            "look why, then lift what is wrong with packtrain nodes uncordon"
        )
    recent = {cluster.domain(c.node) for c in fleet.cordons if now - 3600.0 < c.at <= now}
    domains = recent | {cluster.domain(node) for node in wanted - out}
    if domains - recent and len(domains) > rules.max_domains_per_hour:
        return (
            f"breaker: {len(domains)} nodes or racks would be taken out by automation within an hour, more "
            f"than {rules.max_domains_per_hour}; look why before more go"
        )
    return None


def strike(
    fleet: Fleet, change: NodeChange, cluster: Cluster, rules: QuarantineRules = DEFAULT_RULES
) -> tuple[list[NodeChange], str | None]:
    """What a strike leads to: the strike itself, and a cordon where the strikes are too many by now.

    Args:
        fleet: the standing before it.
        change: the strike; it counts at its own instant.
        cluster: for the breaker.
        rules: the limits.

    Returns:
        The changes to write down, in order, and the breaker's refusal where it kept the node in service.
    """
    record = fleet.record(change.node)
    if record.state(change.at) is NodeState.RETIRED:
        return [], None
    struck = _after(record, change)
    strikes = struck.strikes_at(change.at, rules.half_life_s)
    if strikes < rules.quarantine_at or any(hold.owner is change.owner for hold in record.holds):
        return [change], None
    refused = breaker_refusal(fleet, [change.node], cluster, change.at, rules)
    if refused is not None:
        return [change], refused
    text = f"{strikes:.1f} strikes, {rules.quarantine_at:g} put a node out; the last: {change.reason}"
    return [change, replace(change, kind=ChangeKind.CORDON, reason=text, weight=0.0)], None


def selector_text(values: Iterable[str]) -> str | None:
    """The value of a Ray label selector that keeps off all of `values`; None where there are none."""
    listed = ",".join(sorted(set(values)))
    return f"!in({listed})" if listed else None


def label_selector(out_of_service: Collection[str], addresses: Mapping[str, str]) -> dict[str, str]:
    """A Ray label selector that keeps off nodes; empty where none of the live nodes is one of them.

    Args:
        out_of_service: node addresses.
        addresses: node address by Ray node id. An id is of one raylet: it changes when a node comes back.
    """
    text = selector_text(node_id for node_id, address in addresses.items() if address in out_of_service)
    return {NODE_ID_LABEL: text} if text else {}
