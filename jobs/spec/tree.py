"""A spec as plain JSON values that remember where each came from, and the list of what is wrong with it.

Does not read YAML (yaml_tree.py) and does not know the schema (schema.py).
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jobs.errors import SpecError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the root, e.g. ("data", "sources", 0, "path")."""


@dataclass(frozen=True)
class Origin:
    """Where a key was written: a line of a file, or an override on the command line (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one place."""

    origin: Origin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        where = dotted(self.path)
        return f"{self.origin}: {where}: {self.message}" if where else f"{self.origin}: {self.message}"


@dataclass
class Tree:
    """Values of a spec on their way to being complete. Changed in place by the loader only."""

    root: dict[str, Json]
    origins: dict[KeyPath, Origin]
    """Origin of each key and list element; the root's is at ()."""
    problems: list[Problem] = field(default_factory=list)

    def origin_of(self, path: KeyPath) -> Origin:
        """Origin of the path, or of the nearest section above it that was written down."""
        while path not in self.origins and path:
            path = path[:-1]
        return self.origins[path]

    def get(self, path: KeyPath) -> Json:
        """Value at the path; None where there is none."""
        value: Json = self.root
        for key in path:
            if isinstance(value, dict) and isinstance(key, str):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def has(self, path: KeyPath) -> bool:
        """Whether a mapping key is written (also when its value is null)."""
        parent = self.get(path[:-1])
        return isinstance(parent, dict) and path[-1] in parent

    def put(self, path: KeyPath, value: Json, origin: Origin) -> None:
        """Set a key, and make the sections above it where they are missing; origins below it are forgotten.

        Raises:
            KeyError: something above the path is no section.
        """
        section: Json = self.root
        for depth, key in enumerate(path[:-1], start=1):
            if isinstance(section, list) and isinstance(key, int) and key < len(section):
                section = section[key]
                continue
            if not isinstance(section, dict) or not isinstance(key, str):
                raise KeyError(path)
            if section.get(key) is None:
                section[key] = {}
                self.origins[path[:depth]] = origin
            section = section[key]
        last = path[-1]
        match section, last:
            case dict(), str():
                section[last] = value
            case list(), int() if last < len(section):
                section[last] = value
            case _:
                raise KeyError(path)
        for old in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[old]
        self.origins[path] = origin

    def complain(self, path: KeyPath, message: str, origin: Origin | None = None) -> None:
        """Add a problem at the path."""
        self.problems.append(Problem(origin or self.origin_of(path), path, message))


def dotted(path: KeyPath) -> str:
    """The path as users write it: data.sources.0.path."""
    return ".".join(str(key) for key in path)


def iter_leaves(value: Mapping[str, Json], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Json]]:
    """Every key that holds no mapping (or an empty one), with its path."""
    for key, below in value.items():
        if isinstance(below, dict) and below:
            yield from iter_leaves(below, (*prefix, key))
        else:
            yield (*prefix, key), below


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that the word was most likely meant to be, or None where nothing is near."""
    known = list(known)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not found:
        found = [
            name
            for name in known
            if word and name.replace("_", "") == word.replace("-", "").replace("_", "").lower()
        ]
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    known = list(known)
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else f"; known here: {', '.join(known)}"


def describe(value: Json) -> str:
    """A value as an error message shows it, with its kind where that is not plain."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}..."
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"a section with {', '.join(value) or 'no keys'}"
        case _:
            return repr(value)


def spec_error(problems: Iterable[Problem]) -> SpecError:
    """One error with a line a problem, in the order of the files' lines, without repeats."""
    order = sorted(problems, key=lambda p: (p.origin.source, p.origin.line or 0))
    return SpecError("\n".join(dict.fromkeys(str(p) for p in order)))
