"""A sixteenth of the largest run, watched by one process: the benchmark's figures in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NODES, FULL_NODES = 128, 2048
NOISE = 2.5
"""By so much the CPU time of a busy machine may exceed that of a quiet one."""


@pytest.mark.timeout(240)
def test_watching_takes_a_small_part_of_a_core_and_verdicts_come_in_time():
    words = [sys.executable, "benchmarks/scale.py", "--quick", "--nodes", str(NODES)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=230)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["core_frac_min"] <= NOISE * 0.25 * NODES / FULL_NODES
    assert found["peak_bytes"] <= 2**30 / 8
    assert found["behind_s"] <= 5.0
    assert found["decided_s"] <= 5.0
