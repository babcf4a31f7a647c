"""Who made the ranks hang: the verdict of their black boxes, sharpened by what they were found in. Pure.

    a rank stopped by a signal  >  one rank by the boxes  >  an error of the program by the flight recorders
       >  the ranks that the flight recorders call behind  >  those of the boxes

The boxes know how far each rank is; the flight recorders know who waits for whom, also across groups.
"""

from collections.abc import Mapping, Sequence

from ops.diagnosis.verdict import Role, Verdict
from ops.incident import FailureClass, Incident
from ops.monitors.collective_hang import NAME, Hang
from ops.signal import Entity, EntityKind

ENOUGH = 0.5
"""Confidence below which a verdict of the flight recorders decides nothing."""
PROGRAM_ERRORS = frozenset({"flight_recorder_mismatch", "flight_recorder_deadlock"})


def hang_incident(
    hang: Hang,
    stopped: Sequence[int],
    recorders: Verdict | None,
    stacks: Mapping[int, str],
    node_of: Mapping[int, str],
) -> Incident:
    """The incident behind a hang.

    Args:
        hang: what the black boxes say.
        stopped: ranks whose process is stopped by a signal.
        recorders: what the flight recorders say; None where there are none.
        stacks: by rank, as text.
        node_of: address of each rank's node.
    """
    ranks, why = _culprits(hang, stopped, recorders)
    is_error = bool(recorders and not stopped and recorders.pattern in PROGRAM_ERRORS)
    nodes = sorted({node_of[rank] for rank in ranks if rank in node_of})
    entity: Entity | None = None
    if len(ranks) == 1 and nodes:
        entity = Entity(EntityKind.RANK, str(ranks[0]), nodes[0])
    elif len(nodes) == 1 and len(set(node_of.values())) > 1:
        entity = Entity(EntityKind.NODE, nodes[0])
    parts = [hang.reason, why, *(stacks[rank] for rank in ranks[:1] if rank in stacks)]
    return Incident(
        failure_class=FailureClass.USER_CODE if is_error else FailureClass.HANG,
        culprit=_named(ranks, nodes),
        evidence="\n".join(part for part in parts if part),
        step=max(0, hang.step),
        failed_at=hang.since,
        detected_at=hang.at,
        entity=entity,
        symptom=f"hang in {hang.phase.name.lower()}",
        detector=NAME,
    )


def _culprits(hang: Hang, stopped: Sequence[int], recorders: Verdict | None) -> tuple[tuple[int, ...], str]:
    """The ranks blamed, and in words why where the boxes do not say it."""
    if stopped:
        named = ", ".join(map(str, stopped))
        return tuple(sorted(stopped)), f"stopped by a signal (process state T): rank {named}"
    if recorders is not None and recorders.pattern in PROGRAM_ERRORS:
        return _ranks_of(recorders), recorders.evidence
    if len(hang.culprits) == 1 or recorders is None:
        return hang.culprits, ""
    behind = _ranks_of(recorders) if recorders.role is Role.ROOT and recorders.confidence >= ENOUGH else ()
    both = tuple(rank for rank in behind if rank in hang.culprits)
    if both or (behind and not hang.culprits):
        return both or behind, recorders.evidence
    return hang.culprits, recorders.evidence


def _ranks_of(verdict: Verdict) -> tuple[int, ...]:
    is_ranks = verdict.culprit.kind is EntityKind.RANK
    return tuple(int(name) for name in verdict.culprit.name.split(",")) if is_ranks else ()


def _named(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    if not ranks:
        return "unknown"
    what = "rank" if len(ranks) == 1 else "ranks"
    return f"{what} {', '.join(map(str, ranks))}" + (f" (node {', '.join(nodes)})" if nodes else "")
