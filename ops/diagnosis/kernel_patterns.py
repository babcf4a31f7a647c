"""The table of kernel messages other than Xids, kernel_patterns.yaml. Applies nothing (kernel_log.py)."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from ops.diagnosis.verdict import Role
from ops.incident import FailureClass
from ops.signal import EntityKind

PATTERNS_PATH = Path(__file__).with_name("kernel_patterns.yaml")


@dataclass(frozen=True)
class KernelPattern:
    """One kind of kernel message; the YAML file says what its columns mean."""

    id: str
    failure_class: FailureClass
    role: Role
    action: str
    confidence: float
    blames: EntityKind
    needs: tuple[str, ...]
    regex: re.Pattern[str]
    source: str
    advice: str


def match_pattern(text: str) -> tuple[KernelPattern, re.Match[str]] | None:
    """The first row that matches a line's text, with its match."""
    for pattern in kernel_patterns():
        if any(need in text for need in pattern.needs) and (match := pattern.regex.search(text)):
            return pattern, match
    return None


@cache
def kernel_patterns() -> tuple[KernelPattern, ...]:
    """The rows, in the order in which they are to be tried."""
    # The C loader takes 5 ms where the Python one takes 60; without libyaml there is only the other.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree = yaml.load(PATTERNS_PATH.read_text(encoding="ascii"), Loader=loader)
    return tuple(
        KernelPattern(
            id=row["id"],
            failure_class=FailureClass(row["class"]),
            role=Role(row["role"]),
            action=row["action"],
            confidence=row["confidence"],
            blames=EntityKind(row["blames"]),
            needs=tuple(row["needs"]),
            regex=re.compile(row["regex"]),
            source=row["source"],
            advice=row.get("advice", ""),
        )
        for row in tree["patterns"]
    )
