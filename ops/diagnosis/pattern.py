"""The registry of failure patterns: rows of YAML in patterns/, and an operator's rows over them.

Holds what a row is and how rows are read and merged. What they say is data; what a match means for a whole
log is decided in evidence.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import yaml

from jobs.errors import PacktrainError
from ops.decision import Action
from ops.diagnosis.required_text import required_texts
from ops.diagnosis.verdict import Role
from ops.incident import FailureClass
from ops.signal import EntityKind

FILES: Final = ("noise", "memory", "gpu", "storage", "network", "hang", "nodes", "code", "exceptions")
"""patterns/<name>.yaml in order of precedence: of two rows of equal weight that match a line, the first."""

SUGGESTED_ACTION: Final[Mapping[FailureClass, str]] = {
    FailureClass.GPU_HARDWARE: "RESTART_WITHOUT_NODE",
    FailureClass.GPU_OUT_OF_MEMORY: "RESTART",
    FailureClass.HOST_OUT_OF_MEMORY: "RESTART",
    FailureClass.NETWORK: "RESTART",
    FailureClass.NODE_LOST: "RESTART_WITHOUT_NODE",
    FailureClass.STORAGE: "PAGE",
    FailureClass.CORRUPT_CHECKPOINT: "ROLLBACK",
    FailureClass.HANG: "RESTART",
    FailureClass.PREEMPTION: "RESTART",
    FailureClass.USER_CODE: "STOP",
    FailureClass.CONFIGURATION: "STOP",
    FailureClass.ENVIRONMENT: "STOP",
    FailureClass.NUMERICS: "ROLLBACK",
    FailureClass.TRACKING: "OBSERVE",
    FailureClass.WORKER_KILLED: "RESTART_RANKS",
    FailureClass.BENIGN: "OBSERVE",
    FailureClass.UNKNOWN: "RESTART",
}
ACTIONS: Final = frozenset(action.value for action in Action)

CONFIDENCE: Final[Mapping[Role, float]] = {
    Role.ROOT: 0.9,
    Role.CONFIRMATION: 0.95,
    Role.AMBIGUOUS: 0.45,
    Role.CASCADE: 0.4,
    Role.BENIGN: 0.9,
}
YIELDING_CONFIDENCE: Final = 0.75
"""Of a root that victims print too."""


@dataclass(frozen=True)
class Repeated:
    """What a row becomes when the same text, but for numbers that differ each time, comes again."""

    times: int
    failure_class: FailureClass
    role: Role


@dataclass(frozen=True)
class Pattern:
    """One row."""

    id: str
    regex: re.Pattern[str]
    failure_class: FailureClass
    role: Role
    blames: EntityKind
    source: str
    """Who prints it."""
    action: str
    runbook: str
    confidence: float
    yields: bool = False
    """A root that victims of another one print too: it holds only where no other root is found."""
    general: bool = False
    """Knows an exception by its type alone: within a line, any row that knows the message goes before it."""
    advice: str = ""
    repeated: Repeated | None = None
    needs: frozenset[str] = frozenset()
    """Lower-case texts one of which is in whatever the regex matches; empty where that is not sure."""


_DIGITS: Final = re.compile(r"\d+")
MAX_SHAPES: Final = 20_000
"""Different lines, but for numbers, that are remembered."""


@dataclass(frozen=True)
class Registry:
    """All rows that hold, in order of precedence."""

    patterns: tuple[Pattern, ...]
    ignored: tuple[re.Pattern[str], ...]
    """Cut out of a line before it is looked at."""

    def candidates(self, text: str) -> list[Pattern]:
        """The patterns that can match a text, in order: far fewer than all."""
        lower = text.lower()
        plain, numbered = self._by_text
        shape = _DIGITS.sub("0", lower)
        places = self._by_shape.get(shape)
        if places is None:
            places = {place for needed, found in plain.items() if needed in shape for place in found}
            if len(self._by_shape) < MAX_SHAPES:
                self._by_shape[shape] = places
        places = places | {place for needed, found in numbered.items() if needed in lower for place in found}
        return [self.patterns[place] for place in sorted(places)]

    @cached_property
    def _by_text(self) -> tuple[Mapping[str, list[int]], Mapping[str, list[int]]]:
        """Places of the patterns that need a text, by that text: texts without digits, and those with."""
        plain: dict[str, list[int]] = {}
        numbered: dict[str, list[int]] = {}
        for place, pattern in enumerate(self.patterns):
            for text in pattern.needs or {""}:
                (numbered if _DIGITS.search(text) else plain).setdefault(text, []).append(place)
        return plain, numbered

    @cached_property
    def _by_shape(self) -> dict[str, set[int]]:
        """What was found for texts that are equal but for their numbers: most lines of a log are."""
        return {}

    def repeated(self, pattern_id: str) -> Repeated | None:
        """What the row of that id becomes when its text comes again; None for most."""
        return next((p.repeated for p in self.patterns if p.id == pattern_id), None)

    def without_ignored(self, text: str) -> str:
        """The text without the sentences that are evidence of nothing."""
        for regex in self.ignored:
            text = regex.sub("", text)
        return text


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where it is there."""
_REQUIRED: Final = frozenset({"id", "class", "role", "regex"})
_OPTIONAL: Final = frozenset(
    {
        "blames",
        "source",
        "action",
        "runbook",
        "confidence",
        "yields",
        "general",
        "advice",
        "repeated",
        "disabled",
    }
)
_KEYS: Final = _REQUIRED | _OPTIONAL


