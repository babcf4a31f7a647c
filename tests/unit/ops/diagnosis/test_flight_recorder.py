"""Flight recorder dumps: real NCCL runs with known faulty ranks, real gloo ranks, corners, bad files."""

import json
import os
import pickle
import random
import re
import time
from pathlib import Path

import pytest

from ops.diagnosis.flight_compare import compare
from ops.diagnosis.flight_dump import Dump, DumpError, parse_dump, read_dump
from ops.diagnosis.flight_recorder import diagnose_dumps, verdict_of
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Role
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind
from tests.support.ranks import run_ranks
from tests.unit.ops.diagnosis.hung_runs import Layout, hung_dumps

DATA = Path(__file__).parents[3] / "data/flight_recorder"
RUNS = ("gpu_error_2nd", "lock_gil_1st")


def dump_paths(run: str) -> list[Path]:
    return sorted((DATA / run).glob("dump_*.pickle"))


def faulty_ranks(run: str) -> list[int]:
    text = (DATA / run / "fault_injection.log").read_text()
    return [int(rank) for rank in re.findall(r"^Rank (\d+),", text, re.MULTILINE)]


@pytest.mark.parametrize("run", RUNS)
def test_the_faulty_ranks_of_a_real_run_are_the_culprits(run):
    verdict = diagnose_dumps(dump_paths(run))
    assert faulty_ranks(run) == [9, 14]
    assert verdict.culprit == Entity(EntityKind.RANK, "9,14")
    assert (verdict.failure_class, verdict.role) == (FailureClass.HANG, Role.ROOT)
    assert verdict.confidence >= 0.8
    assert "[9, 14]" in verdict.evidence


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lost", [0, 3, 8, 10])
def test_a_lost_dump_of_a_waiting_rank_moves_no_blame(run, lost):
    found = compare([d for d in map(read_dump, dump_paths(run)) if d.rank != lost])
    assert found.culprits == (9, 14)
    assert found.missing == (lost,)


@pytest.mark.parametrize("run", RUNS)
def test_faulty_ranks_that_left_no_dump_are_still_found(run):
    found = compare([d for d in map(read_dump, dump_paths(run)) if d.rank not in (9, 14)])
    assert (found.culprits, found.basis) == ((9, 14), "no_dump")
    assert 0.5 <= verdict_of(found).confidence < 0.8


def entry(seq, name="all_reduce", sizes=((4,),), state="scheduled", group="0", **more):
    return {
        "pg_id": int(group),
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [list(s) for s in sizes],
        "input_dtypes": ["Float"],
        "state": state,
        "retired": False,
        "is_p2p": False,
        **more,
    }


def dump(rank, *entries, groups=None, status=None) -> Dump:
    config = {
        name: {"name": name, "desc": "", "ranks": str(ranks)}
        for name, ranks in (groups or {"0": [0, 1, 2]}).items()
    }
    counters = {
        key: {
            "last_enqueued_collective": last,
            "last_started_collective": -1,
            "last_completed_collective": done,
        }
        for key, (last, done) in (status or {}).items()
    }
    tree = {"version": "2.9", "entries": list(entries), "pg_config": config, "pg_status": counters}
    return parse_dump(pickle.dumps(tree, protocol=2), rank)


def test_different_operations_under_one_number_are_the_programs_error():
    found = compare([dump(0, entry(5)), dump(1, entry(5, "all_gather")), dump(2, entry(5))])
    verdict = verdict_of(found)
    assert (verdict.failure_class, verdict.culprit) == (FailureClass.USER_CODE, Entity(EntityKind.RANK, "1"))
    assert verdict.action == "STOP"
    assert "ranks [1] called all_gather" in verdict.evidence


def test_different_sizes_are_an_error_of_all_reduce_and_not_of_all_to_all():
    sizes = [((4,),), ((4,),), ((8,),)]
    reduced = compare([dump(r, entry(5, sizes=s)) for r, s in enumerate(sizes)])
    assert reduced.mismatch is not None
    assert reduced.mismatch.ranks == (2,)
    swapped = compare([dump(r, entry(5, "all_to_all", sizes=s)) for r, s in enumerate(sizes)])
    assert swapped.mismatch is None


def test_equal_sequences_are_told_apart_by_state():
    found = compare(
        [
            dump(r, entry(5, state="scheduled" if r == 1 else "started"), status={"0": (5, 4)})
            for r in range(3)
        ]
    )
    assert (found.culprits, found.basis) == ((1,), "state")


def test_nobody_behind_blames_nobody():
    verdict = verdict_of(compare([dump(r, entry(5), status={"0": (5, 4)}) for r in range(3)]))
    assert (verdict.failure_class, verdict.culprit) == (FailureClass.HANG, UNKNOWN_ENTITY)
    assert verdict.confidence < 0.5


def test_finished_ranks_are_no_hang():
    verdict = verdict_of(compare([dump(r, entry(5, state="completed")) for r in range(3)]))
    assert (verdict.failure_class, verdict.culprit) == (FailureClass.UNKNOWN, UNKNOWN_ENTITY)


def test_a_circle_across_groups_is_the_programs_error():
    groups = {"1": [0, 1], "2": [0, 1]}
    status = {"1": (3, 3), "2": (7, 7)}
    found = compare(
        [
            dump(0, entry(4, group="1"), groups=groups, status=status | {"1": (4, 3)}),
            dump(1, entry(8, group="2"), groups=groups, status=status | {"2": (8, 7)}),
        ]
    )
    assert (found.culprits, found.deadlock) == ((), (0, 1))
    assert verdict_of(found).failure_class is FailureClass.USER_CODE


