"""What the ranks of a lesson bring back, and whether together they equal one process. Pure; no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

LIMIT: Final = 1e-6
"""Relative: norm of the difference over the norm of what one process has."""


@dataclass(frozen=True)
class Finding:
    """One piece against the same box of one process."""

    name: str
    box: tuple[tuple[int, int], ...]
    """Begin and end along each dimension."""
    n_whole: int
    """Elements of the whole."""
    difference: float


@dataclass(frozen=True)
class Verdict:
    """All ranks' findings together."""

    worst: float
    worst_name: str
    missing: tuple[str, ...]
    """Results of which the ranks together have not shown every element."""

    @property
    def ok(self) -> bool:
        """Equal to one process."""
        return self.worst <= LIMIT and not self.missing


@dataclass(frozen=True)
class RankReport:
    """What one rank brings back."""

    findings: tuple[Finding, ...]
    said: tuple[tuple[str, str], ...]
    """See Tell.send."""


def judge(ranks: Iterable[Iterable[Finding]]) -> Verdict:
    """The worst of all ranks' findings, and what they left out."""
    every = [finding for rank in ranks for finding in rank]
    worst = max(every, key=lambda finding: finding.difference)
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for finding in every:
        boxes.setdefault(finding.name, set()).add(finding.box)
    shown = {
        name: sum(prod(end - begin for begin, end in box) for box in seen) for name, seen in boxes.items()
    }
    missing = {finding.name for finding in every if shown[finding.name] != finding.n_whole}
    return Verdict(worst.difference, worst.name, tuple(sorted(missing)))
