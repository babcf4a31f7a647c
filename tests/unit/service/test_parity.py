"""The parity verb on real ranks; and ranks on this machine: their errors, their ends, their memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jobs.engines.preload import preload_modules
from jobs.errors import PacktrainError, SpecError
from jobs.mesh import Mesh
from jobs.parity.compare import Tolerances
from service.local_ranks import LocalRanks, check_memory
from service.parity import default_max_ranks
from tests.support.commands import command
from tests.support.live_runs import ROOT, command_environment, packtrain

SPEC = ROOT / "jobs" / "specs" / "tiny.yaml"
RANKS_PRELOAD = (*preload_modules("native"), "jobs.parity.rank")


def test_a_layout_that_is_right_ends_with_0_and_plain_json(tmp_path: Path) -> None:
    answer = packtrain("parity", str(SPEC), "--set", "strategy.tp=2", "--steps", "3", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["ok"] is True
    assert told["layout"] == {"kind": "native", "dp": 1, "pp": 1, "cp": 1, "tp": 2, "ep": 1, "etp": 1}
    assert (told["world_size"], told["n_steps"]) == (2, 3)
    assert 0 <= told["loss_abs"] <= 1e-6
    assert 0 < told["worst_grad"]["rel"] <= 1e-5
    assert told["worst_grad"]["name"] in told["gradients"]
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_difference_out_of_tolerance_ends_with_1_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank computes in fp32 is never quite fp64: with no tolerance at all that is a difference."""
    monkeypatch.setattr(Tolerances, "of", lambda _: Tolerances(0.0, 0.0, 0.0, 0.0, 0.0))
    settings = ("--set", "strategy.dp=4", "--set", "train.global_batch_size=8", "--steps", "1")
    answer = command("parity", str(SPEC), *settings, "--max-ranks", "2")
    assert answer.code == 1, answer
    assert "note: dp=4 is lowered to 2: 4 ranks are more than 2" in answer.err
    lines = answer.out.splitlines()
    assert lines[0] == "native dp=2: 2 ranks against one process, fp32"
    assert any(line.startswith("gradient of lm_head.weight differs by") for line in lines)
    assert any(line.endswith("<--") for line in lines)
    assert lines[-1].startswith("NOT equal to one process (")


def test_a_layout_of_too_many_ranks_is_refused_before_anything_starts() -> None:
    answer = command("parity", str(SPEC), "--set", "strategy.tp=4", "--max-ranks", "2")
    assert answer.code == 2
    assert "4 ranks are too many for this machine (at most 2)" in answer.err


def test_the_machine_says_how_many_ranks_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [default_max_ranks(n_cores) for n_cores in (1, 2, 4, 64)] == [8, 8, 16, 256]
    monkeypatch.setattr("service.parity.default_max_ranks", lambda n_cores: 1)
    answer = command("parity", str(SPEC), "--set", "strategy.tp=2")
    assert answer.code == 2
    assert "2 ranks are too many for this machine (at most 1)" in answer.err


def fail_on_rank_1(groups) -> int:
    if groups.rank == 1:
        raise ValueError("the reason")
    return 5


def die_on_rank_1(groups) -> int:
    if groups.rank == 1:
        os._exit(7)
    return 5


def rank_of(groups, more: int) -> int:
    return groups.rank + more


def test_ranks_return_in_order_and_raise_with_their_traceback(tmp_path: Path) -> None:
    ranks = LocalRanks(RANKS_PRELOAD, tmp_path)
    assert ranks.run(rank_of, Mesh(tp=2), 1, 10) == [10, 11]
    with pytest.raises(PacktrainError, match=r"(?s)rank 1 of 2: Traceback.*ValueError: the reason"):
        ranks.run(fail_on_rank_1, Mesh(dp=2), 1)
    with pytest.raises(PacktrainError, match="rank 1 of 2: died with exit code 7"):
        ranks.run(die_on_rank_1, Mesh(dp=2), 1)
    assert not [p for p in psutil.Process().children() if "rank_of" in p.name()]


def test_memory_is_refused_with_both_numbers() -> None:
    check_memory(4, 2**30)
    with pytest.raises(
        SpecError, match=r"32 ranks x 160 MiB = 5.0 GiB wanted, but 1.0 GiB are free: room for 6"
    ):
        check_memory(32, 2**30)


STARTER = """
import sys, time
from pathlib import Path
from jobs.mesh import Mesh
from service.local_ranks import LocalRanks
from tests.unit.service.test_parity import tell_and_sleep

if __name__ == "__main__":
    LocalRanks((), Path(sys.argv[1])).run(tell_and_sleep, Mesh(dp=2), 1, sys.argv[1])
"""


def tell_and_sleep(groups, folder: str) -> None:
    Path(folder, f"pid-{groups.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def test_ranks_end_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], cwd=tmp_path, env=command_environment()
    )
    try:
        _until(lambda: len(_pids(tmp_path)) == 2)
        pids = _pids(tmp_path)
    finally:
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    _until(lambda: not any(_is_alive(pid) for pid in pids))


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(holds, limit_s: float = 40.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
