"""The outcome of a diagnosis: class, role, culprit, suggested action, with the line that it rests on.

Pure values. How a verdict is reached is in the other files of this room; what is done about it is the
policy's.
"""

from dataclasses import dataclass
from enum import StrEnum

from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

UNKNOWN_ENTITY = Entity(EntityKind.UNKNOWN, "")
"""Nobody is blamed: the evidence does not say who."""


class Role(StrEnum):
    """What a piece of evidence says about a failure."""

    ROOT = "root"
    """Can be where it began."""
    CASCADE = "cascade"
    """Printed by a victim: something else came first."""
    CONFIRMATION = "confirmation"
    """Comes after the fact, from somebody who saw the cause (the kernel, slurmstepd): settles the class."""
    AMBIGUOUS = "ambiguous"
    """Several causes print this; by itself it is a hint only."""
    BENIGN = "benign"
    """Looks bad and is not."""


@dataclass(frozen=True)
class Verdict:
    """What a text, a log or a set of dumps says went wrong."""

    failure_class: FailureClass
    role: Role
    culprit: Entity
    action: str
    """Suggested, as named by ops.decision.Action; the policy decides."""
    confidence: float
    """0..1. Below 0.5 nothing is to be done on the strength of this verdict alone."""
    evidence: str
    """The quoted line that it rests on; empty where there is none."""
    runbook: str
    """Name of the runbook page (ops/runbooks/<name>.md)."""
    advice: str = ""
    """One sentence for a person: what to look at or change."""
    pattern: str = ""
    """Id of the rule that matched; empty where no rule did."""
