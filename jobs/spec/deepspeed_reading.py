"""A DeepSpeed JSON on its way into a spec: the report of its keys, and the verdicts honour, refuse, ignore.

Which key gets which verdict is in deepspeed_json.py and deepspeed_optim.py.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jobs.spec.tree import Json, KeyPath, Origin, Problem, Tree, describe, dotted, iter_leaves


@dataclass(frozen=True)
class KeyNote:
    """What became of one key of the JSON."""

    key: str
    line: int
    text: str


@dataclass(frozen=True)
class DeepspeedReport:
    """What became of every key of a DeepSpeed JSON."""

    path: str
    honoured: tuple[KeyNote, ...]
    ignored: tuple[KeyNote, ...]
    refused: tuple[KeyNote, ...]

    def lines(self) -> list[str]:
        """One line a key, in the order of the file."""
        notes = [
            (note.line, f"{self.path}:{note.line}: {note.key}: {word}: {note.text}")
            for word, group in (
                ("honoured", self.honoured),
                ("ignored", self.ignored),
                ("refused", self.refused),
            )
            for note in group
        ]
        return [line for _, line in sorted(notes)]


@dataclass
class Reading:
    """The JSON being read, and the tree that it is taken over into."""

    tree: Tree
    path: str
    lines: Mapping[str, int]
    honoured: list[KeyNote] = field(default_factory=list)
    ignored: list[KeyNote] = field(default_factory=list)
    refused: list[KeyNote] = field(default_factory=list)

    def origin(self, key: KeyPath) -> Origin:
        """Line of a key of the JSON, or of the nearest section above it."""
        while key and dotted(key) not in self.lines:
            key = key[:-1]
        return Origin(self.path, self.lines.get(dotted(key), 1))

    def note(self, group: list[KeyNote], key: KeyPath, text: str) -> None:
        """Write down what became of a key."""
        group.append(KeyNote(dotted(key), self.origin(key).line or 1, text))

    def refuse(self, key: KeyPath, reason: str) -> None:
        """The key cannot be honoured: an error of the spec."""
        self.note(self.refused, key, reason)
        self.tree.problems.append(Problem(self.origin(key), key, f"refused: {reason}"))

    def ignore(self, key: KeyPath, value: Json, reason: str) -> None:
        """The key, or every key of a section, changes nothing here."""
        for path, _ in iter_leaves({"": value}):
            self.note(self.ignored, (*key, *path[1:]), reason)

    def must_be(self, key: KeyPath, value: Json, allowed: tuple[Json, ...], reason: str) -> None:
        """The key has one supported meaning: honoured where it says that, refused otherwise."""
        if value == "auto" or any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            self.note(self.honoured, key, f"as it is anyway: {reason}")
        else:
            self.refuse(key, f"{describe(value)} is not supported: {reason}")

    def honour(self, key: KeyPath, value: Json, target: KeyPath) -> None:
        """Take the value over to the spec's key `target`, or see that it agrees with the YAML's."""
        name, tree = dotted(target), self.tree
        if value == "auto":
            given = f"{name}={json.dumps(tree.get(target))}" if tree.has(target) else f"the default of {name}"
            self.note(self.honoured, key, f"auto: {given}")
        elif not tree.has(target):
            self.fill(key, value, target)
            self.note(self.honoured, key, f"{name}={json.dumps(value)}")
        elif tree.get(target) == value:
            self.note(
                self.honoured, key, f"agrees with {name}={json.dumps(value)} at {tree.origin_of(target)}"
            )
        else:
            self.refuse(
                key,
                f"says {json.dumps(value)}, but {name}={json.dumps(tree.get(target))} at "
                f"{tree.origin_of(target)}; make them agree or leave one of the two out",
            )

    def is_refused(self, names: Iterable[str]) -> bool:
        """Whether one of these top-level keys was refused."""
        return bool({note.key for note in self.refused} & set(names))

    def fill(self, key: KeyPath, value: Json, target: KeyPath) -> None:
        """Put a value where the YAML has none; the schema complains if the place is no section."""
        try:
            self.tree.put(target, value, self.origin(key))
        except KeyError:
            return

    def number(self, key: KeyPath, value: Json, *, whole: bool) -> int | float | None:
        """The value as a number; None (and a refusal, but for "auto") where it is none. 5e7 is whole."""
        if value == "auto" or value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not whole:
                return value
            if value == int(value):
                return int(value)
        self.refuse(key, f'wants a {"whole " if whole else ""}number or "auto", got {describe(value)}')
        return None
