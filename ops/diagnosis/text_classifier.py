"""What the lines of a log are evidence of, by the registry of patterns.

A line is matched without its prefixes, and never where it only talks about a failure: source quoted in a
traceback, comments, dumps of arguments, "if ... happens", and the sentences that libraries add to any error.
Lines of a kernel in it are read by kernel_log.py. Weighs nothing against anything but within one line:
evidence.py does.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ops.diagnosis.kernel_log import diagnose_kernel_log
from ops.diagnosis.log_lines import LogLine, split_log
from ops.diagnosis.pattern import SUGGESTED_ACTION, Pattern, Registry, shipped_registry
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role, Verdict
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind

MAX_EVIDENCE_CHARS: Final = 500
ROOT_WEIGHT: Final = 3
"""A finding that weighs as much or more can be where it began."""
HINT: Final = 0.3
"""An ambiguous line below this confidence weighs no more than what a victim prints."""
OPEN: Final = frozenset({"runtime-error", "some-value-error"})
"""Rows whose exception anybody raises: the program's own if its own code is where the traceback ends."""
_VARYING: Final = re.compile(r"\[\d+\]|\bpid[ =:]\d+|\b\d{4}-\d\d-\d\d\S*")
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
_LIBRARY_FRAMES: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<")
_LOAD_FRAMES: Final = re.compile(r"(?:torch[/\\]serialization|torch[/\\]_weights_only_unpickler)\.py:\w*load")
"""Whatever goes wrong inside of torch.load does so because of what is in the file."""
_CHECKPOINT_FRAMES: Final = re.compile(
    r"torch[/\\]serialization|distributed[/\\]checkpoint|safetensors|[/\\]checkpoint"
)


@dataclass(frozen=True)
class Finding:
    """One line that is evidence, and what follows from it alone."""

    line: LogLine
    verdict: Verdict
    yields: bool = False
    """A root that victims of another one print too."""

    @property
    def weight(self) -> int:
        """How much it counts against other evidence of the same log: roots, confirmations, the rest."""
        role = self.verdict.role
        if role is Role.ROOT:
            return ROOT_WEIGHT if self.yields else 5
        if role is Role.AMBIGUOUS and self.verdict.confidence < HINT:
            return 1
        return {Role.CONFIRMATION: 4, Role.AMBIGUOUS: 2, Role.CASCADE: 1}.get(role, 0)

    @property
    def is_known(self) -> bool:
        """It names a class."""
        return self.verdict.failure_class is not FailureClass.UNKNOWN


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
    told = [line for line in split_log(lines) if tells(line)]
    found = [finding for line in told if (finding := find_in(line, rows, origin)) is not None]
    found = _with_repeats(found, rows)
    changed = {f.verdict.pattern for f in found if rows.repeated(f.verdict.pattern)}
    kernel = [
        f
        for f in _kernel_findings(told, origin)
        if not (changed and f.verdict.pattern.startswith("segfault"))
    ]
    by_kernel = {f.line.number for f in kernel}
    texts = [f for f in found if f.verdict.pattern in changed or f.line.number not in by_kernel]
    return sorted([*texts, *kernel], key=lambda f: f.line.number)


def tells(line: LogLine) -> bool:
    """The line says that something happened: it is no source, comment, dump of arguments or debug output."""
    if line.is_code or line.level in ("DEBUG", "TRACE") or not line.body.strip():
        return False
    return _TALK.match(line.body) is None


def find_in(line: LogLine, registry: Registry, origin: Entity = UNKNOWN_ENTITY) -> Finding | None:
    """What one line is evidence of; None for most lines."""
    text = registry.without_ignored(line.body).strip()
    best: Finding | None = None
    best_order = (False, 0, False)
    for pattern in registry.candidates(text):
        match = pattern.regex.search(text)
        if match is None or _CONDITION.search(text, 0, match.start()):
            continue
        finding = Finding(line, _verdict(line, text, pattern, match, origin), pattern.yields)
        if pattern.role is Role.BENIGN:
            return finding
        order = (not pattern.general, finding.weight, finding.is_known)
        if best is None or order > best_order:
            best, best_order = finding, order
    return best and _by_frames(best, is_general=not best_order[0])


