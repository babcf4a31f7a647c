"""The tree follows the house rules, and each rule notices what it is there for."""

from pathlib import Path

import pytest

from tests.architecture.rules import MAX_FILE_LINES, MAX_FUNCTION_LINES, RULES, Rule
from tests.architecture.sources import Source, iter_sources

ROOT = Path(__file__).resolve().parents[2]
DOCSTRING = '"""Room."""\n'
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
TOO_LONG_METHOD = "class A:\n    def f():\n" + "        x = 1\n" * MAX_FUNCTION_LINES

# rule -> (path, text) that it must notice, and (path, text) close by that it must let pass.
SAMPLES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "file_length": (
        [("jobs/a.py", "x = 1\n" * (MAX_FILE_LINES + 1))],
        [("jobs/a.py", "x = 1\n" * MAX_FILE_LINES), ("tests/a.py", "x = 1\n" * 999)],
    ),
    "function_length": (
        [
            ("ops/a.py", LONG_FUNCTION + "    x = 1\n"),
            ("service/a.py", "async " + LONG_FUNCTION + "    x = 1\n"),
            ("ops/b.py", TOO_LONG_METHOD),
        ],
        [("ops/a.py", LONG_FUNCTION), ("ops/b.py", LONG_FUNCTION + LONG_FUNCTION)],
    ),
    "no_global_statement": (
        [("jobs/a.py", "def f():\n    global x\n"), ("tests/a.py", "def f():\n    global x\n")],
        [("jobs/a.py", "def f():\n    x = 1\n    def g():\n        nonlocal x\n")],
    ),
    "telling_names": (
        [
            ("jobs/utils.py", ""),
            ("ops/node_manager.py", ""),
            ("service/common/a.py", ""),
            ("tests/helpers.py", ""),
        ],
        [("jobs/commons_law.py", ""), ("service/managed.py", ""), ("docs/common.md", "")],
    ),
    "ascii_only": (
        [
            ("jobs/a.py", "# caf\N{LATIN SMALL LETTER E WITH ACUTE}\n"),
            ("README.md", "a \N{RIGHTWARDS ARROW} b\n"),
        ],
        [("jobs/a.py", "text = '\\u00e9'\n")],
    ),
    "init_holds_a_docstring": (
        [
            ("jobs/__init__.py", DOCSTRING + "from jobs.mesh import Mesh\n"),
            ("ops/x/__init__.py", ""),
            ("ops/x/__init__.py", "import os\n"),
        ],
        [("jobs/__init__.py", DOCSTRING), ("jobs/mesh.py", "import os\n")],
    ),
    "module_docstring": (
        [("jobs/a.py", "x = 1\n"), ("service/a.py", '""" """\n'), ("benchmarks/a.py", "x = 1\n")],
        [("jobs/a.py", DOCSTRING), ("tests/a.py", "x = 1\n")],
    ),
    "environment_in_one_file": (
        [
            ("jobs/a.py", "import os\nx = os.environ['A']\n"),
            ("ops/a.py", "import os\nx = os.getenv('A')\n"),
            ("service/a.py", "from os import environ\n"),
            ("service/x/env.py", "from os import path, getenv as g\n"),
        ],
        [("service/env.py", "import os\nx = os.environ\n"), ("jobs/a.py", "import os\nx = os.path\n")],
    ),
    "ray_only_in_service": (
        [
            ("jobs/a.py", "import ray\n"),
            ("ops/a.py", "def f():\n    from ray.train import report\n"),
            ("ops/b.py", "import importlib\nimportlib.import_module('ray.data')\n"),
        ],
        [("service/a.py", "import ray\n"), ("jobs/a.py", "import raylib\nfrom .ray import x\n")],
    ),
    "mlflow_in_one_file": (
        [
            ("ops/tracking/jsonl.py", "import mlflow\n"),
            ("service/a.py", "from mlflow.tracking import MlflowClient\n"),
        ],
        [
            ("ops/tracking/mlflow.py", "import mlflow\n"),
            ("service/a.py", "from ops.tracking import mlflow\n"),
        ],
    ),
    "deepspeed_in_its_engines": (
        [("jobs/engines/native.py", "import deepspeed\n"), ("service/a.py", "__import__('deepspeed')\n")],
        [
            ("jobs/engines/deepspeed_zero.py", "import deepspeed\nfrom deepspeed.runtime import x\n"),
            ("service/a.py", "PRELOAD = ['deepspeed']\n"),
        ],
    ),
    "groups_are_made_in_one_file": (
        [
            ("jobs/a.py", "import torch.distributed as dist\ng = dist.new_group([0])\n"),
            ("jobs/b.py", "from torch.distributed import new_subgroups\n"),
        ],
        [
            ("jobs/comm/groups.py", "import torch\ntorch.distributed.new_group([0])\n"),
            ("tests/a.py", "new_group()\n"),
        ],
    ),
    "print_only_in_the_cli": (
        [("jobs/a.py", "def f():\n    print(1)\n"), ("service/supervisor.py", "print(1)\n")],
        [
            ("service/cli.py", "print(1)\n"),
            ("service/cli/run.py", "print(1)\n"),
            ("service/cli_data.py", "print(1)\n"),
            ("jobs/a.py", "x.print(1)\n"),
        ],
    ),
    "four_protocols": (
        [
            ("jobs/a.py", "from typing import Protocol\nclass Thing(Protocol): ...\n"),
            ("ops/a.py", "import abc\nclass Thing(abc.ABC): ...\n"),
        ],
        [("jobs/a.py", "from typing import Protocol\nclass Engine(Protocol): ...\nclass Other: ...\n")],
    ),
    "no_home_paths": (
        [
            ("Makefile", "x = /" + "home/me/x\n"),
            ("a.yaml", "x: '/" + "Users/me'\n"),
            ("jobs/a.py", "# /" + "root/x\n"),
        ],
        [("Makefile", "x = $HOME/home/x ~/home/x https://a.b/home/x\n"), ("jobs/a.py", "# data/root/x\n")],
    ),
    "links_exist": (
        [
            ("README.md", "see [it](docs/none.md)\n"),
            ("docs/a.md", "![x](img/none.svg)\n"),
            ("docs/a.md", '<img src="none.svg">\n'),
        ],
        [
            ("docs/a.md", "[itself](a.md#part) [up](../docs/a.md) [out](https://a.b/c) [here](#part)\n"),
            ("jobs/a.py", "x = 'see [it](none.md)'\n"),
        ],
    ),
}


