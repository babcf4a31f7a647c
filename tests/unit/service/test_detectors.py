"""What ranks find out about their training, with real engines and a real store."""

import gc
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from jobs.comm.groups import Groups
from jobs.comm.replicas import replica_digests
from jobs.data.batches import StepBatches
from jobs.engines.build import build_engine
from jobs.events import Progress, StepRecord
from jobs.mesh import Mesh
from jobs.spec.job import JobSpec
from jobs.spec.strategy import NativeStrategy, PipelineSection
from jobs.trainer import train
from ops.findings import Finding
from ops.incident import FailureClass
from service.board import Board
from service.digest_hook import DigestHook, common_digests, votes
from service.fault_hook import FaultHook, burn, flip_bit
from service.loss_hook import LossHook
from service.rank_faults import RankFaults
from service.straggler_hook import StragglerHook, StragglerJudge, thinned, times_of
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import (
    GLOBAL_BATCH,
    SEQ_LEN,
    engine_step,
    n_valid,
    share,
    tiny_model,
    tiny_spec,
    whole_batch,
)

CPU = torch.device("cpu")
RECORD = StepRecord(
    step=1,
    loss=3.0,
    grad_norm=1.0,
    lr=1e-3,
    n_tokens=100,
    n_padding_tokens=0,
    step_time_s=1.0,
    data_time_s=0.0,
    tokens_seen=100,
    sample_ordinal=4,
)


class Source:
    """The same batch again and again: every micro-batch is as long as the others."""

    def __init__(self, spec: JobSpec, groups: Groups) -> None:
        self.spec, self.groups = spec, groups

    def step_at(self, ordinal: int) -> StepBatches:
        whole = whole_batch(0)
        accum = self.spec.grad_accum_steps
        return StepBatches(
            sample_ordinal=ordinal,
            next_ordinal=ordinal + GLOBAL_BATCH,
            batches=share(whole, self.groups.dp.rank, self.groups.dp.size, accum),
            n_valid_tokens=n_valid(whole),
            n_padding_tokens=GLOBAL_BATCH * SEQ_LEN - n_valid(whole),
        )


def board_of(groups: Groups, folder: str) -> Board:
    return Board(FileStore(f"{folder}/board", groups.world_size), groups.rank, groups.world_size)


# Digests


def flipped(groups: Groups, spec: JobSpec, folder: str, at_rank: int) -> tuple[list[Any], list[Any], int]:
    """Train 6 steps with digests every 2; one rank's parameters get another bit after step 3."""
    engine = build_engine(spec, groups, CPU)
    found: list[Finding] = []
    events: list[tuple[str, dict[str, Any]]] = []

    class Flip:
        def on_start(self, *_: Any) -> None: ...
        def after_evaluate(self, *_: Any) -> None: ...
        def on_end(self, *_: Any) -> None: ...
        def after_step(self, record: Any, engine: Any) -> None:
            if record.step == 3 and groups.rank == at_rank:
                flip_bit(engine)

    hook = DigestHook(
        board_of(groups, folder), groups.mesh, groups.rank, 2, found.append, lambda *e: events.append(e)
    )
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 6})})
    train(spec, engine, Source(spec, groups), Progress(), [Flip(), hook], groups, lambda: False)
    deadline = time.monotonic() + 20
    while groups.rank == 0 and len(events) < 3 and time.monotonic() < deadline:
        hook.on_end("finished", engine, Progress())
        time.sleep(0.05)
    return found, events, len(gc.callbacks)


def test_a_flipped_bit_names_its_rank_among_three(tmp_path: Path) -> None:
    found, events, _ = run_ranks(flipped, 3, tmp_path, tiny_spec(3, 1), str(tmp_path), 1)[0]
    (finding,) = found
    assert (finding.failure_class, finding.detector, finding.step) == (
        FailureClass.GPU_HARDWARE,
        "replica_digest",
        4,
    )
    assert (finding.signal.entity.name, finding.good_step) == ("1", 2)
    assert "of rank 1 differs from 2 equal ones of 3 replicas" in finding.signal.text
    assert [event["step"] for _, event in events] == [2, 4, 6]
    variants = [max(len(of) for of in event["digests"].values()) for _, event in events]
    assert variants == [1, 2, 2]


