"""Straggler causes: published traces with known answers, and made ones with known causes."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.monitors.straggler import Cause, Pass, Pause, Straggler, find_stragglers
from ops.monitors.straggler_traces import judge_what_if, read_timeline

DATA = Path(__file__).resolve().parents[3] / "data" / "stragglers"
N_STEPS = 20


def load(name: str) -> dict:
    return json.loads((DATA / name).read_text())


@pytest.mark.parametrize("has_files", [True, False])
def test_published_run_with_one_slowed_worker(has_files):
    extra = (load("mw-AR.json"), load("ms-AR.json")) if has_files else ()
    found = judge_what_if(load("result-AR.json"), *extra)
    assert (found.cause, found.replica, found.stage, found.ranks) == (Cause.WORKER, 0, 0, (0, 1, 2, 3))
    assert found.score == pytest.approx(0.973, abs=0.001)
    assert found.confidence > 0.9


@pytest.mark.parametrize("has_files", [True, False])
def test_published_run_with_uneven_stages(has_files):
    extra = (load("mw-ST.json"), load("ms-ST.json")) if has_files else ()
    found = judge_what_if(load("result-ST.json"), *extra)
    assert (found.cause, found.stage, found.ranks) == (Cause.STAGE, 3, ())
    assert found.confidence > 0.9


def test_published_timeline_with_uneven_stages():
    """Our own attribution from the raw passes agrees with the published what-if analysis."""
    events = json.loads(gzip.decompress((DATA / "timeline-ST.json.gz").read_bytes()))
    passes, pauses = read_timeline(events)
    assert (len(passes), len({p.rank for p in passes}), len({p.step for p in passes})) == (2048, 8, 32)
    (found,) = find_stragglers(passes, pauses)
    assert (found.cause, found.stage, found.confidence) == (Cause.STAGE, 3, 1.0)
    assert found.score == pytest.approx(load("result-ST.json")["blocking_slowdown"] - 1.0, abs=0.01)


def what_if(by_replica: list[float], by_stage: list[float], by_op: dict[str, float], total: float) -> dict:
    return {
        "job_meta": {"dp_size": len(by_replica), "pp_size": len(by_stage), "tp_size": 2},
        "blocking_slowdown": total,
        "blocking_decompose_by_dp_rank": dict(enumerate(by_replica)),
        "blocking_decompose_by_stage": dict(enumerate(by_stage)),
        "blocking_decompose_by_optype": by_op,
    }


def test_what_if_without_a_slow_part():
    compute = {"forward-compute": 1.15, "backward-compute": 1.2, "gc": 1.0}
    even = what_if([1.1, 1.12, 1.11], [1.1, 1.12], compute, total=1.4)
    assert judge_what_if(even).cause is Cause.SEQUENCE
    pauses = what_if([1.1, 1.12, 1.11], [1.1, 1.12], {"forward-compute": 1.01, "gc": 1.3}, total=1.35)
    assert judge_what_if(pauses).cause is Cause.GARBAGE_COLLECTION
    transfers = what_if([1.1, 1.12], [1.1, 1.12], {"forward-compute": 1.0, "grads-reduce-scatter": 1.3}, 1.3)
    assert judge_what_if(transfers).cause is Cause.COMMUNICATION
    assert judge_what_if(what_if([1.0, 1.01], [1.0], {"gc": 1.0}, total=1.02)) is None


COMPUTE = {"forward-compute": 1.15, "backward-compute": 1.2, "gc": 1.0}


def test_what_if_names_no_worker_or_stage_that_has_no_mates():
    one_stage = judge_what_if(what_if([1.2, 1.21, 1.19, 1.2], [1.4], COMPUTE, total=1.4))
    assert one_stage.cause is Cause.SEQUENCE
    one_replica = judge_what_if(what_if([1.4], [1.0, 1.38], COMPUTE, total=1.4))
    assert (one_replica.cause, one_replica.stage, one_replica.confidence) == (Cause.STAGE, 1, 0.5)


def test_what_if_with_one_stage_names_the_slow_replicas_ranks():
    found = judge_what_if(what_if([1.01, 1.5, 1.0], [1.5], COMPUTE, total=1.5))
    assert (found.cause, found.ranks) == (Cause.WORKER, (2, 3))


def test_what_if_with_several_slow_workers_says_so_and_names_none():
    """Two replicas slow: neither stands alone, but the slowdown goes with a few workers put right."""
    result = what_if([1.4, 1.4, 1.0, 1.0], [1.4, 1.4], COMPUTE, total=1.4)
    found = judge_what_if(result, {"Mw": 0.97}, {"Ms": 0.3})
    assert (found.cause, found.ranks, found.replica) == (Cause.WORKER, (), None)


Slowness = Callable[[int, int, int], float]


def made_passes(
    dp: int,
    pp: int,
    tp: int = 1,
    slow: Slowness = lambda replica, stage, tp_rank: 1.0,
    stages: list[float] | None = None,
    length_spread: float = 0.0,
    replica_lengths: list[float] | None = None,
    noise: float = 0.02,
    seed: int = 0,
    n_micro_batches: int = 4,
) -> list[Pass]:
    """Passes of a run: 0.1 s forward, 0.2 s backward, times what makes it slow."""
    draw = random.Random(seed)
    stages = stages or [1.0] * pp
    passes = []
    for step in range(N_STEPS):
        for replica in range(dp):
            own = replica_lengths[replica] if replica_lengths else 1.0
            for number in range(n_micro_batches):
                length = own * draw.uniform(1.0 - length_spread, 1.0 + length_spread)
                for stage in range(pp):
                    for tp_rank in range(tp):
                        rank = (replica * pp + stage) * tp + tp_rank
                        base_s = stages[stage] * length * slow(replica, stage, tp_rank)
                        for kind, kind_s in (("forward", 0.1), ("backward", 0.2)):
                            seconds = kind_s * base_s * draw.uniform(1.0 - noise, 1.0 + noise)
                            passes.append(Pass(step, rank, replica, stage, number, kind, seconds))
    return passes


def only(found: list[Straggler]) -> Straggler:
    assert len(found) == 1, [(s.cause, s.reason) for s in found]
    return found[0]


@pytest.mark.parametrize(
    ("dp", "pp", "tp"), [(4, 4, 1), (2, 4, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8), (2, 1, 1)]
)
@pytest.mark.parametrize("factor", [1.15, 2.0])
def test_a_slow_rank_is_named(dp, pp, tp, factor):
    draw = random.Random(dp * pp * tp)
    culprit = (draw.randrange(dp), draw.randrange(pp), draw.randrange(tp))
    found = only(find_stragglers(made_passes(dp, pp, tp, lambda *at: factor if at == culprit else 1.0)))
    assert found.cause is Cause.WORKER
    assert found.ranks == ((culprit[0] * pp + culprit[1]) * tp + culprit[2],)
    assert (found.replica, found.stage) == culprit[:2]
    assert found.confidence > 0.9
    assert 0.5 * (factor - 1.0) <= found.score <= 1.1 * (factor - 1.0)
    assert str(found.signal(5.0).entity) == f"rank {found.ranks[0]}"


def test_a_slow_rank_among_long_and_short_texts():
    passes = made_passes(4, 2, slow=lambda r, s, t: 1.5 if (r, s) == (2, 1) else 1.0, length_spread=0.3)
    causes = {s.cause: s for s in find_stragglers(passes)}
    assert causes[Cause.WORKER].ranks == (5,)
    assert set(causes) == {Cause.WORKER, Cause.SEQUENCE}


def test_ranks_that_only_work_together_are_named_together():
    passes = made_passes(4, 2, tp=2, slow=lambda r, s, t: 1.5 if (r, s) == (1, 0) else 1.0)
    assert only(find_stragglers(passes)).ranks == (4, 5)


@pytest.mark.parametrize(("dp", "pp"), [(2, 4), (4, 2), (1, 4)])
def test_an_uneven_stage_is_no_workers_fault(dp, pp):
    stages = [1.0] * (pp - 1) + [1.6]
    found = only(find_stragglers(made_passes(dp, pp, stages=stages)))
    assert (found.cause, found.stage, found.ranks) == (Cause.STAGE, pp - 1, ())
    assert (found.confidence <= 0.5) == (dp == 1)


def test_a_slow_rank_and_an_uneven_stage_are_both_told():
    passes = made_passes(4, 4, slow=lambda r, s, t: 1.8 if (r, s) == (3, 1) else 1.0, stages=[1, 1, 1, 1.4])
    found = find_stragglers(passes)
    assert {s.cause for s in found} == {Cause.WORKER, Cause.STAGE}
    assert next(s for s in found if s.cause is Cause.WORKER).ranks == (13,)


@pytest.mark.parametrize(("dp", "pp"), [(4, 1), (4, 4), (2, 2), (8, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_texts_of_many_lengths_are_nobodys_fault(dp, pp, seed):
    found = only(find_stragglers(made_passes(dp, pp, length_spread=0.6, seed=seed)))
    assert found.cause is Cause.SEQUENCE
    assert found.confidence > 0.9
    assert found.replica is None


def test_a_replica_that_is_fed_longer_texts_is_not_called_a_slow_worker():
    found = only(find_stragglers(made_passes(4, 4, replica_lengths=[1.0, 1.4, 1.0, 1.0])))
    assert (found.cause, found.replica) == (Cause.SEQUENCE, 1)


def test_known_work_is_divided_out():
    heavy = [
        Pass(p.step, p.rank, p.replica, p.stage, p.micro_batch, p.kind, p.compute_s * 1.5, work=1.5)
        if p.rank == 3
        else p
        for p in made_passes(4, 1)
    ]
    assert [s for s in find_stragglers(heavy) if s.cause is Cause.WORKER] == []


def test_pauses_of_the_garbage_collector_here_and_there():
    draw = random.Random(1)
    pauses = [
        Pause(step, draw.randrange(8), "garbage_collection", 0.3)
        for step in range(N_STEPS)
        if draw.random() < 0.7
    ]
    found = only(find_stragglers(made_passes(8, 1), pauses))
    assert (found.cause, found.ranks) == (Cause.GARBAGE_COLLECTION, ())


@pytest.mark.parametrize("culprit", [None, 5])
def test_waiting_for_data_on_all_ranks_or_one(culprit):
    pauses = [
        Pause(step, rank, "data", 0.4 if culprit in (None, rank) else 0.01)
        for step in range(N_STEPS)
        for rank in range(8)
    ]
    found = only(find_stragglers(made_passes(8, 1), pauses))
    assert (found.cause, found.ranks) == (Cause.DATA, () if culprit is None else (culprit,))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 1, 1), (4, 4, 1), (8, 1, 2), (1, 1, 1), (1, 4, 1)])
def test_an_even_run_has_no_straggler(dp, pp, tp, seed):
    assert find_stragglers(made_passes(dp, pp, tp, seed=seed, noise=0.05)) == []


def test_nothing_in_nothing_out():
    assert find_stragglers([]) == []
    assert find_stragglers(made_passes(1, 1)[:1]) == []