@pytest.fixture(scope="module")
def tree() -> list[Source]:
    return list(iter_sources(ROOT))


def complaints(rule: Rule, sources: list[Source]) -> list[str]:
    return [f"{source.path}, {complaint}" for source in sources for complaint in rule(source)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_follows(rule: Rule, tree: list[Source]):
    found = complaints(rule, tree)
    assert not found, "\n" + "\n".join(found)


def test_every_rule_has_samples():
    assert {rule.__name__ for rule in RULES} == set(SAMPLES)


def test_the_walk_sees_the_tree(tree: list[Source]):
    paths = {str(source.path) for source in tree}
    expected = {
        "jobs/mesh.py",
        "service/env.py",
        "tests/architecture/rules.py",
        "README.md",
        "Makefile",
        ".ci/run",
    }
    assert expected <= paths
    assert not any("__pycache__" in path or ".venv" in path for path in paths)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_notices(rule: Rule, tmp_path: Path):
    bad, good = SAMPLES[rule.__name__]
    for number, (path, text) in enumerate(bad + good):
        root = tmp_path / str(number)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
        found = complaints(rule, list(iter_sources(root)))
        if number < len(bad):
            assert found, f"{path} passed:\n{text}"
            assert all(complaint.startswith(f"{path}, line ") for complaint in found)
        else:
            assert not found, f"{path} did not pass: {found}"
