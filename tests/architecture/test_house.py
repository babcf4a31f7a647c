"""What the documents and build files promise one another: commands, targets, exact versions."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main

from jobs.spec.load import load_spec
from service import cli

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("jobs", "ops", "service")
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


def test_documents_name_only_files_that_exist():
    place = re.compile(r"(?<![\w./])(?:jobs|ops|service|tests|docs|benchmarks)/[\w./*-]*\w")
    for path in MARKDOWN:
        named = [name for name in place.findall(path.read_text()) if "NAME" not in name]
        missing = [name for name in named if not [*ROOT.glob(name)]]
        assert not missing, f"{path.name}: {missing}"


def test_documents_name_only_tests_that_exist():
    for path in MARKDOWN:
        for file, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", path.read_text()):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{path.name}: {file}::{name}"


def test_the_architecture_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [init.parent for floor in FLOORS for init in (ROOT / floor).glob("*/__init__.py")]
    assert len(rooms) > 5
    assert [f"{room.name}/" for room in rooms if f"{room.name}/" not in text] == []


def test_documents_name_only_verbs_that_exist():
    command = typer.main.get_command(cli.app)
    for path in MARKDOWN:
        for line in re.findall(r"^ {4}packtrain (.*?)(?:   |$)", path.read_text(), flags=re.MULTILINE):
            for part in line.split(" | "):
                words = part.split()
                verb = command.commands.get(words[0])  # type: ignore[attr-defined]
                parent = command if verb else command.commands[line.split()[0]]  # type: ignore[attr-defined]
                assert verb or words[0] in parent.commands, f"{path.name}: packtrain {part}"
                if verb and hasattr(verb, "commands"):
                    assert words[1] in verb.commands, f"{path.name}: packtrain {part}"


def test_the_spec_in_the_readme_loads(tmp_path: Path):
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    (tmp_path / "spec.yaml").write_text(block[1])
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.model.preset == "small"
    assert spec.world_size == 4
