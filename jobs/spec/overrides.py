"""Applies `--set a.b=c` to a tree. Whether a key exists is the schema's business, not this file's."""

from collections.abc import Sequence

from jobs.errors import SpecError
from jobs.spec.tree import KeyPath, Origin, Problem, Tree, describe, dotted
from jobs.spec.yaml_tree import read_yaml_value


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> None:
    """Put each `path=value` into the tree, in order; what has no place becomes a problem of the tree.

    The value is YAML (`optim.lr=3e-4`, `strategy={kind: native, dp: 2}`); nothing after the `=` is null. A
    path's parts are keys, or indices of a list that the spec holds (`data.sources.0.path`).
    """
    for override in overrides:
        _apply(tree, override)


def _apply(tree: Tree, override: str) -> None:
    origin = Origin(f"--set {override}")
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        tree.problems.append(
            Problem(origin, (), "an override is written key.key=value, for example optim.lr=3e-4")
        )
        return
    try:
        value = read_yaml_value(text.strip())
    except SpecError as error:
        tree.problems.append(Problem(origin, (), str(error)))
        return
    path: KeyPath = ()
    for part in parts:
        above = tree.get(path)
        if isinstance(above, list):
            if not part.isdecimal() or int(part) >= len(above):
                count = f"{len(above)} element{'s' if len(above) != 1 else ''}"
                wanted = f"an index from 0 to {len(above) - 1}" if above else "no index"
                tree.problems.append(
                    Problem(origin, path, f"is a list of {count}: it takes {wanted}, not {part!r}")
                )
                return
            path = (*path, int(part))
        elif above is None or isinstance(above, dict):
            if above is None and part.isdecimal():
                tree.problems.append(
                    Problem(
                        origin, path, f"is not in the spec, so it has no element {part}; set the whole list"
                    )
                )
                return
            path = (*path, part)
        else:
            message = f"is {describe(above)}, so there is no {dotted((*path, part))} in it"
            tree.problems.append(Problem(origin, path, message))
            return
    tree.put(path, value, origin)
