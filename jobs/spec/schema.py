"""What the schema expects at a place, in words, and pydantic's errors as plain sentences. Reads no files."""

import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from jobs.spec.base import SpecSection
from jobs.spec.job import JobSpec
from jobs.spec.tree import Json, KeyPath, Problem, Tree, describe, did_you_mean, dotted, nearest

Expected: TypeAlias = object
"""A type as written in the schema: a section class, a union, a Literal, int, ..."""

_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def _members(expected: Expected) -> tuple[Expected, ...]:
    """Alternatives of a union (None left out), or the type alone; Annotated is looked through."""
    if get_origin(expected) is Annotated:
        return _members(get_args(expected)[0])
    if get_origin(expected) in (Union, types.UnionType):
        found: list[Expected] = []
        for member in get_args(expected):
            if member is not type(None):
                found.extend(_members(member))
        return tuple(found)
    return (expected,)


def _sections(expected: Expected) -> tuple[type[SpecSection], ...]:
    return tuple(m for m in _members(expected) if isinstance(m, type) and issubclass(m, SpecSection))


def tags_of(expected: Expected) -> dict[str, type[SpecSection]]:
    """The sections of a union by the value of their `kind`; empty where there is no such choice."""
    sections = _sections(expected)
    if len(sections) < 2:
        return {}
    return {str(get_args(s.model_fields["kind"].annotation)[0]): s for s in sections}


def step_into(expected: Expected, key: str | int, value: Json) -> Expected | None:
    """What the schema expects under `key` of a value; None where it knows no such key."""
    if isinstance(key, int):
        for member in _members(expected):
            if get_origin(member) is tuple:
                return get_args(member)[0]  # type: ignore[no-any-return]
        return None
    tags = tags_of(expected)
    if tags:
        kind = value.get("kind") if isinstance(value, dict) else None
        chosen = tags.get(kind) if isinstance(kind, str) else None
        candidates: Iterable[type[SpecSection]] = (chosen,) if chosen else tags.values()
    else:
        candidates = _sections(expected)
    for section in candidates:
        if key in section.model_fields:
            return section.model_fields[key].annotation
    for member in _members(expected):
        if get_origin(member) is dict:
            return get_args(member)[1]  # type: ignore[no-any-return]
    return None


def expected_at(tree: Tree, path: KeyPath, root: type[SpecSection] = JobSpec) -> Expected | None:
    """What the schema expects at the path of a tree; None where it knows no such place."""
    expected: Expected | None = root
    for depth, key in enumerate(path):
        if expected is None:
            return None
        expected = step_into(expected, key, tree.get(path[:depth]))
    return expected


def keys_at(tree: Tree, path: KeyPath, root: type[SpecSection] = JobSpec) -> list[str]:
    """Names of the keys that the schema knows in the section at the path."""
    expected = expected_at(tree, path, root)
    tags = tags_of(expected)
    value = tree.get(path)
    kind = value.get("kind") if isinstance(value, dict) else None
    sections: Iterable[type[SpecSection]] = _sections(expected)
    if isinstance(kind, str) and kind in tags:
        sections = (tags[kind],)
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


def in_words(expected: Expected) -> str:
    """The type as a user reads it: "a whole number", "one of adamw, sgd"."""
    words: list[str] = []
    for member in _members(expected):
        if get_origin(member) is Literal:
            choices = ", ".join(str(choice) for choice in get_args(member))
            words.append(f"one of {choices}" if len(get_args(member)) > 1 else choices)
        elif get_origin(member) is tuple:
            words.append("a list")
        elif get_origin(member) is dict or _sections(member):
            words.append("a section (keys and values)")
        else:
            plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
            words.append(plain.get(typing.cast(type, member), str(member)))
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    return " or ".join(dict.fromkeys(words))


def problems_of(
    errors: Iterable[ErrorDetails], tree: Tree, root: type[SpecSection] = JobSpec
) -> list[Problem]:
    """Pydantic's errors as problems with a place in the user's files and a plain sentence.

    Args:
        errors: of validating the tree.
        tree: what the user wrote.
        root: the section that the whole file is.
    """
    found: dict[KeyPath, Problem] = {}
    placed = [(error, _user_path(error["loc"], tree, root)) for error in errors]
    misspelt = {
        (*path[:-1], nearest(str(path[-1]), keys_at(tree, path[:-1], root)))
        for error, path in placed
        if error["type"] == "extra_forbidden"
    }
    for error, path in placed:
        if path in found and error["type"] != "value_error":
            continue
        if error["type"] == "missing" and path in misspelt:
            continue
        if error["type"] == "too_short" and any(path == other[: len(path)] != other for _, other in placed):
            continue  # pydantic does not count elements that are wrong themselves
        problem = _problem(error, path, tree, root)
        found[problem.path if error["type"] != "value_error" else (*problem.path, error["msg"])] = problem
    return list(found.values())


