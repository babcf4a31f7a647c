"""Limits of phases, learned from black boxes."""

import pytest

from ops.black_box import BoxReading, Phase, PhaseSums
from ops.monitors.heartbeat import Beat, PhaseTimes, of_current_run
from tests.support.simulated_ranks import box


def beat(reading: BoxReading, read_at=0.0) -> Beat:
    return Beat("10.0.0.1", reading, age_s=0.0, read_at=read_at)


def after_steps(durations_s: list[float], first_step_s=60.0, **changed) -> list[BoxReading]:
    """The box as it is after each of these steps."""
    sums, readings = PhaseSums(), []
    for duration_s in durations_s:
        sums = sums.with_stay(duration_s)
        table = tuple(sums if phase is Phase.STEP else PhaseSums() for phase in Phase)
        readings.append(box(first_step_s=first_step_s, sums=table, **changed))
    return readings


def taught(durations_s: list[float]) -> PhaseTimes:
    times = PhaseTimes(reserve_s=0.0)
    for reading in after_steps(durations_s):
        times.observe([beat(reading)])
    return times


def test_safe_defaults_before_anything_is_known():
    times = PhaseTimes()
    for phase in Phase:
        assert times.limit_s(box(phase=phase, first_step_s=1.0)) >= 300.0
    assert times.limit_s(box(phase=Phase.STEP)) == 1800.0
    assert times.median_s(Phase.STEP) is None


@pytest.mark.parametrize(
    ("step_s", "limit_s"), [(0.1, 10.0), (1.0, 10.0), (2.0, 10.0), (4.0, 20.0), (46.0, 230.0)]
)
def test_step_limit_is_five_medians_and_ten_seconds_at_least(step_s, limit_s):
    durations_s = [step_s * (0.8 + 0.4 * (i % 5) / 4) for i in range(60)]
    assert taught(durations_s).limit_s(box(first_step_s=60.0)) == pytest.approx(limit_s, rel=0.03)


def test_the_reserve_makes_room_for_the_time_between_looks():
    times = PhaseTimes(reserve_s=2.0)
    for reading in after_steps([1.0] * 10):
        times.observe([beat(reading)])
    assert times.limit_s(box(first_step_s=60.0)) == 8.0


def test_a_run_with_steps_of_two_kinds_gets_room_for_the_long_ones():
    """One step in ten takes four times the median: a limit of five medians would be only just above it."""
    times = taught(([10.0] * 9 + [40.0]) * 10)
    assert times.limit_s(box(first_step_s=60.0)) == 60.0


def test_one_freak_does_not_stretch_the_limit():
    assert taught([10.0] * 30 + [45.0] + [10.0] * 30).limit_s(box(first_step_s=60.0)) == 50.0


def test_few_looks_at_many_short_steps_are_enough():
    readings = after_steps([0.1] * 40)
    times = PhaseTimes(reserve_s=0.0)
    times.observe([beat(readings[9])])
    times.observe([beat(readings[39])])
    assert times.median_s(Phase.STEP) == pytest.approx(0.1)
    assert times.limit_s(box(first_step_s=60.0)) == 10.0


def test_the_same_look_twice_teaches_nothing_new():
    times = taught([1.0, 2.0])
    reading = after_steps([1.0, 2.0])[-1]
    for _ in range(50):
        times.observe([beat(reading)])
    assert times.median_s(Phase.STEP) == 1.5
    assert times.limit_s(box(first_step_s=60.0)) == 300.0


def test_a_first_step_and_a_save_are_learned_too():
    times = PhaseTimes()
    table = tuple(PhaseSums(1, 300.0, 300.0, 300.0) if p is Phase.CHECKPOINT else PhaseSums() for p in Phase)
    times.observe([beat(box(first_step_s=400.0, sums=table))])
    assert times.limit_s(box(attempt=1)) == 2000.0
    assert times.limit_s(box(phase=Phase.CHECKPOINT, first_step_s=400.0)) == 1500.0


def test_only_the_newest_attempt_and_generation_count():
    old = beat(box(rank=0, attempt=0, generation=7))
    first, second = beat(box(rank=1, attempt=1), read_at=1.0), beat(box(rank=1, attempt=1), read_at=2.0)
    zeroth = beat(box(rank=0, attempt=1), read_at=2.0)
    gone = beat(box(rank=2, attempt=0, generation=7), read_at=3.0)
    assert of_current_run([old, second, first, zeroth, gone]) == [zeroth, second]
    assert of_current_run([]) == []
