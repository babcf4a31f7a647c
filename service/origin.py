"""Where the sources come from: jobs, ops and service must be one tree. Imports none of them.

`ops` is also the name of a package that anybody can install, and a folder called `jobs` is easily found in a
working directory; a run that mixes trees fails late and strangely, on other nodes first. Does not repair
sys.path.
"""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

FLOORS = ("jobs", "ops", "service")


class OriginError(ImportError):
    """The three floors do not come from one folder."""


def find_source_root() -> Path:
    """The folder that holds jobs, ops and service.

    Looks the packages up without running their code, so it can be called before anything imports them.

    Raises:
        OriginError: one of them is missing or comes from somewhere else.
    """
    root = Path(__file__).resolve().parent.parent
    for floor in FLOORS:
        folder = _folder_of(find_spec(floor))
        if folder != root / floor:
            found = "is not found" if folder is None else f"comes from {folder}"
            raise OriginError(
                f"the package {floor!r} {found}, but service comes from {root / 'service'}: one folder must "
                f"hold all of {', '.join(FLOORS)}. Start from {root}, and uninstall what shadows it or take "
                "it off PYTHONPATH."
            )
    return root


def _folder_of(spec: ModuleSpec | None) -> Path | None:
    """Folder of a package (its first portion where it has no __init__.py); None where there is none."""
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()
