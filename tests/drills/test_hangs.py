"""Ranks that stop moving: seen in time, the right one blamed with its stacks on disk, and not a bit lost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.drill import request_drill
from tests.support.live_runs import LiveRun, live_run, packtrain, shard_checksums

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]
STEPS = 150
SETTINGS = (
    f"train.steps={STEPS}",
    "strategy.dp=2",
    "checkpoint.every_steps=10",
    "train.evaluate_every_steps=50",
)
DETECTION_LIMIT_S = 10.0
_calm: list[list[list[int]]] = []


def calm_checksums(folder: Callable[[str], Path]) -> list[list[int]]:
    """Checksums of the undisturbed run, run once a session."""
    if not _calm:
        with live_run(folder("calm"), "calm", *SETTINGS) as run:
            assert run.wait(300) == 0, run.text()
            assert not run.events("incident"), run.text()
            _calm.append(shard_checksums(run.run_dir, STEPS))
    return _calm[0]


def median_step_s(run: LiveRun, until: int) -> float:
    times = sorted(line["step_time_s"] for line in run.metrics() if 1 < line["step"] <= until)
    return float(times[len(times) // 2])


@pytest.mark.parametrize(
    ("fault", "rank", "trace"),
    [("stop", 1, ""), ("sleep", 0, "strike"), ("hold-gil", 1, "strike"), ("spin", 0, "strike")],
)
def test_a_rank_that_does_not_move(
    fault: str, rank: int, trace: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = calm_checksums(tmp_path_factory.mktemp)
    with live_run(tmp_path, "hung", *SETTINGS) as run:
        run.until_step(25)
        request_drill(run.run_dir, fault, rank)
        assert run.wait(400) == 0, run.text()
    (incident,) = run.events("incident")
    assert (incident["class"], incident["action"]) == ("hang", "RESTART_RANKS")
    assert incident["culprit"].startswith(f"rank {rank} (node ")
    limit_s = max(DETECTION_LIMIT_S, 5 * median_step_s(run, incident["step"]))
    assert incident["detected_at"] - incident["failed_at"] <= limit_s
    folder = run.run_dir / "incidents" / "000-000"
    for other in (0, 1):
        stacks = (folder / f"rank-{other:05d}.stacks.txt").read_text()
        assert "train_from_newest_checkpoint" in stacks
    assert trace in (folder / f"rank-{rank:05d}.stacks.txt").read_text()
    assert (folder / f"flight-{1 - rank:05d}.pickle").exists()
    assert not run.events("monitor_off")
    assert shard_checksums(run.run_dir, STEPS) == expected


def test_a_gpu_off_the_bus_by_the_kernels_log_names_class_and_node(tmp_path: Path) -> None:
    """One node is all there is: what would be done is written down, and the run goes on where it can."""
    log = tmp_path / "kern.log"
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 79, from long before\n")
    longer = (*SETTINGS, f"train.steps={4 * STEPS}")
    with live_run(tmp_path, "xid", *longer, env={"PACKTRAIN_KERNEL_LOG": str(log)}) as run:
        run.until(lambda: bool(run.events("agent_joined")), "the node's agent")
        told = packtrain("drill", "xid", "xid", "--storage", str(run.run_dir.parent), cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        assert run.wait(400) == 0, run.text()
    (incident,) = run.events("incident")
    assert incident["class"] == "gpu_hardware"
    assert incident["symptom"] == "xid 79"
    assert incident["detector"] == "kernel_log"
    assert incident["entity"]["node"] == run.events("incident")[0]["situation"]["nodes"][0]
    assert "fallen off the bus" in incident["evidence"]
    assert "long before" not in json.dumps(incident)
    assert [event["fault"] for event in run.events("drill")] == ["xid"]
