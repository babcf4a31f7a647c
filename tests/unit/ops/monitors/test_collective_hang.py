"""Hangs: found within the limit, with the right culprit, and none where there is none."""

import random
from dataclasses import replace

import pytest

from ops.black_box import BlackBox, Identity, Phase, box_path
from ops.monitors.collective_hang import Hang, find_hang
from ops.monitors.heartbeat import Beat, PhaseTimes
from tests.support.simulated_ranks import BOOT, WALL_OFFSET, Habits, SimulatedRanks, box

LOOK_EVERY_S = 1.0
N_RANKS = 4


def first_verdict(
    ranks: SimulatedRanks, times: PhaseTimes, until: float, every_s: float = LOOK_EVERY_S
) -> Hang | None:
    """Look again and again until there is one."""
    now = ranks.began_at
    while now < until:
        now += every_s
        ranks.run_until(now)
        beats = ranks.look(now)
        times.observe(beats)
        hang = find_hang(beats, ranks.n_ranks, times, WALL_OFFSET + now)
        if hang:
            return hang
    return None


@pytest.mark.parametrize("seed", range(4))
def test_half_an_hour_without_a_fault_gives_no_verdict(tmp_path, seed):
    """Jittered steps, a first step of minutes, saves of 1 to 90 s that end on each rank at another time."""
    draw = random.Random(seed)
    habits = Habits(
        step_s=draw.choice([0.2, 1.0, 3.0, 8.0, 20.0]),
        jitter_frac=draw.choice([0.1, 0.5, 1.0]),
        first_step_s=draw.choice([60.0, 300.0]),
        save_every=draw.choice([5, 40]),
        tells_waiting=draw.random() < 0.5,
    )
    ranks = SimulatedRanks(tmp_path, N_RANKS, habits, seed)
    assert first_verdict(ranks, PhaseTimes(), 1800.0) is None
    assert min(beat.box.step for beat in ranks.look(1800.0)) > 20
    ranks.close()


@pytest.mark.parametrize("seed", range(10))
def test_every_hang_in_a_step_is_found_within_the_limit(tmp_path, seed):
    draw = random.Random(100 + seed)
    habits = Habits(
        step_s=draw.choice([0.5, 1.0, 3.0, 6.0]),
        save_every=10_000,
        evaluate_every=10_000,
        tells_waiting=seed % 2 == 0,
    )
    culprit = draw.randrange(N_RANKS)
    hang_at = draw.uniform(320.0, 420.0)
    ranks = SimulatedRanks(tmp_path, N_RANKS, habits, seed, hang_rank=culprit, hang_at=hang_at)
    times = PhaseTimes()
    hang = first_verdict(ranks, times, 600.0)
    assert hang is not None
    assert hang.phase is Phase.STEP
    assert hang.at - WALL_OFFSET - hang_at <= max(10.0, 5.0 * times.median_s(Phase.STEP))
    stuck = ranks.look(600.0)[culprit].box
    if habits.tells_waiting:
        is_told_apart = stuck.is_waiting is False
    else:
        is_told_apart = stuck.micro_batch < habits.n_micro_batches
    assert hang.culprits == ((culprit,) if is_told_apart else ())
    ranks.close()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_stuck_in_a_save_is_the_culprit_and_not_those_in_the_next_step(tmp_path, rank):
    habits = Habits(step_s=1.0, save_every=40, save_s=(5.0, 6.0), evaluate_every=10_000)
    quiet = SimulatedRanks(tmp_path, N_RANKS, habits, seed=3)
    first_verdict(quiet, PhaseTimes(), 250.0)
    save_at = next(b.box.entered_at_mono_s for b in _looks(quiet, 250.0) if b.box.phase is Phase.CHECKPOINT)
    quiet.close()
    stuck = SimulatedRanks(tmp_path, N_RANKS, habits, seed=3, hang_rank=rank, hang_at=save_at + 2.0)
    hang = first_verdict(stuck, PhaseTimes(), 3000.0, every_s=5.0)
    stuck.close()
    assert hang is not None
    assert (hang.phase, hang.culprits, hang.nodes) == (Phase.CHECKPOINT, (rank,), (f"10.0.0.{1 + rank}",))


