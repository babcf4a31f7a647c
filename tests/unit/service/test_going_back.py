"""A rollback from the incident to the ranks that go on: a real rank, real checkpoints, real orders."""

import asyncio
from pathlib import Path
from typing import Any

from ops.checkpoint.layout import CHECKPOINTS_DIR, committed_steps, folder_name
from ops.checkpoint.manifest import read_manifest
from ops.decision import Action
from ops.diagnosis.rank_exits import RankExit
from ops.ledger import LedgerWriter, read_ledger, read_metrics
from service.coordinator import Coordinator
from service.fork_client import ForkServer
from service.going_back import GoingBack, StartPoint
from service.orders import Order, ShellInfo
from service.run_store import RUNNING
from tests.support.one_rank import run_one_rank
from tests.support.stored_runs import stopped_run

SPEC = """\
model: {preset: tiny, n_layers: 1}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 16
optim: {lr: 1e-3, schedule: {kind: constant}}
train: {steps: STEPS, global_batch_size: 4, micro_batch_size: 4}
run: {name: one, storage: FOLDER}
checkpoint: {every_steps: 2, asynchronous: false, keep_last: 9}
tracking: {mlflow: false, peak_tflops: 1.0}
"""


def start(folder: Path, steps: int) -> Path:
    (folder / "corpus.txt").write_text("hello world. " * 500)
    text = SPEC.replace("FOLDER", str(folder)).replace("STEPS", str(steps))
    (folder / "spec.yaml").write_text(text)
    return stopped_run(folder / "spec.yaml", (), status=RUNNING)


async def orders_after_a_bad_loss(run_dir: Path) -> list[Order]:
    coordinator = Coordinator(str(run_dir), "{}")
    await coordinator.begin_attempt(0, 1)
    await coordinator.join(0, ShellInfo(0, "10.0.0.1", "id", 1, sees_storage=True))
    error = {"error_type": "jobs.errors.NumericError", "traceback": "...", "failure_class": "numerics"}
    await coordinator.report_exit(0, 0, RankExit(0, "10.0.0.1", 1.0, 1, **error), "")
    return await coordinator.orders(0, 0)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir) if "grad_norm" in line]


def test_a_run_goes_back_passes_over_its_data_and_knows_that_ever_after(
    server: ForkServer, tmp_path: Path
) -> None:
    run_dir = start(tmp_path, 7)
    folder = run_dir / CHECKPOINTS_DIR
    assert run_one_rank(server, run_dir).outcome == "finished"
    assert committed_steps(folder) == [2, 4, 6, 7]
    orders = asyncio.run(orders_after_a_bad_loss(run_dir))
    assert [order.kind for order in orders] == ["start", "kill", "start"]
    assert [order.start for order in orders[::2]] == [StartPoint(), StartPoint(6, ((24, 28),))]
    assert committed_steps(folder) == [2, 4, 6]
    assert [path.name for path in (run_dir / "set_aside").iterdir()] == ["step-00000007-001"]
    end = run_one_rank(server, run_dir, generation=1, start=orders[-1].start)
    assert end.outcome == "finished"
    (again,) = [line for line in steps_of(run_dir) if line["generation"] == 1]
    assert (again["step"], again["sample_ordinal"]) == (7, 32)
    assert again["loss"] != steps_of(run_dir)[6]["loss"]
    progress = read_manifest(folder / folder_name(7)).progress
    assert (progress.sample_ordinal, progress.skipped_samples) == (32, ((24, 28),))
    # A later driver: nothing is due any more, and the samples stay passed over.
    ledger = LedgerWriter(run_dir / "ledger" / "later.jsonl")
    assert GoingBack(run_dir, ledger).start_point(1, 0) == StartPoint(None, ((24, 28),))


