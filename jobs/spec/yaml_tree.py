"""Reads one YAML file into a Tree: JSON values with the line of every key. Does not know the schema.

Differences from PyYAML's own loading, each on purpose: only true and false are booleans (on, yes, no stay
text), 3e-4 is a number, 1:30 and 2024-01-01 stay text, a key written twice is refused, and so are tags,
merge keys and numbers that are not finite.
"""

import math
import re
from pathlib import Path
from typing import Final

import yaml

from jobs.errors import SpecError
from jobs.spec.tree import Json, KeyPath, Origin, Problem, Tree, dotted

_CORE: Final = "tag:yaml.org,2002:"
_MAX_NODES: Final = 100_000
"""Aliases may make a small file mean a huge one; no honest spec comes near this."""


class _Resolver(yaml.BaseLoader):
    """PyYAML's parser with the scalar types of YAML 1.2's core schema and nothing else."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+|\.[0-9]+|[0-9]+\.[0-9]*|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Resolver.add_implicit_resolver(_CORE + _tag, re.compile(f"^(?:{_pattern})$"), _first)


def read_yaml(path: Path) -> Tree:
    """The file as a tree; repeated keys and the like are among its problems, the rest is read all the same.

    Raises:
        SpecError: the file cannot be read, is not UTF-8, not YAML, empty, or no mapping.
    """
    text = read_text(path)
    node = _compose(text, str(path))
    if node is None:
        raise SpecError(
            f"{path}:1: the file is empty; a spec has at least the sections model, data, optim and train"
        )
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(
            f"{path}:{node.start_mark.line + 1}: a spec is sections of `key: value`, but this file holds a "
            f"{'list' if isinstance(node, yaml.SequenceNode) else 'single value'}"
        )
    tree = Tree({}, {(): Origin(str(path), node.start_mark.line + 1)})
    value = _Reader(str(path), tree).value_of(node, ())
    assert isinstance(value, dict)
    tree.root = value
    return tree


def read_yaml_value(text: str) -> Json:
    """A value written in YAML on the command line.

    Raises:
        SpecError: it is not YAML, or a mapping in it repeats a key; the message names no place.
    """
    source = "value"
    try:
        node = _compose(text, source)
        if node is None:
            return None
        tree = Tree({}, {(): Origin(source)})
        value = _Reader(source, tree).value_of(node, ())
    except SpecError as error:
        raise SpecError(str(error).split(": ", 1)[1]) from None
    if tree.problems:
        raise SpecError("; ".join(problem.message for problem in tree.problems))
    return value


def read_text(path: Path) -> str:
    """The file as text, without a byte order mark.

    Raises:
        SpecError: it cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder, not a file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecError(
            f"{path}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); "
            "save it as UTF-8"
        ) from None


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Resolver)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        raise SpecError(f"{where}: {_plain_yaml_error(error, text)}") from None
    except RecursionError:
        raise SpecError(f"{source}: lists or mappings are nested too deeply to be a spec") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise SpecError(
            f"{source}:{line}: holds the character U+{int(error.character):04X}, which YAML does not allow"
        ) from None


def _plain_yaml_error(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    lines = text.splitlines()
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "a tab is used for indentation; YAML allows only spaces there"
    problem = error.problem or "not YAML"
    if "undefined alias" in problem or "recursive" in problem:
        return f"not YAML: {problem}"
    if problem.startswith("but found another document"):
        return "a second document starts here (---); a spec is one document"
    context = f" ({error.context})" if error.context else ""
    return f"not YAML: {problem}{context}"


class _Reader:
    """Turns YAML nodes into values, writing origins and problems into a tree."""

    def __init__(self, source: str, tree: Tree) -> None:
        self._source = source
        self._tree = tree
        self._open: list[yaml.Node] = []
        self._n_nodes = 0

    def value_of(self, node: yaml.Node, path: KeyPath) -> Json:
        self._n_nodes += 1
        if any(node is above for above in self._open) or self._n_nodes > _MAX_NODES:
            line = node.start_mark.line + 1
            raise SpecError(
                f"{self._source}:{line}: an alias (*name) repeats itself without end; write the value out"
            )
        self._open.append(node)
        try:
            return self._any(node, path)
        finally:
            self._open.pop()

    def _any(self, node: yaml.Node, path: KeyPath) -> Json:
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
            items: list[Json] = []
            for index, item in enumerate(node.value):
                self._tree.origins[(*path, index)] = self._origin(item)
                items.append(self.value_of(item, (*path, index)))
            return items
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._complain(node, path, f"the tag {node.tag} is not allowed; write a plain value")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(key_node, path, "a key must be one word, not a list or a mapping")
                continue
            key = key_node.value
            here = (*path, key)
            if key_node.tag == _CORE + "merge":
                self._complain(key_node, path, "merge keys (<<) are not supported; write the keys out")
            elif key in values:
                first = self._tree.origins[here].line
                self._complain(key_node, here, f"written twice (first at line {first}); keep one of the two")
            else:
                self._tree.origins[here] = self._origin(key_node)
                values[key] = self.value_of(value_node, here)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Json:
        text: str = node.value
        kind = node.tag.removeprefix(_CORE)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                number = int(text.replace("_", "")[:40], 16 if "0x" in text else 10)
                if abs(number) < 2**63:
                    return number
                self._complain(node, path, f"{text[:40]} is too large a number")
                return 0
            if kind == "float":
                real = float(re.sub(r"\.(?=[inIN])", "", text))
                if math.isfinite(real):
                    return real
                self._complain(node, path, f"{text} is not a finite number")
                return 0.0
        except (ValueError, KeyError):
            self._complain(node, path, f"{text!r} does not fit its tag !!{kind}")
            return None
        if kind not in ("str", "merge"):
            self._complain(node, path, f"the tag {node.tag} is not allowed; write a plain value")
        if "\0" in text:
            self._complain(node, path, "holds a NUL character, which no path, name or variable may")
        return text

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self._source, node.start_mark.line + 1)

    def _complain(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self._tree.problems.append(Problem(self._origin(node), path, message))


def key_lines(text: str) -> dict[str, int]:
    """Line of every key of a text that is known to be valid JSON (JSON is YAML once its tabs are blanks)."""
    node = _compose(text.replace("\t", " "), "")
    tree = Tree({}, {(): Origin("", 1)})
    if node is not None:
        _Reader("", tree).value_of(node, ())
    return {dotted(path): origin.line or 1 for path, origin in tree.origins.items()}
