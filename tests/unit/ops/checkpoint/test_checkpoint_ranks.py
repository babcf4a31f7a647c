"""Several ranks save together: nobody hangs in a save, and the rank that is missing is named."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.events import Progress
from ops.checkpoint import writer as writer_module
from ops.checkpoint.layout import committed_steps, folder_name, list_steps, shard_name
from ops.checkpoint.reader import find_newest, load_into
from ops.checkpoint.writer import AsyncWriter, Limits, Peers
from tests.support.checkpoints import (
    Events,
    assemble,
    assert_equal,
    empty_like,
    flat_cut,
    identity,
    make_state,
    whole,
)
from tests.support.ranks import run_ranks


def make_writer(groups: Groups, folder: str, limits: Limits | None = None) -> tuple[AsyncWriter, Events]:
    events = Events()
    store = dist.PrefixStore("saves", dist.FileStore(f"{folder}.store", groups.world_size))
    peers = Peers(groups.rank, groups.world_size, store)
    return AsyncWriter(Path(folder), identity(groups.world_size), peers, events, limits or Limits()), events


def save_twice(groups: Groups, folder: str) -> tuple[list[Any], Events]:
    writer, events = make_writer(groups, folder)
    outcomes: list[Any] = []
    for step in (10, 20):
        chunks = flat_cut(make_state(step), groups.rank, groups.world_size)
        extra = {f"rng/rank-{groups.rank:05d}": torch.tensor([groups.rank], dtype=torch.uint8)}
        outcomes += [writer.save(chunks, Progress(step), extra), writer.wait(20)]
    return outcomes, events


def test_four_ranks_save_and_two_or_one_load(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    results = run_ranks(save_twice, 4, tmp_path, str(folder))
    assert all(outcomes == ["started", True, "started", True] for outcomes, _ in results)
    assert [len(events.of("checkpoint_committed")) for _, events in results] == [2, 0, 0, 0]
    assert {p.name for p in (folder / folder_name(20)).iterdir()} == {
        "manifest.json",
        *(shard_name(rank, 4) for rank in range(4)),
    }
    ref = find_newest(folder, lambda *_: None)
    assert ref is not None
    assert ref.step == 20
    assert sum(name.startswith("rng/") for name in ref.manifest.tensors) == 4
    for n_loading in (2, 1):
        ranks = [flat_cut(empty_like(make_state(20)), rank, n_loading) for rank in range(n_loading)]
        for chunks in ranks:
            load_into(ref, chunks, strict=False)
        assert_equal(assemble(make_state(20), ranks), make_state(20))


def save_from_rank_one_only(groups: Groups, folder: str) -> tuple[float, list[str], Events]:
    writer, events = make_writer(groups, folder, Limits(decide_timeout_s=0.5))
    starts, waited_s = [], 0.0
    if groups.rank == 1:
        began = time.monotonic()
        starts.append(writer.save(whole(make_state(1)), Progress(10)))
        waited_s = time.monotonic() - began
    dist.barrier(groups.control)
    # Those that come when it is over are told the same.
    if groups.rank != 1:
        starts.append(writer.save(whole(make_state(1)), Progress(10)))
    dist.barrier(groups.control)
    starts.append(writer.save(flat_cut(make_state(20), groups.rank, groups.world_size), Progress(20)))
    assert writer.wait(20)
    return waited_s, starts, events


def test_a_save_that_one_rank_only_enters_is_detected_and_says_who_came(tmp_path: Path) -> None:
    # huggingface/transformers#48569
    folder = tmp_path / "checkpoints"
    results = run_ranks(save_from_rank_one_only, 3, tmp_path, str(folder))
    assert results[1][0] < 5
    assert [starts for _, starts, _ in results] == [["refused", "started"]] * 3
    failed = [fields for _, _, events in results for fields in events.of("checkpoint_failed")]
    assert len(failed) == 1
    assert "ranks [0, 2] did not come" in failed[0]["error"]
    assert "ranks [1] did" in failed[0]["error"]
    assert committed_steps(folder) == [20]


def stall_in_write(groups: Groups, folder: str, stalled: int) -> tuple[bool, float, str, bool, Events]:
    writer, events = make_writer(groups, folder, Limits(commit_timeout_s=1.0, decide_timeout_s=20))
    real = writer_module.write_shard

    def slow(*args: Any) -> Any:
        if groups.rank == stalled:
            time.sleep(2.5)
        return real(*args)

    writer_module.write_shard = slow
    chunks = flat_cut(make_state(10), groups.rank, groups.world_size)
    assert writer.save(chunks, Progress(10)) == "started"
    # Training goes on in the meantime: collectives are not touched by the stalled writer.
    started = time.monotonic()
    for _ in range(20):
        dist.all_reduce(torch.ones(4), group=groups.dp.group)
        time.sleep(0.02)
    trained_s = time.monotonic() - started
    is_committed = writer.wait(1.5)
    start = writer.save(chunks, Progress(11))
    time.sleep(3)
    dist.barrier(groups.control)
    writer_module.write_shard = real
    assert writer.save(chunks, Progress(12)) == "started"
    return is_committed, trained_s, start, writer.wait(20), events


def test_a_stalled_rank_is_named_and_its_late_shard_spoils_nothing(tmp_path: Path) -> None:
    # marin-community/levanter#486
    folder = tmp_path / "checkpoints"
    results = run_ranks(stall_in_write, 3, tmp_path, str(folder), 2)
    assert not any(is_committed for is_committed, *_ in results)
    assert [start for _, _, start, _, _ in results] == ["busy"] * 3
    assert all(is_committed for _, _, _, is_committed, _ in results)
    failed = results[0][-1].of("checkpoint_failed")
    assert len(failed) == 1
    assert "ranks [2] did not report" in failed[0]["error"]
    assert "ranks [2] are still writing" in results[0][-1].of("checkpoint_skipped")[0]["reason"]
    assert list_steps(folder) == [12]


def write_longer_than_the_group_limit(groups: Groups, folder: str) -> tuple[bool, float]:
    from datetime import timedelta

    short = dist.new_group(list(range(groups.world_size)), timeout=timedelta(seconds=1), backend="gloo")
    writer, _ = make_writer(groups, folder)
    real = writer_module.write_shard

    def slow(*args: Any) -> Any:
        if groups.rank == 0:
            time.sleep(2.5)
        return real(*args)

    writer_module.write_shard = slow
    writer.save(flat_cut(make_state(10), groups.rank, groups.world_size), Progress(10))
    total = torch.zeros(1)
    for _ in range(40):
        time.sleep(0.05)
        total.fill_(1)
        dist.all_reduce(total, group=short)
    assert groups.rank != 0 or writer.is_pending
    return writer.wait(20), float(total)


def test_a_writer_slower_than_the_collective_limit_kills_nobody(tmp_path: Path) -> None:
    # meta-pytorch/torchtune#2093
    results = run_ranks(write_longer_than_the_group_limit, 2, tmp_path, str(tmp_path / "checkpoints"))
    assert results == [(True, 2.0), (True, 2.0)]


def fail_on_rank_one(groups: Groups, folder: str) -> tuple[bool, bool, Events]:
    writer, events = make_writer(groups, folder)
    chunks = flat_cut(make_state(10), groups.rank, groups.world_size)
    writer.save(chunks, Progress(10))
    first = writer.wait(20)
    real = writer_module.write_shard

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if groups.rank == 1:
        writer_module.write_shard = full
    writer.save(chunks, Progress(20))
    second = writer.wait(20)
    writer_module.write_shard = real
    return first, second, events


def test_one_rank_without_space_fails_the_save_for_all_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    results = run_ranks(fail_on_rank_one, 3, tmp_path, str(folder))
    assert [(first, second) for first, second, _ in results] == [(True, False)] * 3
    failed = results[0][2].of("checkpoint_failed")
    assert len(failed) == 1
    assert "rank 1 could not write" in failed[0]["error"]
    assert "no space left" in failed[0]["error"]
    assert list_steps(folder) == [10]


def save_without_threads(groups: Groups, folder: str, poor: int) -> tuple[list[Any], float, Events]:
    writer, events = make_writer(groups, folder)
    chunks = flat_cut(make_state(10), groups.rank, groups.world_size)
    outcomes: list[Any] = [writer.save(chunks, Progress(10)), writer.wait(20)]
    dist.barrier(groups.control)
    started = time.monotonic()
    if groups.rank == poor:
        threading.stack_size(1 << 47)  # more than there are addresses: the system refuses the thread
    outcomes += [writer.save(chunks, Progress(20)), writer.wait(20)]
    threading.stack_size(0)
    took_s = time.monotonic() - started
    outcomes += [writer.save(chunks, Progress(30)), writer.wait(20)]
    return outcomes, took_s, events


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_that_may_start_no_thread_fails_the_save_and_not_the_training(
    tmp_path: Path, poor: int
) -> None:
    folder = tmp_path / "checkpoints"
    results = run_ranks(save_without_threads, 2, tmp_path, str(folder), poor)
    for outcomes, took_s, _ in results:
        assert outcomes == ["started", True, "started", False, "started", True]
        assert took_s < 10
    failed = [fields for _, _, events in results for fields in events.of("checkpoint_failed")]
    assert len(failed) == 1
    assert failed[0]["step"] == 20
    assert f"rank {poor} could not start its writer thread: can't start new thread" in failed[0]["error"]
    assert committed_steps(folder) == [10, 30]


def write_to_own_disk(groups: Groups, folder: str) -> tuple[bool, Events]:
    events = Events()
    store = dist.FileStore(f"{folder}.store", groups.world_size)
    writer = AsyncWriter(
        Path(f"{folder}-node{groups.rank}"), identity(groups.world_size), Peers(groups.rank, 2, store), events
    )
    writer.save(flat_cut(make_state(10), groups.rank, groups.world_size), Progress(10))
    return writer.wait(20), events


def test_node_local_folders_are_never_committed(tmp_path: Path) -> None:
    # deepspeedai/DeepSpeed#5405
    results = run_ranks(write_to_own_disk, 2, tmp_path, str(tmp_path / "checkpoints"))
    assert [is_committed for is_committed, _ in results] == [False, False]
    assert "rank 1 could not write" in results[0][1].of("checkpoint_failed")[0]["error"]
    assert list_steps(tmp_path / "checkpoints-node0") == []


def die_during_save(groups: Groups, folder: str) -> tuple[bool, str, Events]:
    import os
    import signal

    writer, events = make_writer(groups, folder, Limits(commit_timeout_s=1.0, decide_timeout_s=0.5))
    if groups.rank == 2:
        writer_module.write_shard = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    chunks = flat_cut(make_state(10), groups.rank, groups.world_size)
    writer.save(chunks, Progress(10))
    is_committed = writer.wait(20)
    start = writer.save(chunks, Progress(11))
    Path(f"{folder}.{groups.rank}").write_text(f"{is_committed} {start} {events}")
    return is_committed, start, events


def test_a_rank_that_dies_in_a_save_holds_up_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(AssertionError, match="rank 2"):
        run_ranks(die_during_save, 3, tmp_path, str(folder))
    text = Path(f"{folder}.0").read_text()
    assert text.startswith("False refused")
    assert "ranks [2] did not report" in text
    assert "ranks [2] did not come" in text
    assert list_steps(folder) == []
