"""The files of the tree that the house rules look at, read and parsed once. Holds no rule."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

FLOORS = ("jobs", "ops", "service")
FOLDERS = (*FLOORS, "tests", "benchmarks", "docs", ".ci")
TEXT_SUFFIXES = (".py", ".md", ".yaml", ".toml", ".svg", ".txt", "")
PASSED_OVER = {"__pycache__", "LICENSE", ".venv"}


@dataclass(frozen=True)
class Source:
    """One file: its path below the root, and its text."""

    root: Path
    path: PurePosixPath
    text: str

    @property
    def floor(self) -> str:
        """jobs, ops or service; empty for everything else."""
        return self.path.parts[0] if self.is_python and self.path.parts[0] in FLOORS else ""

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree, the module first."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def module(self) -> ast.Module:
        first = self.nodes[0]
        assert isinstance(first, ast.Module)
        return first


def iter_sources(root: Path) -> Iterator[Source]:
    """Text files at the root and below the known folders, sorted by path."""
    below = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
    for path in sorted([*root.iterdir(), *below]):
        if path.suffix in TEXT_SUFFIXES and path.is_file() and not PASSED_OVER & set(path.parts):
            relative = PurePosixPath(path.relative_to(root))
            yield Source(root, relative, path.read_text(encoding="utf-8"))