def _looks(ranks: SimulatedRanks, now: float) -> list[Beat]:
    """Beats at every half second from `now` on."""
    beats = []
    for _ in range(400):
        now += 0.5
        ranks.run_until(now)
        beats += ranks.look(now)
    return beats


def beats_of(*boxes, age_s=100.0, stages=None) -> list[Beat]:
    stages = stages or [0] * len(boxes)
    return [
        Beat(f"n{reading.identity.rank}", reading, age_s, read_at=0.0, stage=stage)
        for reading, stage in zip(boxes, stages, strict=True)
    ]


def learned() -> PhaseTimes:
    """A run with steps of one second."""
    times = PhaseTimes()
    sums = box().sums
    for count in range(1, 20):
        steps = replace(sums[Phase.STEP], count=count, last_s=1.0, max_s=1.0, total_s=float(count))
        times.observe(beats_of(box(first_step_s=9.0, sums=(*sums[:3], steps, *sums[4:]))))
    return times


def verdict(beats: list[Beat], n_ranks: int | None = None, now: float = 0.0) -> Hang | None:
    return find_hang(beats, n_ranks or len(beats), learned(), now)


def in_step(rank: int, **changed):
    return box(rank=rank, first_step_s=9.0, **changed)


def test_fewer_steps_make_the_culprit():
    hang = verdict(beats_of(in_step(0, step=8), in_step(1, step=7), in_step(2, step=8)))
    assert (hang.culprits, hang.step, hang.limit_s) == ((1,), 7, 9.0)
    assert "rank 1" in hang.reason
    assert "limit 9.0 s" in hang.reason
    (signal,) = hang.signals()
    assert (signal.kind, str(signal.entity), signal.value) == ("hang", "rank 1 (node n1)", 100.0)


def test_fewer_collectives_make_the_culprit():
    assert verdict(beats_of(in_step(0, collective=8), in_step(1, collective=7))).culprits == (1,)


def test_all_equal_is_unknown():
    hang = verdict(beats_of(in_step(0), in_step(1)))
    assert hang.culprits == ()
    assert hang.confidence <= 0.5
    (signal,) = hang.signals()
    assert signal.entity.kind == "job"


def test_stages_are_not_compared_with_one_another():
    """The last stage has begun fewer micro-batches by design: its mate that has begun fewer still is late."""
    boxes = [in_step(r, micro_batch=m) for r, m in enumerate((4, 4, 2, 1))]
    hang = verdict(beats_of(*boxes, stages=[0, 0, 1, 1]))
    assert hang.culprits == (3,)
    equal = [in_step(r, micro_batch=m) for r, m in enumerate((4, 4, 2, 2))]
    assert verdict(beats_of(*equal, stages=[0, 0, 1, 1])).culprits == ()


def test_the_rank_that_computes_while_all_wait_is_blamed_over_one_with_fewer_micro_batches():
    boxes = [
        in_step(0, micro_batch=4, is_waiting=True),
        in_step(1, micro_batch=3, is_waiting=False),
        in_step(2, micro_batch=2, is_waiting=True),
    ]
    assert verdict(beats_of(*boxes, stages=[0, 1, 2])).culprits == (1,)


def test_whoever_saves_excuses_those_who_wait_for_it():
    saving = box(rank=0, phase=Phase.CHECKPOINT, step=7)
    assert verdict(beats_of(saving, in_step(1, step=7), in_step(2, step=7))) is None


def test_just_back_in_its_step_excuses_too():
    waits, back = beats_of(in_step(0), in_step(1))
    assert verdict([waits, replace(back, age_s=2.0)]) is None


