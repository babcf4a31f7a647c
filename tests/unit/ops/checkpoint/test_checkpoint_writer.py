"""One rank's writer: what blocks, what is written, and that no error reaches training."""

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from jobs.events import Progress
from jobs.state import Chunk
from ops.checkpoint import shard as shard_module
from ops.checkpoint import writer as writer_module
from ops.checkpoint.layout import committed_steps, folder_name, is_committed, list_steps, shard_name
from ops.checkpoint.reader import find_newest, load_into, read_tensor
from ops.checkpoint.removal import remove_checkpoint
from ops.checkpoint.staging import Staging
from ops.checkpoint.writer import AsyncWriter, Limits, Peers
from ops.durable import write_all
from tests.support.checkpoints import Events, assert_equal, empty_like, identity, make_state, save, whole


def load(checkpoint_dir: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ref = find_newest(checkpoint_dir, lambda path, reason: None)
    assert ref is not None
    found = empty_like(state)
    load_into(ref, whole(found))
    return found


def test_a_save_comes_back_bit_for_bit_with_its_progress(tmp_path: Path) -> None:
    state = make_state(3)
    state["model/bf16"] = torch.randn(5, 3).bfloat16()
    state["model/half"] = torch.randn(3).half()
    state["model/bool"] = torch.tensor([True, False, True])
    state["model/scalar"] = torch.tensor(2.5)
    state["model/empty"] = torch.empty(0, 4)
    events = Events()
    writer = AsyncWriter(tmp_path, identity(attempt=2), Peers(), events)
    rng = torch.get_rng_state()
    assert writer.save(whole(state), Progress(20, 160, 999), {"rng/rank-00000": rng}) == "started"
    assert writer.wait(20)
    ref = find_newest(tmp_path, lambda *_: None)
    assert ref is not None
    found = empty_like(state)
    assert load_into(ref, whole(found)) == Progress(20, 160, 999)
    assert_equal(found, state)
    assert torch.equal(read_tensor(ref, "rng/rank-00000"), rng)
    assert ref.manifest.identity == identity(attempt=2)
    assert sorted(kind for kind, _ in events) == ["checkpoint_blocked", "checkpoint_committed"]
    committed = events.of("checkpoint_committed")[0]
    assert committed["step"] == 20
    assert committed["path"] == str(tmp_path / folder_name(20))
    assert committed["n_bytes"] == sum(f.stat().st_size for f in ref.path.glob("*.safetensors"))


def test_the_shard_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    state = make_state(5)
    path = save(tmp_path, 1, state) / shard_name(0, 1)
    loaded = load_file(path)
    assert torch.equal(loaded["model/layers.0.w@0,0,0"], state["model/layers.0.w"])
    assert len(loaded) == len(state)
    with safe_open(path, "pt") as file:
        assert file.metadata()["world_size"] == "1"
    assert {p.name for p in path.parent.iterdir()} == {"manifest.json", path.name}


def test_pieces_larger_than_a_portion_and_many_small_ones(tmp_path: Path) -> None:
    state = {"model/large": torch.randn(2_500_001), "optim/step": torch.tensor([1])}
    state |= {f"model/{i}": torch.full((i,), float(i)) for i in range(1, 300)}
    save(tmp_path, 1, state)
    assert_equal(load(tmp_path, state), state)


def test_training_may_change_the_state_as_soon_as_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = shard_module.write_shard

    def slow(*args: object) -> object:
        assert gate.wait(20)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_shard", slow)
    state, original = make_state(1), make_state(1)
    writer = AsyncWriter(tmp_path, identity(), Peers(), Events())
    assert writer.save(whole(state), Progress(1)) == "started"
    assert writer.is_pending
    assert committed_steps(tmp_path) == []
    for tensor in state.values():
        tensor.fill_(0)
    gate.set()
    assert writer.wait(20)
    assert_equal(load(tmp_path, state), original)


def test_two_saves_never_overlap_and_the_second_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = shard_module.write_shard

    def slow(*args: object) -> object:
        assert gate.wait(20)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_shard", slow)
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    state = make_state(1)
    assert writer.save(whole(state), Progress(10)) == "started"
    assert writer.save(whole(state), Progress(20)) == "busy"
    assert writer.save(whole(state), Progress(21)) == "busy"
    skipped = events.of("checkpoint_skipped")
    assert len(skipped) == 1
    assert skipped[0]["path"].endswith(folder_name(20))
    assert "ranks [0] are still writing" in skipped[0]["reason"]
    gate.set()
    assert writer.wait(20)
    assert writer.save(whole(state), Progress(22)) == "started"
    assert writer.wait(20)
    assert committed_steps(tmp_path) == [10, 22]


def test_leftovers_of_an_older_attempt_are_never_mixed_in(tmp_path: Path) -> None:
    torn = tmp_path / folder_name(10)
    torn.mkdir()
    (torn / shard_name(0, 2)).write_bytes(b"of two ranks")
    (torn / shard_name(0, 1)).write_bytes(b"of one rank")
    (torn / "manifest.json.tmp").write_text("{}")
    state = make_state(10)
    save(tmp_path, 10, state, attempt=1)
    assert {p.name for p in torn.iterdir()} == {"manifest.json", shard_name(0, 1)}
    assert_equal(load(tmp_path, state), state)
    other = make_state(11)
    save(tmp_path, 10, other, attempt=2)
    assert_equal(load(tmp_path, other), other)


def test_a_rank_that_wakes_up_late_cannot_write_into_a_newer_folder(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path, identity(), Peers(), Events())
    writer.prepare(whole(make_state(1)))
    save_value = writer_module._Save(Progress(10), tmp_path / folder_name(10), None, 0.0)  # type: ignore[arg-type]
    save_value.path.mkdir()
    (save_value.path / "saving-new").touch()
    report = writer._write_own(save_value, "old")
    assert "could not write" in report["error"]
    assert [p.name for p in save_value.path.iterdir()] == ["saving-new"]
    assert "entry" in writer._write_own(save_value, "new")
    assert "errno 17" in writer._write_own(save_value, "new")["error"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_full_disk_is_an_event_and_the_older_checkpoints_stay(small_disk: Path) -> None:
    # bghira/SimpleTuner#2613
    small, large = make_state(1), {**make_state(1), "model/large": torch.randn(300_000)}
    events = Events()
    writer = AsyncWriter(small_disk, identity(), Peers(), events)
    for step in (10, 20):
        assert writer.save(whole(small), Progress(step)) == "started"
        assert writer.wait(20)
    assert writer.save(whole(large), Progress(30)) == "started"
    assert not writer.wait(20)
    failed = events.of("checkpoint_failed")
    assert len(failed) == 1
    assert failed[0]["step"] == 30
    assert failed[0]["path"] == str(small_disk / folder_name(30))
    assert failed[0]["n_bytes"] > 1_200_000
    for word in ("no space left", "errno 28", shard_name(0, 1), "rank 0", "bytes free"):
        assert word in failed[0]["error"]
    assert list_steps(small_disk) == [10, 20]
    assert_equal(load(small_disk, small), small)
    assert writer.save(whole(small), Progress(40)) == "started"
    assert writer.wait(20)
    assert committed_steps(small_disk) == [10, 20, 40]


def test_a_file_size_limit_is_an_event(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        writer.save(whole({"model/w": torch.zeros(100_000)}), Progress(5))
        assert not writer.wait(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "errno 27" in events.of("checkpoint_failed")[0]["error"]
    assert list_steps(tmp_path) == []


def test_a_quota_met_by_the_write_call_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, data: memoryview) -> None:
        write_all(handle, data[:10])
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(shard_module, "write_all", refuse)
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    writer.save(whole(make_state(1)), Progress(5))
    assert not writer.wait(20)
    assert "quota" in events.of("checkpoint_failed")[0]["error"]
    assert list_steps(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_event(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    events = Events()
    writer = AsyncWriter(tmp_path / "checkpoints", identity(), Peers(), events)
    assert writer.save(whole(make_state(1)), Progress(5)) == "started"
    assert not writer.wait(20)
    assert "could not be made" in events.of("checkpoint_failed")[0]["error"]


def test_state_that_cannot_be_held_is_an_event(tmp_path: Path) -> None:
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    chunks = whole({"model/w": torch.zeros(3, dtype=torch.complex64)})
    writer.prepare(chunks)
    writer.save(chunks, Progress(5))
    assert not writer.wait(20)
    assert "complex64" in events.of("checkpoint_failed")[-1]["error"]
    assert list_steps(tmp_path) == []


def test_pieces_that_do_not_tile_are_not_committed(tmp_path: Path) -> None:
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    writer.save([Chunk("model/w", (4, 4), (0, 0), torch.zeros(3, 4), is_writer=True)], Progress(5))
    assert not writer.wait(20)
    assert "12 elements" in events.of("checkpoint_failed")[0]["error"]
    assert list_steps(tmp_path) == []


def test_a_piece_written_twice_does_not_hide_a_hole_of_its_size(tmp_path: Path) -> None:
    """Rows 0, 1 and 1, 2 of four: as many elements as the tensor has, and row 3 is nowhere."""
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events)
    rows = torch.zeros(2, 4)
    writer.save([Chunk("model/w", (4, 4), (first, 0), rows, is_writer=True) for first in (0, 1)], Progress(5))
    assert not writer.wait(20)
    assert "[0, 0] of [2, 4] and at [1, 0] of [2, 4] overlap" in events.of("checkpoint_failed")[0]["error"]
    assert list_steps(tmp_path) == []


def test_an_event_sink_that_raises_does_not_stop_a_save(tmp_path: Path) -> None:
    def broken(kind: str, fields: dict[str, object]) -> None:
        raise OSError(errno.ENOSPC, "ledger")

    writer = AsyncWriter(tmp_path, identity(), Peers(), broken)
    assert writer.save(whole(make_state(1)), Progress(5)) == "started"
    assert writer.wait(20)
    assert committed_steps(tmp_path) == [5]


def test_the_commit_is_told_before_older_checkpoints_are_removed(tmp_path: Path) -> None:
    gate = threading.Event()
    removed_after: list[str] = []

    def slow(path: Path, manifest: object) -> None:
        assert gate.wait(20)
        removed_after.append(path.name)

    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events, after_commit=slow)
    for step in (10, 20):
        assert writer.save(whole(make_state(step)), Progress(step)) == "started"
        assert writer.wait(20)
        assert not writer.is_pending
    assert removed_after == []
    gate.set()
    writer.settle(20)
    assert removed_after == [folder_name(10), folder_name(20)]
    assert events.of("checkpoint_failed") == []


def test_a_file_system_that_does_not_answer_is_named_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(shard_module.os, "fsync", lambda handle: gate.wait(30))
    events = Events()
    writer = AsyncWriter(tmp_path, identity(), Peers(), events, Limits(commit_timeout_s=0.2))
    state = make_state(1)
    assert writer.save(whole(state), Progress(5)) == "started"
    started = time.monotonic()
    assert not writer.wait(0.3)
    assert writer.save(whole(state), Progress(6)) == "busy"
    assert time.monotonic() - started < 5
    assert "does not answer" in events.of("checkpoint_failed")[0]["error"]
    gate.set()
    writer.wait(20)


def test_the_host_buffer_is_allocated_once_and_shares_no_memory() -> None:
    state = make_state(1)
    staging = Staging(0, 1)
    staging.prepare(whole(state), {})
    place = staging.buffer.data_ptr()
    for _ in range(3):
        staging.copy(whole(state), {})
        assert staging.buffer.data_ptr() == place
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values()]
    assert all(stop <= place or start >= place + staging.buffer.nbytes for start, stop in spans)
    staging.copy(whole({**state, "model/more": torch.ones(9)}), {})
    assert staging.buffer.numel() == sum(t.nbytes for t in state.values()) + 36


def test_chunks_that_are_not_contiguous_and_need_gradients_are_copied(tmp_path: Path) -> None:
    base = torch.randn(6, 8, requires_grad=True)
    view = base.t()[1:5]
    writer = AsyncWriter(tmp_path, identity(), Peers(), Events())
    writer.save([Chunk("model/w", (4, 6), (0, 0), view, is_writer=True)], Progress(1))
    assert writer.wait(20)
    target = torch.zeros(6, 4).t().requires_grad_()
    ref = find_newest(tmp_path, lambda *_: None)
    assert ref is not None
    load_into(ref, [Chunk("model/w", (4, 6), (0, 0), target, is_writer=True)])
    assert torch.equal(target, view)


def test_removal_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, make_state(1))

    def killed(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "killed here")

    monkeypatch.setattr("ops.checkpoint.removal.shutil.rmtree", killed)
    with pytest.raises(OSError, match="killed here"):
        remove_checkpoint(path)
    assert not is_committed(path)
    assert (path / shard_name(0, 1)).exists()