def test_two_replicas_that_differ_are_told_and_nobody_is_named(tmp_path: Path) -> None:
    found, _, _ = run_ranks(flipped, 2, tmp_path, tiny_spec(2, 1, "bf16"), str(tmp_path), 1)[0]
    (finding,) = found
    assert (finding.failure_class, finding.signal.entity.kind) == (FailureClass.UNKNOWN, "job")
    assert "without a majority among 2 replicas" in finding.signal.text


def test_equal_replicas_are_not_told_of(tmp_path: Path) -> None:
    found, events, _ = run_ranks(flipped, 2, tmp_path, tiny_spec(2, 1), str(tmp_path), 9)[0]
    assert found == []
    assert len(events) == 3


def digests_of(groups: Groups, specs: list[JobSpec]) -> list[dict[str, list[int]]]:
    found = []
    for spec in specs:
        engine = build_engine(spec, groups, CPU)
        for step in range(2):
            engine_step(engine, spec, groups.dp.rank, step)
        weights = dict(engine.model.named_parameters())
        found.append(replica_digests(engine.chunks(), weights, groups.mesh, groups.rank))
    return found


def with_strategy(spec: JobSpec, **strategy: Any) -> JobSpec:
    return spec.model_copy(update={"strategy": NativeStrategy(**strategy)})


def test_what_is_cut_over_ranks_is_compared_only_where_replicas_are(tmp_path: Path) -> None:
    plain = tiny_spec(2, 1)
    specs = [plain, with_strategy(plain, dp=2, zero_stage=1), tiny_spec(2, 1, "bf16")]
    first, second = run_ranks(digests_of, 2, tmp_path, specs)
    families = [sorted({key.split("-")[0] for key in of}) for of in first]
    assert families == [["masters"], ["masters", "weights"], ["masters", "weights"]]
    for one, other in zip(first, second, strict=True):
        assert votes(2, [one, other]) == []
    shared = [
        sorted({key.split("-")[0] for key in a.keys() & b.keys()}) for a, b in zip(first, second, strict=True)
    ]
    assert shared == [["masters"], ["weights"], ["masters", "weights"]]


def test_tensor_parallel_parts_are_no_replicas_of_one_another(tmp_path: Path) -> None:
    spec = with_strategy(tiny_spec(1, 1), tp=2)
    (one,), (other,) = run_ranks(digests_of, Mesh(tp=2), tmp_path, [spec])
    assert not votes(2, [one, other])


def test_each_variant_is_kept_once_the_commonest_first() -> None:
    posted = [{"a": [1, 2]}, {"a": [1, 3], "b": [5]}, {"a": [1, 3]}]
    assert common_digests(posted) == {"a": [[1, 3], [1, 2]], "b": [[5]]}


# Stragglers


def timed(groups: Groups, spec: JobSpec, folder: str, slow_rank: int, n_steps: int) -> Any:
    """Train with windows of 8 steps; the slow rank's passes take twice as long. What the judge says."""
    engine = build_engine(spec, groups, CPU)
    faults = RankFaults()
    hook = StragglerHook(board_of(groups, folder), groups.mesh, groups.rank, 8, lambda finding: None)
    found: list[Finding] = []
    posted: list[Any] = []
    hook._judge = StragglerJudge(groups.mesh, found.append)
    whole = hook._judge.judge
    hook._judge.judge = lambda step, all_times: (whole(step, all_times), posted.append(step))
    slow = FaultHook(faults, Path(folder), GLOBAL_BATCH, lambda *_: None)
    if groups.rank == slow_rank:
        faults.ask("slow")
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": n_steps})})
    train(spec, engine, Source(spec, groups), Progress(), [slow, hook], groups, lambda: False)
    deadline = time.monotonic() + 20
    while groups.rank == 0 and len(posted) < n_steps // 8 and time.monotonic() < deadline:
        if hook._due:
            hook._collect(hook._due[0])
        time.sleep(0.05)
    return found, posted, hook._clock.is_on


def longer(spec: JobSpec) -> JobSpec:
    """Passes of some milliseconds: what is measured is computing, not the clock."""
    return spec.model_copy(update={"model": tiny_model(d_model=128, d_ff=512, n_layers=4)})


def test_a_rank_with_half_the_pace_is_named(tmp_path: Path) -> None:
    found, posted, is_on = run_ranks(timed, 2, tmp_path, longer(tiny_spec(2, 2)), str(tmp_path), 1, 34)[0]
    assert posted == [8, 16, 24, 32]
    assert not is_on
    workers = [one for one in found if one.signal.kind == "straggler_worker"]
    assert [(one.signal.entity.name, one.failure_class) for one in workers] == [("1", "straggler")]
    assert workers[0].signal.value > 0.5


