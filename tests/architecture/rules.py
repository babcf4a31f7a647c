"""The house rules, one function each: Source -> complaints "line N: ...". Reads no file, prints nothing."""

import ast
import re
from collections.abc import Callable, Iterator

from tests.architecture.sources import Source

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 85
EMPTY_NAMES = {
    "util",
    "utils",
    "helper",
    "helpers",
    "manager",
    "managers",
    "common",
    "misc",
    "handler",
    "handlers",
}
PROTOCOLS = {"Engine", "Hook", "Monitor", "Tracker"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}
HOME_PATH = re.compile(r"(?<![\w.~])/(root|home|Users|work)/\w")
MARKDOWN_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")

Rule = Callable[[Source], Iterator[str]]


def file_length(source: Source) -> Iterator[str]:
    n_lines = source.text.count("\n")
    if source.floor and n_lines > MAX_FILE_LINES:
        yield f"line {n_lines}: a file has at most {MAX_FILE_LINES} lines; split it by what it is about"


def function_length(source: Source) -> Iterator[str]:
    for node in source.nodes if source.floor else []:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {n_lines} lines, more than {MAX_FUNCTION_LINES}"


def no_global_statement(source: Source) -> Iterator[str]:
    for node in source.nodes if source.is_python else []:
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: `global {', '.join(node.names)}`; pass the value in"


def telling_names(source: Source) -> Iterator[str]:
    for part in source.path.parts if source.is_python else []:
        if EMPTY_NAMES & set(part.removesuffix(".py").split("_")):
            yield f"line 1: `{part}` says nothing of what is inside"


def ascii_only(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield f"line {number}: {sorted({c for c in line if not c.isascii()})} is not ASCII"


def init_holds_a_docstring(source: Source) -> Iterator[str]:
    if source.floor and source.path.name == "__init__.py":
        body = source.module.body
        if len(body) != 1 or ast.get_docstring(source.module) is None:
            yield "line 1: an __init__.py holds a docstring and nothing else"


def module_docstring(source: Source) -> Iterator[str]:
    if (source.floor or source.path.parts[0] == "benchmarks") and source.is_python:
        docstring = ast.get_docstring(source.module)
        if not docstring or not docstring.strip():
            yield "line 1: no docstring: say what the room holds, then what it does not do"


def environment_in_one_file(source: Source) -> Iterator[str]:
    if not source.floor or str(source.path) == "service/env.py":
        return
    for node in source.nodes:
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        names = {alias.name for alias in node.names} if from_os else set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        if found := names & ENVIRONMENT_NAMES:
            yield f"line {node.lineno}: os.{min(found)} outside service/env.py"


def ray_only_in_service(source: Source) -> Iterator[str]:
    if source.floor in ("jobs", "ops"):
        yield from _imports_of(source, "ray", "belongs to service")


def mlflow_in_one_file(source: Source) -> Iterator[str]:
    if source.floor and str(source.path) != "ops/tracking/mlflow.py":
        yield from _imports_of(source, "mlflow", "belongs to ops/tracking/mlflow.py")


def deepspeed_in_its_engines(source: Source) -> Iterator[str]:
    if source.floor and not source.path.match("jobs/engines/deepspeed_*.py"):
        yield from _imports_of(source, "deepspeed", "belongs to jobs/engines/deepspeed_*.py")


def groups_are_made_in_one_file(source: Source) -> Iterator[str]:
    if not source.floor or str(source.path) == "jobs/comm/groups.py":
        return
    for node in source.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if isinstance(node, ast.alias):
            name = node.name
        if name.startswith(("new_group", "new_subgroups")):
            yield f"line {node.lineno}: {name} outside jobs/comm/groups.py; take the group as an argument"


def print_only_in_the_cli(source: Source) -> Iterator[str]:
    if not source.floor or source.path.parts[1].startswith("cli"):
        return
    for node in source.nodes if source.is_python else []:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno}: print outside service/cli*; use a logger"


def four_protocols(source: Source) -> Iterator[str]:
    for node in source.nodes if source.floor else []:
        if isinstance(node, ast.ClassDef) and node.name not in PROTOCOLS:
            bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
            if bases & {"Protocol", "ABC"}:
                yield f"line {node.lineno}: {node.name}: the only abstractions are {sorted(PROTOCOLS)}"


def no_home_paths(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := HOME_PATH.search(line):
            yield f"line {number}: {found[0]}...: a path of one machine"


def links_exist(source: Source) -> Iterator[str]:
    if source.path.suffix != ".md":
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        for target in (a or b for a, b in MARKDOWN_LINK.findall(line)):
            path = target.partition("#")[0]
            is_relative = path and "://" not in path and not path.startswith("mailto:")
            if is_relative and not (source.root / source.path.parent / path).exists():
                yield f"line {number}: the link {target} leads nowhere"


def _imports_of(source: Source, package: str, reason: str) -> Iterator[str]:
    """Imports by statement, or by import_module and __import__ with a constant name."""
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else []
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        for name in names:
            if name.partition(".")[0] == package:
                yield f"line {node.lineno}: imports {name}, which {reason}"


RULES: tuple[Rule, ...] = (
    file_length,
    function_length,
    no_global_statement,
    telling_names,
    ascii_only,
    init_holds_a_docstring,
    module_docstring,
    environment_in_one_file,
    ray_only_in_service,
    mlflow_in_one_file,
    deepspeed_in_its_engines,
    groups_are_made_in_one_file,
    print_only_in_the_cli,
    four_protocols,
    no_home_paths,
    links_exist,
)
