"""A hang's verdict from the flight recorder dumps of its ranks: who is behind, and how sure that is.

Does not read dumps (flight_dump.py), compares nothing itself (flight_compare.py) and collects none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.diagnosis.flight_compare import Comparison, compare
from ops.diagnosis.flight_dump import read_dump
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role, Verdict
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

CONFIDENCE = {"sequence": 0.9, "run_ahead": 0.6, "state": 0.7, "no_dump": 0.6}
"""By what the culprits rest on. A missing dump can also be a lost file."""


def ranks_entity(ranks: Sequence[int]) -> Entity:
    """The entity of one or more ranks; several are joined with commas."""
    return Entity(EntityKind.RANK, ",".join(str(r) for r in ranks)) if ranks else UNKNOWN_ENTITY


def verdict_of(comparison: Comparison) -> Verdict:
    """The verdict that a comparison amounts to; a hang of unknown culprit where nobody is behind."""
    c = comparison
    if c.mismatch is not None:
        return Verdict(
            FailureClass.USER_CODE,
            Role.ROOT,
            ranks_entity(c.mismatch.ranks) if c.mismatch.ranks else Entity(EntityKind.JOB, ""),
            "STOP",
            0.85,
            c.mismatch.text,
            "hang",
            "The ranks of a group must call the same collectives in one order, with equal sizes and types.",
            "flight_recorder_mismatch",
        )
    if c.deadlock:
        return Verdict(
            FailureClass.USER_CODE,
            Role.ROOT,
            Entity(EntityKind.JOB, ""),
            "STOP",
            0.7,
            f"ranks {list(c.deadlock)} wait for one another: " + "; ".join(map(str, c.groups[:3])),
            "hang",
            "These ranks call the collectives of two groups in different orders.",
            "flight_recorder_deadlock",
        )
    if not c.culprits:
        even = "all ranks have called the same collectives"
        text = even if c.n_pending else "no operation is open on any rank"
        return Verdict(
            FailureClass.HANG if c.n_pending else FailureClass.UNKNOWN,
            Role.AMBIGUOUS,
            UNKNOWN_ENTITY,
            "RESTART_RANKS" if c.n_pending else "OBSERVE",
            0.4 if c.n_pending else 0.2,
            "; ".join([text, *map(str, c.groups[:1])]),
            "hang",
            "Nobody is behind: look at the network between the ranks of this group." if c.n_pending else "",
            "flight_recorder_even",
        )
    n_ranks = len({r for g in c.groups for r in g.last_seq} | set(c.culprits))
    is_most = len(c.culprits) * 2 > n_ranks
    is_sure = c.n_pending > 0 and (c.sees_p2p or len(c.culprits) == 1)
    confidence = CONFIDENCE[c.basis] if is_sure else 0.5
    missing = f"; no dump of ranks {list(c.missing)}" if c.missing else ""
    return Verdict(
        FailureClass.HANG,
        Role.AMBIGUOUS if is_most else Role.ROOT,
        ranks_entity(c.culprits),
        "RESTART_RANKS",
        0.4 if is_most else confidence,
        f"ranks {list(c.culprits)} hold up the others: {'; '.join(map(str, c.groups[:2]))}{missing}",
        "hang",
        "Look at the stacks of these ranks first; the others only wait.",
        f"flight_recorder_{c.basis}",
    )


def diagnose_dumps(
    paths: Sequence[Path],
    groups: Mapping[str, Sequence[int]] | None = None,
    world_size: int | None = None,
) -> Verdict:
    """The verdict over the dumps in `paths`; the ranks are in the files' names. See compare().

    Raises:
        ValueError: no files, a file that is no dump (DumpError), or two of one rank.
    """
    return verdict_of(compare([read_dump(p) for p in paths], groups, world_size))
