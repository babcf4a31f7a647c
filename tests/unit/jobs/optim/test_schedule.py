import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.optim.schedule import lr_at
from jobs.spec.optim import Constant, Cosine, Linear, OptimSpec, Wsd


def _rates(schedule, total=20, lr=2.0):
    optim = OptimSpec(lr=lr, schedule=schedule)
    return [lr_at(optim, total, step) for step in range(total + 1)]


def test_warm_up_has_no_step_of_rate_zero_and_ends_at_the_peak():
    for schedule in (Cosine(warmup_steps=4), Constant(kind="constant", warmup_steps=4)):
        assert _rates(schedule)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_cosine_at_its_quarters():
    rates = _rates(Cosine(warmup_steps=4, min_lr_frac=0.1))
    assert rates[4] == 2.0
    assert rates[12] == pytest.approx(2.0 * 0.55)
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rates[20] == pytest.approx(0.2)


def test_linear_falls_evenly():
    rates = _rates(Linear(kind="linear", min_lr_frac=0.5))
    assert rates[0] == 2.0
    assert rates[10] == pytest.approx(1.5)
    assert rates[20] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("decay", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_wsd_is_constant_until_its_decay(decay, middle):
    rates = _rates(Wsd(kind="wsd", warmup_steps=2, decay_steps=8, decay=decay))
    assert rates[0] == 1.0
    assert rates[1:13] == [2.0] * 12
    assert rates[16] == pytest.approx(2.0 * middle)
    assert rates[20] == pytest.approx(0.0, abs=1e-12)


def test_a_decay_longer_than_the_run_begins_after_the_warm_up():
    rates = _rates(Wsd(kind="wsd", warmup_steps=5, decay_steps=100))
    assert rates[5] == 2.0
    assert rates[6] < 2.0


SCHEDULES = st.one_of(
    st.builds(Cosine, warmup_steps=st.integers(0, 30), min_lr_frac=st.floats(0, 1)),
    st.builds(Linear, kind=st.just("linear"), warmup_steps=st.integers(0, 30), min_lr_frac=st.floats(0, 1)),
    st.builds(Constant, kind=st.just("constant"), warmup_steps=st.integers(0, 30)),
    st.builds(
        Wsd,
        kind=st.just("wsd"),
        warmup_steps=st.integers(0, 30),
        decay_steps=st.integers(1, 40),
        decay=st.sampled_from(["linear", "sqrt", "cosine"]),
        min_lr_frac=st.floats(0, 1),
    ),
)


@given(SCHEDULES, st.integers(1, 30))
def test_rates_rise_once_and_fall_once(schedule, total):
    rates = _rates(schedule, total)
    peak = min(schedule.warmup_steps, total)
    assert all(0.0 <= rate <= 2.0 for rate in rates)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_a_resumed_run_has_the_rates_of_the_unbroken_one():
    """NVIDIA-NeMo/Automodel#763: the rate is a function of the step alone, so warm-up cannot come twice."""
    optim = OptimSpec(lr=3e-4, schedule=Cosine(warmup_steps=10))
    unbroken = [lr_at(optim, 100, step) for step in range(100)]
    assert [lr_at(optim, 100, step) for step in range(50, 60)] == unbroken[50:60]
    assert unbroken[50] < unbroken[49]
