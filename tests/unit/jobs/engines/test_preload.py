"""What the fork server imports: safe to fork after, and nearly all that a rank's first step needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.engines.preload import STAGES, preload_modules
from jobs.spec.strategy import DeepspeedPipelineStrategy, DeepspeedZeroStrategy, NativeStrategy

PROGRAM = """
import importlib, json, os, sys, threading
from jobs.engines.preload import preload_modules, take_tiny_steps

kind = sys.argv[1]
missing = []
for name in preload_modules(kind):
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
torch = sys.modules["torch"]
with os.scandir("/proc/self/fd") as opened:
    links = [os.readlink(entry.path) for entry in opened if os.path.islink(entry.path)]
found = {
    "missing": missing,
    "threads": [thread.name for thread in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")),
    "sockets": [link for link in links if link.startswith("socket:")],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "cuda": torch.cuda.is_initialized(),
    "mlflow": "mlflow" in sys.modules,
}
before = set(sys.modules)
if os.fork():
    status = os.wait()[1]
    sys.exit(os.waitstatus_to_exitcode(status))
take_tiny_steps(kind)
found["new"] = sorted(set(sys.modules) - before)
with open(sys.argv[2], "w") as answer:
    json.dump(found, answer)
"""


@pytest.mark.parametrize("kind", STAGES)
def test_preloaded_server_forks_ranks_whose_first_steps_import_next_to_nothing(
    kind: str, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, "-c", PROGRAM, kind, str(answer)], env=environment, check=True)
    found = json.loads(answer.read_text())
    assert found["missing"] == [], "run `python -m jobs.engines.preload` for this kind again"
    assert len(found["new"]) < 20, found["new"]
    assert found["threads"] == ["MainThread"]
    assert found["tasks"] == 1
    assert found["sockets"] == found["children"] == []
    assert not found["cuda"]
    assert not found["mlflow"]


def test_every_strategy_kind_has_a_list() -> None:
    for strategy in (NativeStrategy, DeepspeedZeroStrategy, DeepspeedPipelineStrategy):
        names = preload_modules(strategy.model_fields["kind"].annotation.__args__[0])
        assert "jobs.engines.build" in names
    with pytest.raises(FileNotFoundError):
        preload_modules("unknown")
