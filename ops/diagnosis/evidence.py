"""From all the evidence of a log to one verdict: the first abort wins, roots before those who felt them.

    root (specific)  >  confirmation  >  root that victims print too  >  ambiguous  >  cascade  >  benign

Among equals the first in time wins: by the clock where all of them print one, by the order of the log
otherwise. A confirmation (the kernel's own word of a memory kill) names the class of what was ambiguous, and
makes a root of its own class sure. Pure; reads no files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from ops.diagnosis.pattern import Registry, shipped_registry
from ops.diagnosis.text_classifier import Finding, find_all
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role, Verdict
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

NOTHING: Final = Verdict(FailureClass.UNKNOWN, Role.AMBIGUOUS, UNKNOWN_ENTITY, "OBSERVE", 0.0, "", "unknown")
"""No line is evidence of anything."""

SURE: Final = 0.98
"""Confidence of a root that a confirmation of the same class bears out."""


def classify_line(line: str, registry: Registry | None = None, origin: Entity = UNKNOWN_ENTITY) -> Verdict:
    """What one line says by itself; `NOTHING` for a line that is evidence of nothing."""
    return diagnose_log([line], registry, origin)


def diagnose_log(
    lines: Iterable[str], registry: Registry | None = None, origin: Entity = UNKNOWN_ENTITY
) -> Verdict:
    """What a log says went wrong.

    Args:
        lines: of one log, or of several in one order.
        registry: rows that hold; by default those that come with Packtrain.
        origin: whose log it is, where that is known.
    """
    split = [part for line in lines for part in line.rstrip("\n").split("\n")]
    return weigh(find_all(split, registry or shipped_registry(), origin))


def weigh(found: Sequence[Finding]) -> Verdict:
    """One verdict from all findings of a log, in the log's order."""
    best = _first([f for f in found if f.weight == max(g.weight for g in found)]) if found else None
    if best is None:
        return NOTHING
    verdict = best.verdict
    if verdict.role is Role.CONFIRMATION:
        verdict = replace(verdict, role=Role.ROOT)
        if verdict.culprit == UNKNOWN_ENTITY:
            hints = [f for f in found if f.role is Role.AMBIGUOUS and f.failure_class in _KILLS]
            return replace(verdict, culprit=hints[0].culprit) if hints else verdict
        return verdict
    if any(f.role is Role.CONFIRMATION and f.failure_class is verdict.failure_class for f in found):
        return replace(verdict, role=Role.ROOT, confidence=max(verdict.confidence, SURE))
    return verdict


_KILLS: Final = frozenset({FailureClass.WORKER_KILLED, FailureClass.HOST_OUT_OF_MEMORY})


def _first(equals: Sequence[Finding]) -> Finding:
    """The first in time. One that names its culprit is preferred within the same class."""
    clocked = all(f.line.at for f in equals)
    first = min(equals, key=lambda f: f.line.at) if clocked else equals[0]
    if first.failure_class is FailureClass.UNKNOWN:
        first = next((f for f in equals if f.failure_class is not FailureClass.UNKNOWN), first)
    if first.culprit.kind in (EntityKind.UNKNOWN, EntityKind.JOB):
        same = (f for f in equals if f.failure_class is first.failure_class)
        named = next((f for f in same if f.culprit.kind not in (EntityKind.UNKNOWN, EntityKind.JOB)), None)
        if named is not None:
            return replace(first, culprit=named.culprit)
    return first
