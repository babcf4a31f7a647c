"""Ray's processes beside the ranks hold no torch: importing it costs seconds at each start and restart."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "module",
    [
        "service.worker",
        "service.coordinator",
        "service.node_agent",
        "service.controllers",
        "service.supervisor",
        "service.cli",
    ],
)
def test_no_torch_is_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