def test_a_driver_that_died_after_the_decision_leaves_it_to_the_next(
    server: ForkServer, tmp_path: Path
) -> None:
    run_dir = start(tmp_path, 4)
    assert run_one_rank(server, run_dir).outcome == "finished"
    LedgerWriter(run_dir / "ledger" / "coordinator.jsonl").write(
        "incident", **{"class": "numerics"}, action="ROLLBACK", checkpoints_back=1, skips_data=True, step=4
    )

    async def orders() -> list[Order]:
        coordinator = Coordinator(str(run_dir), "{}")
        await coordinator.begin_attempt(1, 1)
        await coordinator.join(1, ShellInfo(0, "10.0.0.1", "id", 1, sees_storage=True))
        return await coordinator.orders(1, 0)

    (order,) = asyncio.run(orders())
    assert order.start == StartPoint(2, ((8, 16),))
    assert committed_steps(run_dir / CHECKPOINTS_DIR) == [2]
    (event,) = [event for event in read_ledger(run_dir) if event.kind == "rolled_back"]
    assert (event.integer("step"), event.fields["skip_samples"]) == (2, [[8, 16]])


def test_a_folder_that_cannot_be_moved_is_still_not_restored(server: ForkServer, tmp_path: Path) -> None:
    run_dir = start(tmp_path, 4)
    assert run_one_rank(server, run_dir).outcome == "finished"
    (run_dir / "set_aside").write_text("in the way")
    orders = asyncio.run(orders_after_a_bad_loss(run_dir))
    assert committed_steps(run_dir / CHECKPOINTS_DIR) == [2, 4]
    assert orders[-1].start.restore_before == 2
    assert run_one_rank(server, run_dir, generation=1, start=orders[-1].start).outcome == "finished"
    (event,) = [event for event in read_ledger(run_dir) if event.kind == "rolled_back"]
    assert "set_aside" in event.text("error")
    assert [event.integer("step") for event in read_ledger(run_dir) if event.kind == "restored"] == [2]


def test_the_newest_checkpoint_damaged_is_kept_aside_and_the_one_before_it_taken(
    server: ForkServer, tmp_path: Path
) -> None:
    run_dir = start(tmp_path, 4)
    assert run_one_rank(server, run_dir).outcome == "finished"
    folder = run_dir / CHECKPOINTS_DIR
    (shard,) = (folder / folder_name(4)).glob("*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    assert run_one_rank(server, run_dir, generation=1).outcome == "finished"
    assert [event.integer("step") for event in read_ledger(run_dir) if event.kind == "restored"] == [2]
    (kept,) = [event for event in read_ledger(run_dir) if event.kind == "checkpoint_set_aside"]
    assert Path(kept.text("kept_as"), shard.name).read_bytes() != whole
    assert shard.read_bytes() == whole, "saved again, from the older one, bit for bit"


def test_the_same_verdict_again_goes_back_further_then_stops(server: ForkServer, tmp_path: Path) -> None:
    run_dir = start(tmp_path, 9)
    assert run_one_rank(server, run_dir).outcome == "finished"

    async def play() -> list[Order]:
        coordinator = Coordinator(str(run_dir), "{}")
        await coordinator.begin_attempt(0, 1)
        await coordinator.join(0, ShellInfo(0, "10.0.0.1", "id", 1, sees_storage=True))
        error = {"error_type": "jobs.errors.NumericError", "traceback": "...", "failure_class": "numerics"}
        for generation in range(3):
            await coordinator.report_exit(0, generation, RankExit(0, "n", 1.0, 1, **error), "")
        return await coordinator.orders(0, 0)

    orders = asyncio.run(play())
    assert [order.kind for order in orders] == ["start", "kill"] * 3 + ["end"]
    assert [order.start.restore_before for order in orders if order.kind == "start"] == [None, 8, 4]
    actions = [event.text("action") for event in read_ledger(run_dir) if event.kind == "incident"]
    assert actions == [Action.ROLLBACK, Action.ROLLBACK, Action.STOP]