def test_boxes_of_an_older_attempt_are_ignored():
    """A save that an earlier attempt began and never ended (a file left behind) is nobody's hang."""
    left = box(rank=1, attempt=0, phase=Phase.CHECKPOINT)
    new = [in_step(0, attempt=1), in_step(1, attempt=1)]
    moving = [replace(beat, age_s=1.0) for beat in beats_of(*new)]
    stale = replace(beats_of(left)[0], age_s=90_000.0)
    assert verdict([stale, *moving], n_ranks=2) is None
    assert verdict([*moving, stale], n_ranks=2) is None


def test_boxes_of_ranks_that_are_no_more_are_ignored():
    """The run went on with fewer ranks: what rank 3 left behind is neither a hang nor a culprit."""
    new = [replace(beat, age_s=1.0) for beat in beats_of(in_step(0, attempt=1), in_step(1, attempt=1))]
    left = beats_of(in_step(3, attempt=0, step=2), age_s=90_000.0)
    assert verdict([*new, *left], n_ranks=2) is None
    stuck = [replace(beat, age_s=60.0) for beat in new]
    assert verdict([*stuck, *left], n_ranks=2).culprits == ()


def test_ended_ranks_are_ignored():
    ended = [box(rank=r, phase=Phase.END, has_ended=True) for r in range(2)]
    assert verdict([replace(b, age_s=90_000.0) for b in beats_of(*ended)]) is None
    one_left = in_step(1)
    assert verdict([*beats_of(ended[0]), *beats_of(one_left)], n_ranks=2).culprits in ((), (1,))


def test_a_rank_without_a_fresh_box_is_the_suspect_once_the_others_are_overdue():
    seen = beats_of(in_step(0), in_step(1), in_step(2))
    gone = [*seen[:2], replace(seen[2], read_at=-60.0)]
    hang = verdict(gone, n_ranks=4)
    assert (hang.culprits, hang.nodes) == ((2,), ("n2",)), "the others train, so rank 3 does: it has no box"
    moving = [replace(beat, age_s=1.0) for beat in gone]
    assert verdict(moving, n_ranks=4) is None


def test_a_rank_that_is_never_seen_while_the_others_start_is_the_suspect():
    starting = (in_step(rank, phase=Phase.INIT, step=-1) for rank in range(2))
    hang = verdict(beats_of(*starting, age_s=4000.0), n_ranks=3)
    assert (hang.culprits, hang.nodes) == ((2,), ("",))


def test_no_boxes_no_verdict():
    assert find_hang([], 4, PhaseTimes(), 0.0) is None


def test_a_restart_of_the_attempt_forgets_nothing_and_blames_nobody(tmp_path):
    """A rank hangs, the ranks come back as attempt 1: their long first step and load are no hang."""
    times = PhaseTimes()
    habits = Habits(step_s=1.0, first_step_s=60.0)
    old = SimulatedRanks(tmp_path, N_RANKS, habits, seed=5, hang_rank=2, hang_at=200.0)
    assert first_verdict(old, times, 400.0) is not None
    new = SimulatedRanks(tmp_path, N_RANKS, habits, seed=6, attempt=1, began_at=400.0)
    old.run_until(400.0)
    assert first_verdict(new, times, 700.0) is None
    old.close()
    new.close()


def test_box_path_of_a_rank_that_was_never_started_is_nobodys(tmp_path):
    """Three of four ranks came up and wait for the fourth in INIT: it is named."""
    times = PhaseTimes()
    for rank in range(3):
        BlackBox(box_path(tmp_path, rank), Identity(0, 0, rank, rank, BOOT), 0.0, WALL_OFFSET).close()
    ranks = [box(rank=r, phase=Phase.INIT, step=-1) for r in range(3)]
    waited_s = 1000.0
    beats = [replace(beat, age_s=waited_s) for beat in beats_of(*ranks)]
    assert find_hang(beats, 4, times, 0.0).culprits == (3,)
    assert find_hang([replace(b, age_s=800.0) for b in beats], 4, times, 0.0) is None
