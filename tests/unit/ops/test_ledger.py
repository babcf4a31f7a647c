import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from jobs.events import EvalRecord, StepRecord
from ops.ledger import (
    LedgerTail,
    LedgerWriter,
    MetricsWriter,
    Tail,
    number,
    read_ledger,
    read_metrics,
)


def step_record(step, loss=2.0, n_tokens=100, step_time_s=0.5, n_padding_tokens=0):
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        n_tokens=n_tokens,
        n_padding_tokens=n_padding_tokens,
        step_time_s=step_time_s,
        data_time_s=0.0,
        tokens_seen=step * n_tokens,
        sample_ordinal=step,
    )


def test_writers_are_merged_by_time(tmp_path):
    supervisor = LedgerWriter(tmp_path / "ledger" / "supervisor.jsonl")
    rank = LedgerWriter(tmp_path / "ledger" / "rank-00000.jsonl")
    supervisor.write("run_created", at=10.0)
    rank.write("restored", at=12.0, attempt=0, generation=0, step=0, load_s=0.5)
    supervisor.write("attempt_started", at=11.0, attempt=0, world_size=2)
    events = read_ledger(tmp_path)
    assert [(event.at, event.kind, event.writer) for event in events] == [
        (10.0, "run_created", "supervisor"),
        (11.0, "attempt_started", "supervisor"),
        (12.0, "restored", "rank-00000"),
    ]
    assert events[2].seconds("load_s") == 0.5
    assert events[1].integer("world_size") == 2
    assert events[0].text("status", "none") == "none"


def test_a_torn_last_line_is_passed_over_and_the_next_writer_does_not_glue_to_it(tmp_path):
    path = tmp_path / "ledger" / "supervisor.jsonl"
    writer = LedgerWriter(path)
    writer.write("run_created", at=1.0)
    writer.write("attempt_started", at=2.0, attempt=0)
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [event.kind for event in read_ledger(tmp_path)] == ["run_created"]
    LedgerWriter(path).write("attempt_started", at=3.0, attempt=1)
    assert [(event.kind, event.at) for event in read_ledger(tmp_path)] == [
        ("run_created", 1.0),
        ("attempt_started", 3.0),
    ]


def test_non_finite_values_stay_readable(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", attempt=0, generation=1)
    for step, loss in enumerate([math.nan, math.inf, -math.inf], start=1):
        writer.write_step(step_record(step, loss=loss), nested={"deep": [math.nan]})
    text = (tmp_path / "metrics.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert '"loss":"nan"' in text
    assert '"loss":"inf"' in text
    assert '"loss":"-inf"' in text
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, -math.inf]
    assert number("nan") is not None
    assert number("NaN text") is None
    assert number(True) is None


def test_tokens_per_s_is_of_the_step_and_without_padding(tmp_path):
    """allenai/open-instruct#1032: a slow step is slow in its own line only, also right after a resume."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl", attempt=1, generation=0)
    for step in range(26, 31):
        slow = 1.0 if step == 28 else 0.0
        writer.write_step(step_record(step, n_tokens=300, n_padding_tokens=300, step_time_s=0.5 + slow))
    rates = {line["step"]: line["tokens_per_s"] for line in read_metrics(tmp_path)}
    assert rates == {26: 600.0, 27: 600.0, 28: 200.0, 29: 600.0, 30: 600.0}
    writer.write_eval(EvalRecord(step=30, loss=1.5, n_tokens=10, eval_time_s=0.25))
    assert read_metrics(tmp_path)[-1]["kind"] == "eval"
    assert read_metrics(tmp_path)[-1]["attempt"] == 1


def test_a_full_disk_loses_lines_but_raises_nothing(tmp_path):
    """A file size limit makes write() fail in the middle of a line, as a full disk does."""
    script = f"""
import json, resource, signal
from ops.ledger import LedgerWriter, read_ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = LedgerWriter({str(tmp_path / "ledger" / "w.jsonl")!r})
writer.write("run_created", at=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
results = [writer.write("incident", at=2.0, evidence="x" * 60), writer.write("incident", at=3.0)]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
results.append(writer.write("run_ended", at=4.0))
print(json.dumps([results, writer.n_lost, [e.kind for e in read_ledger({str(tmp_path)!r})]]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[False, False, True], 2, ["run_created", "run_ended"]]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


def test_a_folder_that_is_gone_loses_lines_but_raises_nothing(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    writer = LedgerWriter(tmp_path / "file" / "w.jsonl")
    assert writer.write("run_created") is False
    assert writer.n_lost == 1


def test_many_threads_write_whole_lines(tmp_path):
    writer = LedgerWriter(tmp_path / "ledger" / "w.jsonl")

    def write(thread):
        for index in range(50):
            writer.write("checkpoint_blocked", step=thread * 50 + index, pad="p" * 3000)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.integer("step") for event in read_ledger(tmp_path)) == list(range(200))


def test_sigkill_in_the_middle_of_writing_leaves_whole_lines(tmp_path):
    script = f"""
from ops.ledger import LedgerWriter
writer = LedgerWriter({str(tmp_path / "ledger" / "w.jsonl")!r})
step = 0
while True:
    writer.write("checkpoint_blocked", step=step, pad="p" * 500)
    step += 1
    if step == 100:
        print("going", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "going\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    steps = [event.integer("step") for event in read_ledger(tmp_path)]
    assert len(steps) >= 100
    assert steps == list(range(len(steps)))


def test_tail_reads_each_complete_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step": 1}\n{"step"')
        assert tail.read() == [{"step": 1}]
        assert tail.read() == []
        file.write(b': 2}\n[1]\nnot json\n{"step": 3}\n')
        assert tail.read() == [{"step": 2}, {"step": 3}]
    assert tail.n_bad_lines == 2
    assert Tail(path, tail.offset_bytes).read() == []
    later = Tail(path)
    pieces = [later.read(max_bytes=8) for _ in range(6)]
    assert [line["step"] for piece in pieces for line in piece] == [1, 2, 3]


def test_ledger_tail_sees_writers_that_come_later_and_goes_on_from_offsets(tmp_path):
    tail = LedgerTail(tmp_path)
    assert tail.read() == []
    LedgerWriter(tmp_path / "ledger" / "supervisor.jsonl").write("run_created", at=2.0)
    assert [event.kind for event in tail.read()] == ["run_created"]
    LedgerWriter(tmp_path / "ledger" / "rank-00000.jsonl").write("restored", at=1.0)
    assert [event.kind for event in tail.read()] == ["restored"]
    assert LedgerTail(tmp_path, tail.offsets_bytes).read() == []