def _user_path(loc: tuple[int | str, ...], tree: Tree, root: type[SpecSection]) -> KeyPath:
    """The location without what pydantic adds to it: union tags, names of alternatives, [key]."""
    path: KeyPath = ()
    expected: Expected | None = root
    for key in loc:
        if expected is None:
            break
        if key in tags_of(expected) and expected is not root:
            expected = tags_of(expected)[str(key)]
            continue
        below = step_into(expected, key, tree.get(path))
        if below is None and not _sections(expected):
            break
        path = (*path, key)
        expected = below
    return path


def _problem(error: ErrorDetails, path: KeyPath, tree: Tree, root: type[SpecSection]) -> Problem:
    kind, value = error["type"], tree.get(path)
    expected = expected_at(tree, path, root)
    if kind == "extra_forbidden":
        return Problem(tree.origin_of(path), path, _unknown_key(path, tree, root))
    if kind == "missing":
        section = dotted(path[:-1]) or "the spec"
        return Problem(
            tree.origin_of(path[:-1]), path, f"missing in {section}; it wants {in_words(expected)}"
        )
    if kind == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        named = _first_key_named(message, path, tree)
        return Problem(tree.origin_of(named), path, message)
    return Problem(tree.origin_of(path), path, _sentence(error, expected, value))


def _unknown_key(path: KeyPath, tree: Tree, root: type[SpecSection]) -> str:
    word, known = str(path[-1]), keys_at(tree, path[:-1], root)
    owners = [k for k, s in tags_of(expected_at(tree, path[:-1], root)).items() if word in s.model_fields]
    if owners:
        kind = tree.get((*path[:-1], "kind"))
        return f"belongs to kind {' or '.join(owners)}, but kind is {kind}; known here: {', '.join(known)}"
    return f"unknown key{did_you_mean(word, known)}"


def _sentence(error: ErrorDetails, expected: Expected | None, value: Json) -> str:
    kind, context = error["type"], error.get("ctx", {})
    choices = list(tags_of(expected))
    if choices:
        if not isinstance(value, dict):
            return f"wants a section with the key kind (one of {', '.join(choices)}), got {describe(value)}"
        if "kind" not in value:
            return f"the key kind is missing; it wants one of {', '.join(choices)}"
        near = nearest(str(value["kind"]), choices)
        return _choice(choices, value["kind"], near, "kind ")
    if kind == "literal_error":
        choices = [str(c) for m in _members(expected) if get_origin(m) is Literal for c in get_args(m)]
        if isinstance(value, list) and any(get_origin(m) is tuple for m in _members(expected)):
            return f"in a list, each must be an integer greater than 0; got {value}"
        near = nearest(value, choices) if isinstance(value, str) else None
        return _choice(choices, value, near)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{words} {context[bound]:g}; got {describe(value)}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch" and "=" in str(context.get("pattern")):
        return "the name of an environment variable is not empty and holds no ="
    if kind == "string_pattern_mismatch" and "{0,79}" in str(context.get("pattern")):
        return f"got {value!r}; a name is 1 to 80 letters, digits, dots, _ and -, a letter or digit first"
    if kind == "too_short":
        return f"needs at least {context['min_length']} element, got none"
    if kind == "finite_number":
        return f"must be a finite number; got {describe(value)}"
    return f"wants {in_words(expected)}, got {describe(value)}{_hint(expected, value)}"


def _choice(choices: list[str], value: Json, near: str | None, what: str = "") -> str:
    hint = f"; did you mean {near}?" if near else ""
    if len(choices) == 1:
        return f"{what}must be {choices[0]}; got {describe(value)}{hint}"
    return f"{what}must be one of {', '.join(choices)}; got {describe(value)}{hint}"


def _hint(expected: Expected | None, value: Json) -> str:
    members = _members(expected)
    if str in members and isinstance(value, bool | int | float):
        return f'; put it in quotes: "{describe(value)}"'
    if int in members and isinstance(value, float) and value == int(value):
        return f"; write {int(value)}"
    if bool in members and isinstance(value, str) and value.lower() in ("on", "yes", "off", "no", "y", "n"):
        return f"; write {'true' if value.lower() in ('on', 'yes', 'y') else 'false'}"
    if isinstance(value, str) and (int in members or float in members):
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            return ""
        return f"; write {number:g}, plain and without quotes" if number == number else ""
    return ""


def _first_key_named(message: str, path: KeyPath, tree: Tree) -> KeyPath:
    """The key that a message of our own validators names first as key=value, if the user wrote that key."""
    for name in re.findall(r"([a-z_0-9]+(?:\.[a-z_0-9]+)*)=", message):
        named = (*path, *name.split("."))
        if named in tree.origins:
            return named
    return path
