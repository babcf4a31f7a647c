"""Numbers and pace gone wrong in real runs: NaN, flipped bits, slow ranks, damaged checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_runs import LiveRun, live_run, packtrain

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
STEPS = 60
BASE = (
    f"train.steps={STEPS}",
    "train.global_batch_size=12",
    "checkpoint.keep_last=9",
    "resilience.digest_every_steps=4",
    "resilience.straggler_window_steps=8",
)


def drill(run: LiveRun, fault: str, rank: int) -> None:
    done = packtrain("drill", fault, str(run.run_dir), "--rank", str(rank), cwd=run.run_dir)
    assert done.returncode == 0, done.stderr
    run.until(lambda: any(event["fault"] == fault for event in run.events("drill")), f"the drill {fault}")


def verdicts(run: LiveRun) -> list[tuple[str, str, str]]:
    return [(event["class"], event["culprit"], event["action"]) for event in run.events("incident")]


def test_bad_data_is_gone_back_for_and_passed_over(tmp_path: Path) -> None:
    with live_run(tmp_path, "data", *BASE, "strategy.dp=2") as run:
        run.until_step(12)
        drill(run, "nan-data", 1)
        assert run.wait(300) == 0, run.text()
        ((failure_class, culprit, action),) = verdicts(run)
        assert (failure_class, action) == ("numerics", "ROLLBACK")
        assert culprit.startswith("rank 1 ")
        (back,) = run.events("rolled_back")
        bad = next(event["samples"] for event in run.events("drill") if "samples" in event)
        ((first, stop),) = back["skip_samples"]
        assert first <= bad[0]
        assert bad[-1] < stop
        lines = run.metrics()
        assert [line["skipped"] for line in lines].count(True) == 1
        last = [line for line in lines if line["step"] == STEPS][-1]
        assert last["sample_ordinal"] == STEPS * 12 + stop - first
        manifest = json.loads((run.run_dir / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
        assert manifest["progress"]["skipped_samples"] == [[first, stop]]
        assert list((run.run_dir / "set_aside").iterdir())


def test_a_slip_of_one_rank_names_it(tmp_path: Path) -> None:
    with live_run(tmp_path, "slip", *BASE, "strategy.dp=2") as run:
        run.until_step(12)
        drill(run, "nan", 0)
        assert run.wait(300) == 0, run.text()
        ((failure_class, culprit, action),) = verdicts(run)
        assert (failure_class, action) == ("numerics", "ROLLBACK")
        assert culprit.startswith("rank 0 ")
        (bad,) = [line for line in run.metrics() if line["skipped"]]
        replayed = packtrain("replay", str(run.run_dir), "--step", str(bad["step"]), "--json", cwd=tmp_path)
        assert json.loads(replayed.stdout)["steps"][-1]["verdict"] == "clean_here", replayed.stderr


def test_a_flipped_bit_among_three_replicas_names_its_rank_and_training_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path, "flip", *BASE, "strategy.dp=3") as run:
        run.until_step(6)
        drill(run, "bit-flip", 1)
        assert run.wait(300) == 0, run.text()
    (found,) = [event for event in run.events("incident") if event["detector"] == "replica_digest"]
    assert (found["class"], found["action"]) == ("gpu_hardware", "OBSERVE")
    assert "none of 1 nodes would be left" in found["reason"], "else it would be left"
    assert found["culprit"].startswith("rank 1 (node ")
    assert found["good_step"] <= found["step"] - 4


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    larger: tuple[Any, ...] = ("data.seq_len=128", "train.micro_batch_size=3")
    with live_run(tmp_path, "slow", *BASE, *larger, "strategy.dp=2") as run:
        run.until_step(6)
        drill(run, "slow", 1)
        assert run.wait(300) == 0, run.text()
    found = [event for event in run.events("incident") if event["detector"] == "straggler"]
    workers = [event for event in found if event["symptom"] == "straggler_worker"]
    assert [event["culprit"].partition(" (")[0] for event in workers] == ["rank 1"]
    assert workers[0]["action"] in ("OBSERVE", "PAGE")


def test_a_damaged_newest_checkpoint_is_kept_aside(tmp_path: Path) -> None:
    with live_run(tmp_path, "rot", *BASE, "strategy.dp=2") as run:
        run.until_step(22)
        drill(run, "corrupt", 0)
        assert run.wait(300) == 0, run.text()
        assert [action for _, _, action in verdicts(run)] == ["RESTART_RANKS"]
        (kept,) = run.events("checkpoint_set_aside")
        restored = run.events("restored")[-1]
        assert restored["step"] < kept["step"]
        assert Path(kept["kept_as"]).is_dir()
