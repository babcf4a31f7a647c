"""From all the evidence of a log to one verdict: the first abort wins, roots before those who felt them.

    root (specific)  >  confirmation  >  root that victims print too  >  ambiguous  >  cascade  >  benign

Among equals the first in time wins: by the clock where all of them print one, by the order of the log
otherwise. A confirmation (the kernel's own word of a memory kill) names the class of what was ambiguous, and
makes a root of its own class sure. What training survived, by the steps printed after it, is no cause. Pure;
reads no files.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from ops.diagnosis.pattern import Registry
from ops.diagnosis.text_classifier import ROOT_WEIGHT, Finding, find_all
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role, Verdict
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

NOTHING: Final = Verdict(FailureClass.UNKNOWN, Role.AMBIGUOUS, UNKNOWN_ENTITY, "OBSERVE", 0.0, "", "unknown")
"""No line is evidence of anything."""

_PROGRESS: Final = re.compile(
    r"(?i)\b(?:global[_ ]?step|step|iter(?:ation)?)\b[\s:=\[#'\"]{0,4}(\d+).{0,200}\bloss\b"
    r"|\bloss\b.{0,120}\b(?:global[_ ]?step|step|iter(?:ation)?)\b[\s:=\[#'\"]{0,4}(\d+)"
)
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
    return weigh(in_window(find_all(split, registry, origin), progress_lines(split)))


def progress_lines(lines: Iterable[str]) -> list[int]:
    """Numbers (from 1) of the lines that tell of one more step with its loss."""
    found: list[int] = []
    newest = -1
    for number, line in enumerate(lines, start=1):
        if "oss" in line and (match := _PROGRESS.search(line)) is not None:
            step = int(next(group for group in match.groups() if group))
            if step > newest:
                newest = step
                found.append(number)
    return found


def in_window(found: list[Finding], progress: Sequence[int]) -> list[Finding]:
    """The findings since training last went on: what it survived did not end it.

    One step of slack, because the lines of ranks and processes mix. All findings, where no root is in the
    window: a disk that was filling up long before may still be why the last line is a victim's.
    """
    begin = progress[-2] if len(progress) > 1 else 0
    recent = [f for f in found if f.line.number > begin]
    return recent if any(f.weight >= ROOT_WEIGHT for f in recent) else found


def weigh(found: Sequence[Finding]) -> Verdict:
    """One verdict from all findings of a log, in the log's order."""
    if not found:
        return NOTHING
    heaviest = max(f.weight for f in found)
    verdict = _first([f for f in found if f.weight == heaviest])
    if verdict.role is Role.CONFIRMATION:
        hint = next((f.verdict.culprit for f in found if f.verdict.failure_class in _KILLS), UNKNOWN_ENTITY)
        culprit = hint if verdict.culprit == UNKNOWN_ENTITY else verdict.culprit
        return replace(verdict, role=Role.ROOT, culprit=culprit)
    confirmed = {f.verdict.failure_class for f in found if f.verdict.role is Role.CONFIRMATION}
    if verdict.failure_class in confirmed:
        return replace(verdict, role=Role.ROOT, confidence=max(verdict.confidence, SURE))
    return verdict


_KILLS: Final = frozenset({FailureClass.WORKER_KILLED, FailureClass.HOST_OUT_OF_MEMORY})
_UNNAMED: Final = (EntityKind.UNKNOWN, EntityKind.JOB)


def _first(equals: Sequence[Finding]) -> Verdict:
    """The first in time that names a class; with the culprit of a later one of its class if it has none."""
    clocked = all(f.line.at for f in equals)
    in_order = sorted(equals, key=lambda f: f.line.at) if clocked else list(equals)
    first = next((f for f in in_order if f.is_known), in_order[0]).verdict
    if first.culprit.kind in _UNNAMED:
        same = [f.verdict for f in in_order if f.verdict.failure_class is first.failure_class]
        culprit = next((v.culprit for v in same if v.culprit.kind not in _UNNAMED), first.culprit)
        return replace(first, culprit=culprit)
    return first
