"""What the documents and build files promise one another: commands, targets, exact versions."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TARGETS = ["run", "test", "drill", "check", "fmt", "bench", "test-gpu", "clean", "venv"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def test_readme_shows_how_to_run_and_test():
    commands = (ROOT / "README.md").read_text().split("\n")
    assert [line for line in commands if re.match(r"\s*make run\b", line)]
    assert [line for line in commands if re.match(r"\s*make test\b", line)]


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target(target: str):
    dry = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert dry.returncode == 0, dry.stderr


def test_documents_name_only_targets_that_exist():
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in MARKDOWN:
        found = re.findall(r"`make ([a-z-]+)|^ *make ([a-z-]+)", path.read_text(), flags=re.MULTILINE)
        named = {quoted or typed for quoted, typed in found}
        assert named <= known, f"{path.name}: {sorted(named - known)}"


def test_versions_are_exact_and_of_no_one_machine(constraints: dict[str, str]):
    assert len(constraints) > 100
    for name, version in constraints.items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), f"{name}=={version}"
    assert "packtrain" not in constraints


def test_every_dependency_has_its_exact_version(constraints: dict[str, str]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in wanted}
    assert names - set(constraints) == set()


def test_ci_runs_what_the_readme_tells():
    script = (ROOT / ".ci" / "run").read_text()
    assert [name for name in ("make check", "make test", "make drill") if name not in script] == []