def test_a_receive_without_its_send_blames_the_sender_and_not_the_stage_behind_it():
    def pipe(rank, name, group):
        return dump(rank, entry(0, name, is_p2p=True, p2p_seq_id=7, op_id=7, group=group), groups=groups)

    groups = {"1": [0, 1], "2": [1, 2]}
    # Stage 2 waits for stage 1, which waits for stage 0, which sends nothing.
    dumps = [dump(0, groups=groups), pipe(1, "recv 1<-0", "1"), pipe(2, "recv 1<-0", "2")]
    assert compare(dumps).culprits == (0,)


def test_most_ranks_behind_one_is_not_blamed_on_most_ranks():
    verdict = verdict_of(
        compare([dump(r, *([entry(5)] if r == 0 else []), status={"0": (4 + (r == 0), 4)}) for r in range(3)])
    )
    assert verdict.role is Role.AMBIGUOUS
    assert verdict.confidence < 0.5


def test_the_json_form_reads_like_the_pickle():
    tree = {"version": "2.9", "entries": [entry(5)], "pg_config": {}, "pg_status": {}}
    assert parse_dump(json.dumps(tree).encode(), 3) == parse_dump(pickle.dumps(tree), 3)


@pytest.mark.parametrize("depth", [1, 12])
def test_the_stopped_rank_of_any_layout_is_found(depth):
    for seed in range(25):
        rng = random.Random(seed)
        layout = rng.choice(
            [Layout(4, 2, 2), Layout(2, 2, 2), Layout(2, 1, 4), Layout(1, 4, 2), Layout(4, 1, 1)]
        )
        faulty = rng.randrange(layout.world_size)
        found = compare(hung_dumps(layout, [faulty], rng, depth=depth, is_gloo=False))
        assert found.culprits == (faulty,), (seed, layout)


def test_of_two_stopped_ranks_no_other_is_blamed():
    n_both = 0
    for seed in range(25):
        rng = random.Random(seed)
        layout = rng.choice([Layout(4, 2, 2), Layout(2, 2, 2), Layout(1, 4, 2)])
        faulty = sorted(rng.sample(range(layout.world_size), 2))
        culprits = compare(hung_dumps(layout, faulty, rng, depth=3, is_gloo=False)).culprits
        # One of them may be held up by the other: then it is a victim too.
        assert culprits
        assert set(culprits) <= set(faulty), (seed, layout)
        n_both += len(culprits) == 2
    assert n_both > 12


def test_gloo_dumps_of_a_layout_without_pipeline_find_the_stopped_rank():
    for seed in range(25):
        rng = random.Random(seed)
        layout = rng.choice([Layout(2, 1, 4), Layout(4, 1, 1), Layout(2, 1, 2), Layout(1, 1, 8)])
        faulty = rng.randrange(layout.world_size)
        groups = {str(i): ranks for i, ranks in enumerate(layout.groups().values())}
        found = compare(hung_dumps(layout, [faulty], rng, depth=1, is_gloo=True), groups)
        assert found.culprits == (faulty,), (seed, layout)


class Malicious:
    """Runs a command when it is unpickled without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path):
    mark = tmp_path / "mark"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / "fr_3"
        path.write_bytes(pickle.dumps({"entries": [Malicious(mark)]}, protocol))
        with pytest.raises(DumpError, match=r"fr_3.*plain values"):
            read_dump(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # the same file does run when it is trusted
    assert mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x02",
        b"plain text",
        pickle.dumps([1]),
        pickle.dumps({"entries": [{}]}),
        b"{}",
        b'{"entries": 3}',
    ],
)
def test_what_is_not_a_dump_is_refused(raw, tmp_path):
    path = tmp_path / "fr_0"
    path.write_bytes(raw)
    with pytest.raises(DumpError, match="fr_0"):
        read_dump(path)


def test_a_truncated_dump_is_refused(tmp_path):
    whole = dump_paths(RUNS[0])[0].read_bytes()
    path = tmp_path / "fr_0"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DumpError):
        read_dump(path)


def test_the_rank_comes_from_the_name(tmp_path):
    raw = dump_paths(RUNS[0])[0].read_bytes()
    for name, rank in {"fr_12": 12, "nccl_trace_rank_7": 7, "rank-00003.pickle": 3}.items():
        path = tmp_path / name
        path.write_bytes(raw)
        assert read_dump(path).rank == rank
    with pytest.raises(DumpError, match="no rank"):
        read_dump(path.rename(tmp_path / "dump"))


def one_rank_asleep(groups, folder):
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    def write(name):
        path = Path(folder) / f"{name}_{rank}"
        path.with_suffix(".new").write_bytes(_dump_fr_trace(True, True, False))
        path.with_suffix(".new").rename(path)

    rank = dist.get_rank()
    values = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(values)
    if rank == 2:  # asleep until the others have given up
        while not all((Path(folder) / f"late_{r}").exists() for r in (0, 1)):
            time.sleep(0.01)
        write("early")
        write("late")
        return
    work = dist.all_reduce(values, async_op=True)
    time.sleep(0.2)
    write("early")
    with pytest.raises(RuntimeError, match="Timed out"):
        work.wait()
    write("late")


def test_gloo_ranks_of_which_one_sleeps(tmp_path):
    run_ranks(one_rank_asleep, 3, tmp_path, str(tmp_path), collective_timeout_s=4.0)
    for moment in ("early", "late"):
        verdict = diagnose_dumps(sorted(tmp_path.glob(f"{moment}_?")))
        assert verdict.failure_class is FailureClass.HANG
        assert verdict.culprit == Entity(EntityKind.RANK, "2"), (moment, verdict.evidence)
    # Without the sleeper's dump it is missed by those who know how many ranks there are.
    verdict = diagnose_dumps(sorted(tmp_path.glob("early_[01]")), world_size=3)
    assert verdict.culprit == Entity(EntityKind.RANK, "2")