def test_an_even_run_has_no_straggler(tmp_path: Path) -> None:
    found, posted, _ = run_ranks(timed, 2, tmp_path, longer(tiny_spec(2, 2)), str(tmp_path), 9, 34)[0]
    assert posted == [8, 16, 24, 32]
    # Batches come from a thread: on a machine that is busy otherwise they may be waited for.
    assert found == []


def test_uneven_stages_are_called_so(tmp_path: Path) -> None:
    spec = longer(tiny_spec(1, 4))
    uneven = PipelineSection(split=(3, 1))
    spec = with_strategy(spec, pp=2, pipeline=uneven)
    found, posted, _ = run_ranks(timed, Mesh(pp=2), tmp_path, spec, str(tmp_path), 9, 26)[0]
    assert posted == [8, 16, 24]
    (stage,) = found
    assert (stage.signal.kind, stage.signal.entity.name) == ("straggler_stage", "stage 0")
    assert "stage 0 computes" in stage.signal.text


def test_a_window_is_thinned_to_what_one_process_can_judge() -> None:
    passes = [(kind, 0, mb, 0.5) for mb in range(8) for kind in (0, 1)]
    steps = [(step, passes, 0.1, 0.0) for step in range(1, 33)]
    assert thinned(steps, 10**6) == steps
    few = thinned(steps, 64)
    assert [step for step, *_ in few] == list(range(1, 33))
    assert all({mb for _, _, mb, _ in kept} == {0} for _, kept, _, _ in few)
    fewer = thinned(steps, 4)
    assert [step for step, *_ in fewer] == [1, 17]
    assert thinned([], 4) == []
    assert len(thinned(steps, 0)) == 1


def test_one_window_alone_is_not_told() -> None:
    found: list[Finding] = []
    judge = StragglerJudge(Mesh(dp=2), found.append)

    def window(first: int, seconds: float) -> list[Any]:
        even = [(kind, 0, 0, 0.1) for kind in (0, 1)]
        odd = [(kind, 0, 0, seconds) for kind in (0, 1)]
        steps = range(first, first + 8)
        return [[(step, of, 0.0, 0.0) for step in steps] for of in (even, odd)]

    judge.judge(8, window(1, 0.2))
    judge.judge(16, window(9, 0.1))
    judge.judge(24, window(17, 0.2))
    assert found == []
    judge.judge(32, window(25, 0.2))
    judge.judge(40, window(33, 0.2))
    assert [one.step for one in found if one.signal.kind == "straggler_worker"] == [32]


def test_waits_for_data_and_pauses_of_the_collector_reach_the_judge() -> None:
    passes, pauses = times_of([[(1, [(0, 2, 3, 0.5)], 0.25, 0.125)]], Mesh())
    assert [(one.kind, one.stage, one.micro_batch, one.compute_s) for one in passes] == [
        ("forward", 2, 3, 0.5)
    ]
    assert [(one.kind, one.pause_s) for one in pauses] == [("data", 0.25), ("garbage_collection", 0.125)]


# Losses


def test_a_spike_is_told_with_the_last_good_step() -> None:
    found: list[Finding] = []
    earlier = [
        {"step": step, "loss": 3.0 - step / 100, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 40)
    ]
    hook = LossHook(earlier, found.append)
    hook.on_start(None, Progress(step=30))  # type: ignore[arg-type]
    record = replace(RECORD, step=31, loss=2.7)
    hook.after_step(record, None)  # type: ignore[arg-type]
    hook.after_step(replace(record, step=32, loss=9.0), None)  # type: ignore[arg-type]
    hook.after_step(replace(record, step=33, loss=math.nan), None)  # type: ignore[arg-type]
    assert [(one.detector, one.step, one.good_step) for one in found] == [("loss_spike", 32, 31)]
    again = Finding.from_json(found[0].to_json())
    assert again == found[0]
    incident = again.incident(5.0)
    assert (incident.failure_class, incident.good_step, incident.detector) == ("numerics", 31, "loss_spike")


def test_burning_takes_processor_time() -> None:
    before_s = time.thread_time()
    burn(0.05)
    assert time.thread_time() - before_s >= 0.05
