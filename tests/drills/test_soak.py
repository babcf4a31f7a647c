"""No fault, and everything that looks like one: nobody is suspected, nothing is restarted, nothing is said.

Ranks are stopped and continued at random moments (steps that jitter), and for long in their first step; saves
block on a storage whose fsync takes seconds; evaluations come in between. Only on request:
`make drill ARGS="tests/drills/test_soak.py --soak-minutes 30"`. How rough it was is in the run's report.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.live_runs import LiveRun, live_run, packtrain

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]
STOP_S = (0.05, 3.0)
FIRST_STEP_STOP_S = 20.0
SLOW_FSYNC_MS = 4000
SOURCE = Path(__file__).parents[1] / "support" / "slow_fsync.c"


@pytest.fixture
def slow_fsync(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "slow_fsync.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def pause(run: LiveRun, rank: int, seconds: float) -> float:
    """Stop a rank and let it go on; how long it stood, 0 where it could not be found."""
    try:
        pid = run.pid_of(f"packtrain[{run.run_dir.name}] rank {rank}:")
        os.kill(pid, signal.SIGSTOP)
    except (AssertionError, ProcessLookupError):
        return 0.0
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return seconds


def test_nothing_is_suspected_while_nothing_fails(
    tmp_path: Path, slow_fsync: Path, request: pytest.FixtureRequest
) -> None:
    minutes = float(request.config.getoption("--soak-minutes"))
    if not minutes:
        pytest.skip("only on request: --soak-minutes 30")
    draw = random.Random(time.time_ns() % 10**6)
    overrides = (
        "strategy.dp=2",
        "train.steps=1000000",
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
        "data.seq_len=256",
        "train.evaluate_every_steps=17",
        "train.evaluate_batches=8",
        "checkpoint.every_steps=40",
        "checkpoint.asynchronous=false",
        f"resources.env={{LD_PRELOAD: {slow_fsync}, SLOW_FSYNC_MS: '{SLOW_FSYNC_MS}'}}",
    )
    stood_s = [0.0, 0.0]
    with live_run(tmp_path, "soak", *overrides) as run:
        run.until(lambda: bool(run.events("restored")), "the first step", timeout_s=400)
        assert pause(run, 1, FIRST_STEP_STOP_S) > 0
        run.until_step(3)
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            assert run.process.poll() is None, run.text()
            rank = draw.randrange(2)
            stood_s[rank] += pause(run, rank, draw.uniform(*STOP_S) if draw.random() < 0.3 else STOP_S[0])
            time.sleep(draw.uniform(0.2, 2.0))
        stopped = packtrain("stop", "soak", "--storage", str(tmp_path / "runs"), cwd=tmp_path, timeout_s=240)
        assert stopped.returncode == 0, stopped.stderr
        assert run.wait(120) == 3, run.text()
        text = run.text()

    assert run.events("incident") == [], text[-4000:]
    assert len(run.events("attempt_started")) == 1
    assert len(run.events("ranks_started")) == 1
    assert not (run.run_dir / "incidents").exists()
    assert run.events("monitor_off") == []

    steps = run.metrics()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    times_s = sorted(float(line["step_time_s"]) for line in steps[1:])
    saves_s = [float(event["blocked_s"]) for event in run.events("checkpoint_blocked")]
    # It was as rough as it says.
    assert float(steps[0]["step_time_s"]) > 0.9 * FIRST_STEP_STOP_S
    assert min(stood_s) > 5.0 * minutes / 3.0
    assert times_s[-1] > 1.5 + times_s[len(times_s) // 2]
    assert max(saves_s) > 1.0
