"""A run saves, is lost, and goes on: with the real native engine, on one and several ranks."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.engines.native import NativeEngine
from jobs.errors import CheckpointError
from jobs.events import Progress, StepRecord
from jobs.optim.schedule import lr_at
from jobs.spec.compare import model_fingerprint
from jobs.spec.job import CheckpointSection
from ops.checkpoint import writer as writer_module
from ops.checkpoint.layout import MANIFEST, committed_steps, folder_name, shard_name
from ops.checkpoint.manifest import CorruptCheckpointError, Identity
from ops.checkpoint.reader import open_checkpoint
from ops.checkpoint.writer import Peers
from service import checkpoint_hook
from service.checkpoint_hook import CheckpointHook, restore
from tests.support.checkpoints import Events
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import engine_step, tiny_model, tiny_spec

CPU = torch.device("cpu")


def train(groups: Groups, folder: str, until: int, options: dict[str, Any]) -> dict[str, Any]:
    """Restore, train to step `until` with the hook, end. Returns what can be compared."""
    spec = tiny_spec(dp=groups.world_size, model=tiny_model(**options.get("model", {})))
    engine = NativeEngine(spec, groups, CPU)
    events = Events()
    fingerprint = model_fingerprint(spec.model)
    checkpoint_dir = Path(folder)
    torch.manual_seed(100 + groups.rank)
    if options.get("break"):
        options["break"](groups)
    progress = restore(
        engine,
        checkpoint_dir,
        groups,
        fingerprint,
        lambda step: lr_at(spec.optim, spec.train.steps, step),
        events,
        CPU,
    )
    first_step = progress.step
    section = CheckpointSection(**{"every_steps": 2, "keep_last": 2, **options.get("section", {})})
    store_path = Path(f"{folder}.store-{first_step}-{options.get('name', '')}")
    peers = Peers(groups.rank, groups.world_size, dist.FileStore(str(store_path), groups.world_size))
    hook = CheckpointHook(
        section, checkpoint_dir, Identity(fingerprint, "native", groups.mesh), peers, events, CPU
    )
    hook.on_start(engine, progress)
    losses, draws = [], []
    for step in range(progress.step, until):
        result = engine_step(engine, spec, groups.rank, step)
        losses.append(result.loss)
        draws.append(float(torch.rand(())))
        progress = Progress(step + 1, (step + 1) * 12, (step + 1) * 100)
        record = StepRecord(
            step=step + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=0.0,
            n_tokens=100,
            n_padding_tokens=0,
            step_time_s=1.0,
            data_time_s=0.0,
            tokens_seen=progress.tokens_seen,
            sample_ordinal=progress.sample_ordinal,
        )
        hook.after_step(record, engine)
    hook.on_end("finished", engine, progress)
    state = {f"{c.name}@{c.offsets}": c.tensor.clone() for c in engine.chunks()}
    return {"first_step": first_step, "losses": losses, "draws": draws, "state": state, "events": events}


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_equals_undisturbed_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    options: dict[str, Any] = {"name": "first"}
    whole = run_ranks(train, world_size, tmp_path, str(tmp_path / "whole"), 9, options)
    run_ranks(train, world_size, tmp_path, str(tmp_path / "cut"), 5, options)
    assert committed_steps(tmp_path / "cut")[-1] == 5
    rest = run_ranks(train, world_size, tmp_path, str(tmp_path / "cut"), 9, {"name": "second"})
    for rank in range(world_size):
        assert rest[rank]["first_step"] == 5
        assert rest[rank]["losses"] == whole[rank]["losses"][5:]
        assert rest[rank]["draws"] == whole[rank]["draws"][5:]
        assert rest[rank]["state"].keys() == whole[rank]["state"].keys()
        for name, tensor in rest[rank]["state"].items():
            assert torch.equal(tensor, whole[rank]["state"][name]), name
    restored = rest[0]["events"].of("restored")
    assert [event["step"] for event in restored] == [5]
    for folder in ("cut", "whole"):
        steps = committed_steps(tmp_path / folder)
        assert (len(steps), steps[-1]) == (2, 9)


def test_resumed_on_fewer_ranks_the_loss_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run_ranks(train, 2, tmp_path, str(tmp_path / "whole"), 8, {})
    run_ranks(train, 2, tmp_path, str(tmp_path / "cut"), 4, {"name": "a"})
    rest = run_ranks(train, 1, tmp_path, str(tmp_path / "cut"), 8, {"name": "b"})
    assert rest[0]["first_step"] == 4
    assert rest[0]["losses"] == pytest.approx(whole[0]["losses"][4:], abs=1e-5)


def save_as_a_gpu_rank(groups: Groups) -> None:
    real = checkpoint_hook.rng_state

    def longer(device: torch.device) -> torch.Tensor:
        return torch.cat((real(device), torch.zeros(16, dtype=torch.uint8)))

    checkpoint_hook.rng_state = longer


def test_random_states_of_another_kind_of_device_are_left_alone(tmp_path: Path) -> None:
    whole = run_ranks(train, 1, tmp_path, str(tmp_path / "whole"), 4, {})[0]
    run_ranks(train, 1, tmp_path, str(tmp_path / "cut"), 2, {"name": "a", "break": save_as_a_gpu_rank})
    rest = run_ranks(train, 1, tmp_path, str(tmp_path / "cut"), 4, {"name": "b"})[0]
    assert rest["losses"] == whole["losses"][2:]
    assert rest["draws"] == whole["draws"][:2], "the stream that this rank began is gone on with"


def corrupt_shard(folder: Path, step: int, rank: int, world_size: int) -> None:
    path = folder / folder_name(step) / shard_name(rank, world_size)
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1
    path.write_bytes(bytes(data))


def test_a_corrupt_checkpoint_is_passed_over_by_all_with_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_ranks(train, 2, tmp_path, str(folder), 4, {"name": "a"})
    corrupt_shard(folder, 4, 1, 2)
    results = run_ranks(train, 2, tmp_path, str(folder), 5, {"name": "b"})
    assert [r["first_step"] for r in results] == [2, 2]
    skipped = results[0]["events"].of("checkpoint_skipped")
    assert len(skipped) == 1
    assert skipped[0]["path"].endswith(folder_name(4))
    assert "rank 1" in skipped[0]["reason"]
    assert "checksum" in skipped[0]["reason"]
    assert results[1]["events"].of("checkpoint_skipped") == []


def break_rank_one_verify(groups: Groups) -> None:
    real = checkpoint_hook.check_shards

    def check(ref: Any, ranks: Any) -> None:
        if groups.rank == 1 and ref.step == 4:
            raise CorruptCheckpointError("this node reads other bytes")
        real(ref, ranks)

    checkpoint_hook.check_shards = check


def break_rank_one_load(groups: Groups) -> None:
    real = checkpoint_hook.load_into

    def load(ref: Any, *args: Any, **kwargs: Any) -> Any:
        progress = real(ref, *args, **kwargs)
        if groups.rank == 1 and ref.step == 4:
            raise CorruptCheckpointError("this node's link broke while reading")
        return progress

    checkpoint_hook.load_into = load


@pytest.mark.parametrize("break_rank", [break_rank_one_verify, break_rank_one_load])
def test_one_rank_that_cannot_read_makes_all_fall_back_together(tmp_path: Path, break_rank: Any) -> None:
    folder = tmp_path / "c"
    whole = run_ranks(train, 2, tmp_path, str(folder), 4, {"name": "a"})
    results = run_ranks(train, 2, tmp_path, str(folder), 4, {"name": "b", "break": break_rank})
    assert [r["first_step"] for r in results] == [2, 2]
    assert results[0]["losses"] == whole[0]["losses"][2:]
    assert "rank 1: this node" in results[0]["events"].of("checkpoint_skipped")[0]["reason"]


def break_every_load(groups: Groups) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise CorruptCheckpointError("broken")

    checkpoint_hook.load_into = load


def errors_of_restore(groups: Groups, folder: str, options: dict[str, Any]) -> str:
    try:
        train(groups, folder, 4, options)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_half_loaded_state_is_never_trained_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    run_ranks(train, 2, tmp_path, folder, 4, {"name": "a"})
    texts = run_ranks(errors_of_restore, 2, tmp_path, folder, {"name": "b", "break": break_every_load})
    for text in texts:
        assert "no checkpoint in" in text
        assert f"{folder_name(4)}: rank 0: broken; rank 1: broken" in text


def test_all_checkpoints_damaged_is_an_error_on_all_ranks_and_beginning_anew_is_the_users_choice(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    run_ranks(train, 2, tmp_path, str(folder), 4, {"name": "a"})
    corrupt_shard(folder, 2, 0, 2)
    (folder / folder_name(4) / shard_name(1, 2)).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts = run_ranks(errors_of_restore, 2, tmp_path, str(folder), {"name": "b"})
    assert texts[0] == texts[1]
    assert f"no checkpoint in {folder} can be read whole: {folder_name(4)}: the shard of rank 1" in texts[0]
    assert "is missing" in texts[0]
    assert f"{folder_name(2)}: rank 0: the shard of rank 0" in texts[0]
    assert "does not match its checksum" in texts[0]
    assert "remove them or move them elsewhere" in texts[0]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / folder_name(4)).rename(folder / "bad-4")  # its manifest is in it; it is ours no more
    shutil.rmtree(folder / folder_name(2))
    results = run_ranks(train, 2, tmp_path, str(folder), 1, {"name": "c"})
    assert [r["first_step"] for r in results] == [0, 0]
    assert committed_steps(folder) == [1]


def no_manifest_can_be_read(groups: Groups) -> None:
    real = Path.read_text

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.name == MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self, *args, **kwargs)

    Path.read_text = read  # type: ignore[method-assign]


def no_manifest_can_be_looked_for(groups: Groups) -> None:
    real = Path.stat
    no_manifest_can_be_read(groups)

    def stat(self: Path, **kwargs: Any) -> os.stat_result:
        if self.name == MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self, **kwargs)

    Path.stat = stat  # type: ignore[method-assign]


def the_folder_cannot_be_listed(groups: Groups) -> None:
    real = Path.iterdir

    def iterdir(self: Path) -> Any:
        if groups.rank == 0 and self.name == "c":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self)

    Path.iterdir = iterdir  # type: ignore[method-assign]


def test_a_storage_that_fails_for_a_minute_does_not_send_the_run_back_to_zero(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_ranks(train, 2, tmp_path, str(folder), 2, {"name": "a"})
    for fault in (no_manifest_can_be_read, no_manifest_can_be_looked_for, the_folder_cannot_be_listed):
        texts = run_ranks(errors_of_restore, 2, tmp_path, str(folder), {"name": "b", "break": fault})
        assert all("no checkpoint in" in text and "Input/output error" in text for text in texts), fault
    results = run_ranks(train, 2, tmp_path, str(folder), 3, {"name": "c"})
    assert [r["first_step"] for r in results] == [2, 2]


def test_a_save_that_was_cut_off_sends_the_run_to_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_ranks(train, 1, tmp_path, str(folder), 4, {"name": "a"})
    (folder / folder_name(4) / MANIFEST).unlink()
    assert run_ranks(train, 1, tmp_path, str(folder), 5, {"name": "b"})[0]["first_step"] == 2


def test_another_model_is_refused_on_all_ranks_and_not_passed_over(tmp_path: Path) -> None:
    # NVIDIA-NeMo/Automodel#836: the shapes are equal, the rope base is not.
    folder = str(tmp_path / "c")
    run_ranks(train, 2, tmp_path, folder, 2, {"name": "a"})
    options = {"name": "b", "model": {"rope_theta": 1e4}}
    texts = run_ranks(errors_of_restore, 2, tmp_path, folder, options)
    assert all("rope_theta is 500000.0 in the checkpoint and 10000.0 in this run" in text for text in texts)


def hide_a_name(groups: Groups) -> None:
    """Rank 1 wants one name that nobody saved, and no rank wants one that was."""
    real = NativeEngine.chunks

    def chunks(self: NativeEngine) -> Any:
        found = [c for c in real(self) if c.name != "optim/exp_avg/norm.weight"]
        if groups.rank == 1:
            from dataclasses import replace

            found.append(replace(found[0], name="model/unsaved.weight"))
        return found

    NativeEngine.chunks = chunks  # type: ignore[method-assign]


def test_names_are_strict_over_all_ranks_together(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    run_ranks(train, 2, tmp_path, folder, 2, {"name": "a"})
    texts = run_ranks(errors_of_restore, 2, tmp_path, folder, {"name": "b", "break": hide_a_name})
    for text in texts:
        assert "optim/exp_avg/norm.weight is in the checkpoint and nothing expects it" in text
        assert "rank 1: model/unsaved.weight is expected and not in the checkpoint" in text


def test_without_checkpoints_training_begins_at_zero(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (folder / folder_name(7)).mkdir(parents=True)
    result = run_ranks(train, 1, tmp_path, str(folder), 1, {})[0]
    assert result["first_step"] == 0
    assert "not finished" in result["events"].of("checkpoint_skipped")[0]["reason"]
    assert committed_steps(folder) == [1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_at_the_end_where_no_interval_is_given(tmp_path: Path, asynchronous: bool) -> None:
    section = {"every_steps": None, "asynchronous": asynchronous}
    result = run_ranks(train, 1, tmp_path, str(tmp_path / "c"), 3, {"section": section})[0]
    assert committed_steps(tmp_path / "c") == [3]
    assert [e["step"] for e in result["events"].of("checkpoint_committed")] == [3]


def test_synchronous_saves_each_time(tmp_path: Path) -> None:
    options = {"section": {"every_steps": 1, "asynchronous": False, "keep_last": 9}}
    run_ranks(train, 1, tmp_path, str(tmp_path / "c"), 4, options)
    assert committed_steps(tmp_path / "c") == [1, 2, 3, 4]
    assert open_checkpoint(tmp_path / "c" / folder_name(3)).manifest.progress == Progress(3, 36, 300)


def slow_first_write(groups: Groups) -> None:
    real = writer_module.write_shard
    n_calls = []

    def write(*args: Any) -> Any:
        n_calls.append(1)
        if len(n_calls) == 1:
            time.sleep(1.0)
        return real(*args)

    writer_module.write_shard = write


def test_a_save_that_came_too_early_is_done_at_the_next_chance(tmp_path: Path) -> None:
    options = {"section": {"every_steps": 2, "keep_last": 9}, "break": slow_first_write}
    result = run_ranks(train, 1, tmp_path, str(tmp_path / "c"), 6, options)[0]
    assert len(result["events"].of("checkpoint_skipped")) == 1
    assert result["events"].of("checkpoint_failed") == []
    assert {2, 6} <= set(committed_steps(tmp_path / "c"))


def no_disk(groups: Groups) -> None:
    def write(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    writer_module.write_shard = write


def test_saves_that_fail_never_stop_training(tmp_path: Path) -> None:
    result = run_ranks(train, 2, tmp_path, str(tmp_path / "c"), 4, {"break": no_disk})
    assert len(result[0]["losses"]) == 4
    assert {e["step"] for e in result[0]["events"].of("checkpoint_failed")} == {2, 4}
    assert committed_steps(tmp_path / "c") == []


def one_rank_is_late(groups: Groups) -> None:
    """Rank 1 is at work on the save of step 2 when rank 0 has given it up and is at the final one."""
    real_write, real_step = writer_module.write_shard, engine_step
    n_calls = []

    def write(*args: Any) -> Any:
        n_calls.append(1)
        if groups.rank == 1 and len(n_calls) == 1:
            time.sleep(5.5)
        return real_write(*args)

    def step(engine: Any, spec: Any, rank: int, number: int) -> Any:
        if number == 2:
            time.sleep(3)
        return real_step(engine, spec, rank, number)

    writer_module.write_shard = write
    globals()["engine_step"] = step
    checkpoint_hook._DECIDE_TIMEOUT_S = 0.3


def test_the_last_save_waits_for_a_rank_that_is_busy_with_an_earlier_one(tmp_path: Path) -> None:
    options = {"section": {"commit_timeout_s": 4.0}, "break": one_rank_is_late}
    results = run_ranks(train, 2, tmp_path, str(tmp_path / "c"), 3, options)
    failed = [e for r in results for e in r["events"].of("checkpoint_failed")]
    assert [e["step"] for e in failed] == [2]
    assert "ranks [1] did not report" in failed[0]["error"]
    assert committed_steps(tmp_path / "c") == [3]


def slow_removal(groups: Groups) -> None:
    real = checkpoint_hook.apply_retention

    def removal(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.5)
        return real(*args, **kwargs)

    checkpoint_hook.apply_retention = removal


def test_removing_old_checkpoints_holds_no_save_up_and_is_done_at_the_end(tmp_path: Path) -> None:
    section = {"every_steps": 1, "keep_last": 1, "asynchronous": False, "commit_timeout_s": 1.0}
    results = run_ranks(
        train, 2, tmp_path, str(tmp_path / "c"), 3, {"section": section, "break": slow_removal}
    )
    committed = results[0]["events"].of("checkpoint_committed")
    assert [e["step"] for e in committed] == [1, 2, 3]
    for result in results:
        assert not result["events"].of("checkpoint_failed")
        assert not result["events"].of("checkpoint_skipped")
    assert committed_steps(tmp_path / "c") == [3]
