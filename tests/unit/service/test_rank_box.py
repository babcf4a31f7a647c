"""A rank's black box: real ranks write it, it outlives their SIGKILL, and it costs a step next to nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from jobs.events import StepRecord
from ops.black_box import BlackBoxError, BoxReading, Phase, box_path, read_box
from service.fork_client import ForkServer
from service.rank_box import OLD_BOX_S, RankBox, box_folder, remove_box, remove_old_boxes
from service.rank_process import RankRequest
from service.run_store import RUNNING
from tests.support.one_rank import request_of
from tests.support.stored_runs import stopped_run

SPEC = """\
model: {preset: tiny, n_layers: 1}
data:
  sources: [{kind: text, path: corpus.txt, separator: "\\n\\n"}]
  seq_len: 16
  validation_frac: 0.1
optim: {lr: 1e-3, schedule: {kind: constant}}
train: {steps: %s, global_batch_size: 4, micro_batch_size: 2}
run: {name: one, storage: %s}
checkpoint: {every_steps: 2}
tracking: {mlflow: false, peak_tflops: 1.0}
"""
STEP = StepRecord(
    step=7,
    loss=1.5,
    grad_norm=1.0,
    lr=1e-3,
    n_tokens=10,
    n_padding_tokens=0,
    step_time_s=0.1,
    data_time_s=0.0,
    tokens_seen=70,
    sample_ordinal=28,
)


def test_the_folder_is_in_memory_where_there_is_one_and_of_one_node(tmp_path: Path) -> None:
    assert (
        box_folder("demo", "a" * 56, tmp_path) == tmp_path / f"packtrain-{os.getuid()}" / f"demo-{'a' * 16}"
    )
    elsewhere = box_folder("demo", "b" * 56, tmp_path / "missing")
    assert elsewhere.name == f"demo-{'b' * 16}"
    assert tmp_path not in elsewhere.parents


def test_a_save_and_an_evaluation_are_phases_of_their_own_and_the_last_box_takes_the_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "boxes"
    box = RankBox(folder, 2, 1, 3)
    path = box_path(folder, 3)
    assert read_box(path).phase is Phase.INIT
    box.enter(Phase.STEP)
    box.mark(micro_batch=2, collective=11)
    box.finish_step(STEP)
    with box.blocking_save():
        assert read_box(path).phase is Phase.CHECKPOINT
    reading = read_box(path)
    assert (reading.phase, reading.step, reading.collective) == (Phase.STEP, 7, 11)
    assert (reading.identity.attempt, reading.identity.generation, reading.identity.rank) == (2, 1, 3)
    assert reading.sums[Phase.CHECKPOINT].count == 1
    box.enter(Phase.END)
    with box.blocking_save():
        pass
    assert read_box(path).phase is Phase.END
    assert not read_box(path).has_ended
    box.end()
    assert read_box(path).has_ended
    remove_box(folder, 0)  # another rank's: there is none, and the folder is not empty
    assert path.exists()
    remove_box(folder, 3)
    assert not folder.exists()


def test_a_box_that_cannot_be_made_does_not_keep_a_rank_from_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (None, file / "below"):
        box = RankBox(folder, 0, 0, 0)
        box.enter(Phase.STEP)
        box.mark(micro_batch=1)
        box.finish_step(STEP)
        with box.blocking_save():
            box.end()


def test_what_a_step_writes_costs_at_most_two_thousandths_of_a_tenth_of_a_second(tmp_path: Path) -> None:
    box = RankBox(tmp_path, 0, 0, 0)
    n_steps, best_s = 200, float("inf")
    for _ in range(5):  # the best of some: others use the cores as well
        begun = time.perf_counter()
        for _ in range(n_steps):
            for number in range(4):
                box.mark(micro_batch=number)
            box.mark(collective=number)
            box.finish_step(STEP)
        best_s = min(best_s, (time.perf_counter() - begun) / n_steps)
    assert best_s <= 0.002 * 0.1


def new_run(folder: Path, train: str) -> Path:
    (folder / "corpus.txt").write_text("\n\n".join(f"hello world {i}" for i in range(500)))
    (folder / "spec.yaml").write_text(SPEC % (train, folder / "runs"))
    return stopped_run(folder / "spec.yaml", (), status=RUNNING)


def forked(server: ForkServer, run_dir: Path, box_dir: Path) -> RankRequest:
    request = request_of(run_dir, attempt=3, generation=1, box_dir=str(box_dir))
    server.fork(request)
    return request


def wait_until_gone(server: ForkServer) -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if any(message.event == "exited" for message in server.wait(1.0)):
            return
    raise AssertionError("the rank did not end")


def test_the_box_of_a_real_rank_survives_its_sigkill(server: ForkServer, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, "100000")
    boxes = tmp_path / "boxes"
    request = forked(server, run_dir, boxes)
    path = box_path(boxes, 0)
    seen: list[BoxReading] = []
    deadline = time.monotonic() + 40
    while not seen or seen[-1].step < 20 or seen[-1].collective < 1:
        assert time.monotonic() < deadline, Path(request.log_path).read_text()[-3000:]
        server.wait(0.02)
        if path.exists():
            seen.append(read_box(path))
    pid = server.rank_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(server)
    last = read_box(path)
    assert (last.identity.attempt, last.identity.generation, last.identity.pid) == (3, 1, pid)
    assert last.step >= 20
    assert not last.has_ended
    assert last.sample_ordinal > 0
    assert last.first_step_s > 0
    assert last.sums[Phase.STEP].count >= 19
    assert Phase.STEP in {reading.phase for reading in seen}
    assert {0, 1, 2} >= {reading.micro_batch for reading in seen if reading.step > 0}
    assert 2 in {reading.micro_batch for reading in seen}


def test_a_rank_that_is_done_says_so(server: ForkServer, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, "6, evaluate_every_steps: 3, evaluate_batches: 1")
    forked(server, run_dir, tmp_path / "boxes")
    wait_until_gone(server)
    last = read_box(box_path(tmp_path / "boxes", 0))
    assert last.has_ended
    assert last.phase is Phase.END
    assert last.step == 6
    counts = {phase: sums.count for phase, sums in zip(Phase, last.sums, strict=True)}
    assert (counts[Phase.INIT], counts[Phase.LOAD], counts[Phase.EVALUATE]) == (1, 1, 2)
    assert counts[Phase.CHECKPOINT] >= 3
    assert counts[Phase.STEP] == 5


def test_a_file_with_holes_is_never_a_box(tmp_path: Path) -> None:
    """Writing to a hole when the memory file system is full would be a SIGBUS, not an error."""
    RankBox(tmp_path, 0, 0, 0)
    status = box_path(tmp_path, 0).stat()
    assert status.st_blocks * 512 >= status.st_size
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(BlackBoxError):
        read_box(tmp_path / "short")


def test_boxes_that_killed_shells_left_go_after_a_day(tmp_path: Path) -> None:
    """Not those of processes that live, nor young ones, which may be evidence."""
    pid = os.fork()
    if pid == 0:
        RankBox(tmp_path / "dead", 0, 0, 0)
        os._exit(0)
    os.waitpid(pid, 0)
    RankBox(tmp_path / "alive", 0, 0, 0)
    remove_old_boxes(tmp_path, time.time())
    assert {path.name for path in tmp_path.iterdir()} == {"dead", "alive"}
    remove_old_boxes(tmp_path, time.time() + OLD_BOX_S + 1.0)
    assert {path.name for path in tmp_path.iterdir()} == {"alive"}
