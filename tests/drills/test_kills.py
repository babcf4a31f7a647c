"""SIGKILL of every process of a run, at random moments, over engines and precisions: nothing is lost.

Each disturbed run must end with the weights, moments and counters of the undisturbed one, bit for bit.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.live_runs import LiveRun, live_run, resumed_run, shard_checksums

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
STEPS = 30
LAYOUTS = {
    "native-fp32": ("strategy.dp=2",),
    "native-bf16": ("strategy.dp=2", "train.precision=bf16"),
    "native-slow": (
        "strategy.dp=2",
        "train.global_batch_size=32",
        "train.micro_batch_size=16",
        "data.seq_len=256",
    ),
    "native-tp2": ("strategy.tp=2",),
    "native-pp2": ("strategy.pp=2",),
    "zero3-bf16": ("strategy={kind: deepspeed_zero, dp: 2, stage: 3}", "train.precision=bf16"),
}
SLOW_STEPS = 60
"""Of native-slow: Ray may take half a minute to notice a loss, and the run must be under way then."""
_calm: dict[str, list[list[int]]] = {}


def calm_checksums(layout: str, folder: Callable[[str], Path]) -> list[list[int]]:
    """Checksums of the undisturbed run of a layout, run once a session."""
    if layout not in _calm:
        steps = SLOW_STEPS if layout == "native-slow" else STEPS
        with live_run(folder("calm"), f"calm-{layout}", f"train.steps={steps}", *LAYOUTS[layout]) as run:
            assert run.wait() == 0, run.text()
            _calm[layout] = shard_checksums(run.run_dir, steps)
    return _calm[layout]


def kill(run: LiveRun, *marks: str) -> None:
    pid = run.pid_of(*marks)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("layout", ["native-fp32", "native-bf16", "native-tp2", "native-pp2", "zero3-bf16"])
def test_ranks_and_shells_killed_at_random_moments(
    layout: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three ranks and one shell, at moments drawn anew each time (printed on failure), saves among them."""
    expected = calm_checksums(layout, tmp_path_factory.mktemp)
    seed = time.time_ns() % 10**6
    draw = random.Random(seed)
    name = f"hit-{layout}"
    with live_run(tmp_path, name, f"train.steps={STEPS}", *LAYOUTS[layout]) as run:
        for number, step in enumerate(sorted(draw.sample(range(2, STEPS - 3), 4))):
            run.until_step(step)
            time.sleep(draw.random() * 0.2)
            what = "shell of rank 1" if number == 2 else f"rank {draw.randrange(2)}:"
            with contextlib.suppress(AssertionError, ProcessLookupError):  # it may be between two generations
                kill(run, f"packtrain[{name}] {what}")
        assert run.wait(400) == 0, f"seed {seed}: {run.text()}"
        assert run.events("incident"), f"seed {seed}: nothing was hit"
        assert shard_checksums(run.run_dir, STEPS) == expected, f"seed {seed}"
        actions = {event["action"] for event in run.events("incident")}
        assert actions <= {"RESTART_RANKS", "RESTART"}


def test_a_kill_in_the_middle_of_a_save(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The rank dies while shards of a checkpoint are being written: the torn folder is never taken."""
    expected = calm_checksums("native-fp32", tmp_path_factory.mktemp)
    with live_run(tmp_path, "torn", f"train.steps={STEPS}", *LAYOUTS["native-fp32"]) as run:
        run.until(lambda: any((run.run_dir / "checkpoints").glob("step-00000010*")), "the save of step 10")
        with contextlib.suppress(AssertionError):
            kill(run, "packtrain[torn] rank 0:")
        assert run.wait(300) == 0, run.text()
        assert shard_checksums(run.run_dir, STEPS) == expected


@pytest.mark.parametrize(
    ("mark", "culprit"),
    [("controller of attempt", "Ray Train controller"), ("ray::Coordinator", "coordinator")],
)
def test_a_killed_ray_actor_of_the_run(
    mark: str, culprit: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = calm_checksums("native-slow", tmp_path_factory.mktemp)
    with live_run(tmp_path, "beheaded", f"train.steps={SLOW_STEPS}", *LAYOUTS["native-slow"]) as run:
        run.until_step(12)
        kill(run, mark)
        assert run.wait(300) == 0, run.text()
        assert [event["culprit"] for event in run.events("incident")] == [culprit]
        assert len(run.events("attempt_started")) == 2
    assert shard_checksums(run.run_dir, SLOW_STEPS) == expected


def test_a_killed_fork_server(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = calm_checksums("native-fp32", tmp_path_factory.mktemp)
    with live_run(tmp_path, "forkless", f"train.steps={STEPS}", *LAYOUTS["native-fp32"]) as run:
        run.until_step(12)
        rank = psutil.Process(run.pid_of("packtrain[forkless] rank 1:"))
        os.kill(rank.ppid(), signal.SIGKILL)
        assert run.wait(300) == 0, run.text()
        assert [event["action"] for event in run.events("incident")] == ["RESTART_RANKS"]
    assert shard_checksums(run.run_dir, STEPS) == expected


def test_a_killed_raylet_of_the_embedded_cluster_is_followed_by_resume(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ray ends a driver whose own node is gone, sooner or later; what was committed is kept."""
    expected = calm_checksums("native-slow", tmp_path_factory.mktemp)
    with live_run(tmp_path, "nodeless", f"train.steps={SLOW_STEPS}", *LAYOUTS["native-slow"]) as run:
        run.until_step(12)
        kill(run, "raylet/raylet")
        run.wait(300)
    if not any(event["status"] == "FINISHED" for event in run.events("run_ended")):
        with resumed_run(tmp_path, "nodeless") as again:
            assert again.wait(300) == 0, again.text()
    assert shard_checksums(run.run_dir, SLOW_STEPS) == expected