def _verdict(line: LogLine, text: str, pattern: Pattern, match: re.Match[str], origin: Entity) -> Verdict:
    return Verdict(
        failure_class=pattern.failure_class,
        role=pattern.role,
        culprit=_culprit(line, text, pattern, match, origin),
        action=pattern.action,
        confidence=pattern.confidence,
        evidence=line.raw.strip()[:MAX_EVIDENCE_CHARS],
        runbook=pattern.runbook,
        advice=pattern.advice,
        pattern=pattern.id,
    )


def _culprit(line: LogLine, text: str, pattern: Pattern, match: re.Match[str], origin: Entity) -> Entity:
    """Who is to blame: named by the pattern, else by the kind that it blames, else whose log it is."""
    for name, value in match.groupdict().items():
        kind_name = name.rstrip("0123456789")
        if value and kind_name in _KINDS:
            return Entity(EntityKind(kind_name), value, "" if kind_name == EntityKind.NODE else line.node)
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


def _reclassed(verdict: Verdict, failure_class: FailureClass, role: Role, confidence: float) -> Verdict:
    return replace(
        verdict,
        failure_class=failure_class,
        role=role,
        confidence=confidence,
        action=SUGGESTED_ACTION[failure_class],
        runbook=failure_class.value,
    )


def _by_frames(finding: Finding, *, is_general: bool) -> Finding:
    """An exception that says little takes its class from where its traceback ends."""
    files = finding.line.frames
    if not files or (finding.weight > ROOT_WEIGHT and not is_general):
        return finding
    verdict = finding.verdict
    if is_general and _LOAD_FRAMES.search(files[-1]):
        return replace(finding, verdict=_reclassed(verdict, FailureClass.CORRUPT_CHECKPOINT, Role.ROOT, 0.7))
    if any(_TRACKER_FRAMES.search(file) for file in files[-3:]):
        verdict = _reclassed(verdict, FailureClass.TRACKING, Role.ROOT, 0.7)
        return replace(finding, verdict=verdict, yields=True)
    if not is_general:
        return finding
    if any(_CHECKPOINT_FRAMES.search(file) for file in files[-3:]):
        return replace(finding, verdict=_reclassed(verdict, FailureClass.UNKNOWN, Role.AMBIGUOUS, 0.4))
    if verdict.pattern in OPEN and not _LIBRARY_FRAMES.search(files[-1]):
        verdict = _reclassed(verdict, FailureClass.USER_CODE, Role.ROOT, 0.6)
        return replace(finding, verdict=verdict, yields=True)
    return finding


def _with_repeats(found: Sequence[Finding], registry: Registry) -> list[Finding]:
    """Findings of rows that change when the same text comes again, changed."""
    keys = [(f.verdict.pattern, _VARYING.sub("", f.line.body)) for f in found]
    result: list[Finding] = []
    for finding, key in zip(found, keys, strict=True):
        again = registry.repeated(finding.verdict.pattern)
        if again is not None and keys.count(key) >= again.times:
            finding = replace(
                finding, verdict=_reclassed(finding.verdict, again.failure_class, again.role, 0.6)
            )
        result.append(finding)
    return result


def _kernel_findings(lines: Sequence[LogLine], origin: Entity) -> list[Finding]:
    """What the lines of a kernel among them say, each group of lines at its first."""
    node = origin.name if origin.kind is EntityKind.NODE else ""
    places: dict[str, LogLine] = {}
    for line in lines:
        places.setdefault(line.raw.rstrip(), line)
    found: list[Finding] = []
    for verdict in diagnose_kernel_log([line.raw for line in lines], node):
        texts = [text for text in places if verdict.evidence.startswith(text)]
        line = places[max(texts, key=len)]
        found.append(Finding(line, _of_nobody(verdict)))
    return found


def _of_nobody(verdict: Verdict) -> Verdict:
    """A program is suspected only where the driver names a process; ambiguous is never sure."""
    if verdict.role is not Role.AMBIGUOUS:
        return verdict
    if verdict.failure_class is FailureClass.USER_CODE and "pid='<unknown>'" in verdict.evidence:
        return replace(verdict, failure_class=FailureClass.UNKNOWN, confidence=0.4)
    return replace(verdict, confidence=min(verdict.confidence, 0.45))