def _where(source: Path, row: Mapping[str, Any]) -> str:
    return f"{source}: pattern {row.get('id', '(without id)')!r}"


def _pattern(row: Mapping[str, Any], source: Path) -> Pattern:
    """One row as a value; whatever is wrong with it is told with its file and id."""
    where = _where(source, row)
    if unknown := sorted(set(row) - _KEYS):
        raise PacktrainError(f"{where}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(_KEYS))}")
    if missing := sorted(_REQUIRED - set(row)):
        raise PacktrainError(f"{where}: missing keys {', '.join(missing)}")
    try:
        failure_class = FailureClass(row["class"])
        role = Role(row["role"])
        regex = re.compile(row["regex"])
        blames = EntityKind(row.get("blames", "unknown"))
        repeated = row.get("repeated")
        again = (
            Repeated(int(repeated["times"]), FailureClass(repeated["class"]), Role(repeated["role"]))
            if repeated
            else None
        )
    except (ValueError, KeyError, TypeError, re.error) as error:
        raise PacktrainError(f"{where}: {error}") from error
    action = str(row.get("action", SUGGESTED_ACTION[failure_class]))
    if action not in ACTIONS:
        raise PacktrainError(f"{where}: action {action!r} is none of {', '.join(sorted(ACTIONS))}")
    yields = bool(row.get("yields", False))
    usual = YIELDING_CONFIDENCE if yields else CONFIDENCE[role]
    confidence = float(row.get("confidence", usual))
    if not 0.0 <= confidence <= 1.0:
        raise PacktrainError(f"{where}: confidence {confidence} is not between 0 and 1")
    return Pattern(
        id=str(row["id"]),
        regex=regex,
        failure_class=failure_class,
        role=role,
        blames=blames,
        source=str(row.get("source", source.name)),
        action=action,
        runbook=str(row.get("runbook", failure_class.value)),
        confidence=confidence,
        yields=yields,
        general=bool(row.get("general", False)),
        advice=str(row.get("advice", "")),
        repeated=again,
        needs=required_texts(row["regex"]),
    )


def _rows(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows under a key of a file of patterns."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PacktrainError(f"{path}: cannot be read as patterns: {error}") from error
    if not isinstance(tree, dict) or set(tree) - {"patterns", "ignored", "xids"}:
        raise PacktrainError(f"{path}: expected a mapping with the keys patterns, ignored, xids")
    rows = tree.get(key) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PacktrainError(f"{path}: {key} must be a list of mappings")
    return rows


@cache
def shipped_registry() -> Registry:
    """The rows that come with Packtrain."""
    folder = Path(__file__).parent / "patterns"
    patterns: list[Pattern] = []
    ignored: list[re.Pattern[str]] = []
    for name in FILES:
        path = folder / f"{name}.yaml"
        patterns += [_pattern(row, path) for row in _rows(path, "patterns")]
        ignored += [re.compile(row["regex"]) for row in _rows(path, "ignored")]
    return Registry(tuple(patterns), tuple(ignored))


def with_overrides(registry: Registry, paths: Iterable[Path]) -> Registry:
    """An operator's rows over the registry.

    A row with the id of a shipped one changes the keys that it names (`disabled: true` takes it away); any
    other row is new and comes before all shipped ones. Rows under `ignored` are added.

    Raises:
        PacktrainError: a file that cannot be read, or a row that is wrong, by file and id.
    """
    patterns = list(registry.patterns)
    ignored = list(registry.ignored)
    new: list[Pattern] = []
    for path in paths:
        places = {pattern.id: place for place, pattern in enumerate(patterns)}
        for row in _rows(path, "patterns"):
            place = places.get(str(row.get("id")))
            if place is None:
                new.append(_pattern(row, path))
            elif row.get("disabled"):
                patterns[place] = replace(patterns[place], regex=_NEVER)
            else:
                patterns[place] = _changed(patterns[place], row, path)
        for row in _rows(path, "ignored"):
            try:
                ignored.append(re.compile(row["regex"]))
            except (KeyError, TypeError, re.error) as error:
                raise PacktrainError(f"{_where(path, row)}: {error}") from error
    return Registry((*new, *(p for p in patterns if p.regex is not _NEVER)), tuple(ignored))


_NEVER: Final = re.compile(r"(?!)")


def _changed(old: Pattern, row: Mapping[str, Any], path: Path) -> Pattern:
    """A shipped row with the keys that an operator's row names."""
    whole: dict[str, Any] = {
        "id": old.id,
        "regex": old.regex.pattern,
        "class": old.failure_class.value,
        "role": old.role.value,
        "blames": old.blames.value,
        "source": old.source,
        "advice": old.advice,
        "yields": old.yields,
        "general": old.general,
    }
    if "class" not in row:
        whole |= {"action": old.action, "runbook": old.runbook}
    if "role" not in row and "yields" not in row:
        whole["confidence"] = old.confidence
    return replace(_pattern(whole | dict(row), path), repeated=old.repeated)
