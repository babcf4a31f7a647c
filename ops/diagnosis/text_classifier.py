"""What the lines of a log are evidence of, by the registry of patterns.

A line is matched without its prefixes, and never where it only talks about a failure: source quoted in a
traceback, comments, dumps of arguments, "if ... happens", and the sentences that libraries add to any error.
Weighs nothing against anything but within one line: evidence.py does.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ops.diagnosis.log_lines import LogLine, split_log
from ops.diagnosis.pattern import Pattern, Registry, shipped_registry
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role, Verdict
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

MAX_EVIDENCE_CHARS: Final = 500
HINT: Final = 0.3
"""An ambiguous line below this confidence weighs no more than what a victim prints."""
_KINDS: Final = frozenset(kind.value for kind in EntityKind)

_TALK: Final = re.compile(
    r"^\s*(?:#|//|/\*|\* |>>> )|^\s*(?:\w*(?:Namespace|Arguments|Config|Args|Options)\(|--\w|\$ |\+ \w)"
    r"|^\s*(?:args|arguments|config|flags|hparams|command|cmd|argv|options|env)\b ?[:=]",
    re.IGNORECASE,
)
"""Comments, commands and dumps of what a job was told."""

_CONDITION: Final = re.compile(
    r"\b(?:(?:if|whenever|unless|in case(?: of)?|hand(?:les?|ling) (?:of|for)?|handler for|checks? for|"
    r"to (?:avoid|prevent|detect|handle|catch|debug|fix|simulate|reproduce|test|survive|recover from)|"
    r"(?:watch|monitor|check|look|scan|grep)(?:e?s|n?ing|er)? for|retry(?:ing|ies)? on|alert(?:s|ing)? on|"
    r"simulat\w+|inject\w*|ignor(?:e|es|ing)|such as|e\.g\.|for example|no longer|without|rules? for|"
    r"protects? (?:against|from)|tolerat\w+|enabl\w+|disabl\w+|register\w*)\b[^.:;!]*|"
    r"(?:no|not|never) (?:\w+ )?)$",
    re.IGNORECASE,
)
"""Words before a match that make it something that has not happened."""

_QUOTED_PATH: Final = re.compile(r"['\"](/[^'\"]+)['\"]|(?:^|[\s=:])(/(?:[\w.+-]+/)+[\w.+-]*)")
_GPU: Final = re.compile(
    r"\bGPU[ -]?(\d{1,2})\b|\b(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)"
)
_TRACKER_FRAMES: Final = re.compile(r"[/\\](?:mlflow|wandb|comet_ml|neptune|clearml|aim)[/\\]")
_CHECKPOINT_FRAMES: Final = re.compile(
    r"torch[/\\]serialization|distributed[/\\]checkpoint|safetensors|[/\\]checkpoint"
)


@dataclass(frozen=True)
class Finding:
    """One line that is evidence, by one pattern."""

    line: LogLine
    pattern: Pattern
    culprit: Entity
    failure_class: FailureClass
    role: Role
    confidence: float

    @property
    def weight(self) -> int:
        """How much it counts against other evidence of the same log: roots, confirmations, the rest."""
        if self.role is Role.ROOT:
            return 3 if self.pattern.yields else 5
        if self.role is Role.AMBIGUOUS and self.confidence < HINT:
            return 1
        return {Role.CONFIRMATION: 4, Role.AMBIGUOUS: 2, Role.CASCADE: 1}.get(self.role, 0)

    @property
    def verdict(self) -> Verdict:
        """What follows from this line alone."""
        pattern = self.pattern
        same = self.failure_class is pattern.failure_class
        return Verdict(
            failure_class=self.failure_class,
            role=self.role,
            culprit=self.culprit,
            action=pattern.action,
            confidence=self.confidence,
            evidence=self.line.raw.strip()[:MAX_EVIDENCE_CHARS],
            runbook=pattern.runbook if same else self.failure_class.value,
            advice=pattern.advice,
            pattern=pattern.id,
        )


def find_all(
    lines: Iterable[str], registry: Registry | None = None, origin: Entity = UNKNOWN_ENTITY
) -> list[Finding]:
    """Every line of a log that is evidence, in the order of the log.

    Args:
        lines: of one log, in its order.
        registry: rows that hold; by default those that come with Packtrain.
        origin: whose log it is, where that is known: blamed where a line names nobody.
    """
    rows = registry or shipped_registry()
    found = [finding for line in split_log(lines) if (finding := find_in(line, rows, origin)) is not None]
    return _with_repeats(found)


def find_in(line: LogLine, registry: Registry, origin: Entity = UNKNOWN_ENTITY) -> Finding | None:
    """What one line is evidence of; None for most lines."""
    if line.is_code or line.level in ("DEBUG", "TRACE") or not line.body.strip() or _TALK.match(line.body):
        return None
    text = registry.without_ignored(line.body).strip()
    lower = text.lower()
    best: Finding | None = None
    for pattern in registry.patterns:
        if pattern.needs and pattern.needs not in lower:
            continue
        match = pattern.regex.search(text)
        if match is None or _CONDITION.search(text, 0, match.start()):
            continue
        finding = _finding(line, text, pattern, match, origin)
        if finding.role is Role.BENIGN:
            return finding
        if best is None or _order(finding) > _order(best):
            best = finding
    return best and _by_frames(best)


def _order(finding: Finding) -> tuple[int, bool]:
    return finding.weight, finding.failure_class is not FailureClass.UNKNOWN


def _finding(line: LogLine, text: str, pattern: Pattern, match: re.Match[str], origin: Entity) -> Finding:
    culprit = _culprit(line, text, pattern, match, origin)
    return Finding(line, pattern, culprit, pattern.failure_class, pattern.role, pattern.confidence)


def _culprit(line: LogLine, text: str, pattern: Pattern, match: re.Match[str], origin: Entity) -> Entity:
    """Who is to blame: named by the pattern, else by the kind that it blames, else whose log it is."""
    for name, value in match.groupdict().items():
        kind = name.rstrip("0123456789")
        if value and kind in _KINDS:
            node = line.node if kind != EntityKind.NODE else ""
            return Entity(EntityKind(kind), value, node)
    kind = pattern.blames
    if kind is EntityKind.JOB:
        return Entity(EntityKind.JOB, "")
    if kind is EntityKind.STORAGE and (path := _QUOTED_PATH.search(text)) is not None:
        return Entity(EntityKind.STORAGE, path[1] or path[2], line.node)
    if kind is EntityKind.GPU and (gpu := _GPU.search(text)) is not None:
        return Entity(EntityKind.GPU, gpu[1] or gpu[2], line.node)
    if kind in (EntityKind.NODE, EntityKind.GPU, EntityKind.STORAGE) and line.node:
        return Entity(EntityKind.NODE, line.node)
    if kind in (EntityKind.RANK, EntityKind.GPU) and line.rank:
        return Entity(EntityKind.RANK, line.rank, line.node)
    return origin if kind is not EntityKind.UNKNOWN else UNKNOWN_ENTITY


def _by_frames(finding: Finding) -> Finding:
    """A general exception takes its class from the library whose frames its traceback ends in."""
    last = finding.line.frames[-3:]
    if not last or finding.weight > 3:
        return finding
    if any(_TRACKER_FRAMES.search(file) for file in last):
        return replace(finding, failure_class=FailureClass.TRACKING, role=Role.ROOT, confidence=0.7)
    if finding.pattern.id.startswith("exception-of") and any(_CHECKPOINT_FRAMES.search(f) for f in last):
        return replace(finding, failure_class=FailureClass.UNKNOWN, role=Role.AMBIGUOUS, confidence=0.4)
    return finding


_VARYING: Final = re.compile(r"\[\d+\]|\bpid[ =:]\d+")


def _with_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Findings of rows that change when the same text comes again, changed."""
    counts: dict[tuple[str, str], int] = {}
    for finding in found:
        if finding.pattern.repeated is not None:
            key = (finding.pattern.id, _VARYING.sub("", finding.line.body))
            counts[key] = counts.get(key, 0) + 1
    result: list[Finding] = []
    for finding in found:
        again = finding.pattern.repeated
        key = (finding.pattern.id, _VARYING.sub("", finding.line.body))
        if again is not None and counts.get(key, 0) >= again.times:
            finding = replace(finding, failure_class=again.failure_class, role=again.role, confidence=0.6)
        result.append(finding)
    return result
