"""A foreign `ops` or `jobs` first on the path is one clear error before anything of it runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.origin import find_source_root

ROOT = Path(__file__).resolve().parents[3]


def run_python(code: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter without this tree's own installation, `path` first."""
    start = (
        "import sys; "
        "sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith('__editable__')]; "
        f"sys.path[:0] = {[str(folder) for folder in path]!r}; "
    )
    return subprocess.run(
        [sys.executable, "-c", start + code], cwd=cwd, capture_output=True, text=True, check=False, timeout=30
    )


def make_tree(folder: Path, floors: list[str]) -> Path:
    for floor in floors:
        (folder / floor).mkdir(parents=True)
        (folder / floor / "__init__.py").touch()
    for name in ("origin.py", "__main__.py"):
        shutil.copy(ROOT / "service" / name, folder / "service" / name)
    return folder


def test_names_the_folder_of_this_tree():
    assert find_source_root() == ROOT


@pytest.mark.parametrize("floor", ["ops", "jobs"])
@pytest.mark.parametrize("has_init", [True, False], ids=["package", "bare folder"])
def test_a_foreign_floor_is_refused_and_not_run(tmp_path: Path, floor: str, has_init: bool):
    floors = ["jobs", "ops", "service"]
    if not has_init:  # a folder without __init__.py wins only where no real package is found
        floors.remove(floor)
    tree = make_tree(tmp_path / "tree", floors)
    foreign = tmp_path / "foreign" / floor
    foreign.mkdir(parents=True)
    if has_init:
        (foreign / "__init__.py").write_text("print('foreign code ran')\n")
    found = run_python(
        "import runpy; runpy.run_module('service', run_name='__main__')", [foreign.parent, tree], tmp_path
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"packtrain: the package {floor!r} comes from {foreign}")
    assert str(tree / "service") in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_missing_floor_is_named(tmp_path: Path):
    tree = make_tree(tmp_path / "tree", ["jobs", "service"])
    found = run_python("from service.origin import find_source_root; find_source_root()", [tree], tmp_path)
    assert "OriginError: the package 'ops' is not found" in found.stderr


def test_looking_imports_nothing(tmp_path: Path):
    code = "from service.origin import find_source_root; print(find_source_root()); "
    code += "print([name for name in ('jobs', 'ops', 'torch', 'ray') if name in sys.modules])"
    found = run_python(code, [ROOT], tmp_path)
    assert found.stdout.splitlines() == [str(ROOT), "[]"]
