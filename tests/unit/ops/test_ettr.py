import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.ettr import sliding_ettr
from ops.goodput import Goodput, Phase, Segment


def goodput(*stretches):
    """From (seconds, phase) pairs, beginning at 1000 s."""
    segments, at = [], 1_000_000_000
    for seconds, phase in stretches:
        segments.append(Segment(at, at + round(seconds * 1e6), phase, 0, 0))
        at = segments[-1].end_us
    return Goodput(tuple(segments), 1_000_000_000, at)


def test_stopped_time_is_nobodys_fault_and_waiting_for_nodes_is():
    whole = goodput((60, Phase.STEP), (1000, Phase.STOPPED), (30, Phase.IDLE), (10, Phase.INIT))
    assert whole.ettr_frac == pytest.approx(0.6)
    assert whole.goodput_frac == pytest.approx(60 / 1100)
    assert goodput((5, Phase.STOPPED)).ettr_frac is None


def test_a_bad_hour_is_seen_in_the_sliding_one_and_hidden_in_the_whole():
    whole = goodput((36_000, Phase.STEP), (3600, Phase.RESTART), (36_000, Phase.STEP))
    points = sliding_ettr(whole)
    assert whole.ettr_frac == pytest.approx(72_000 / 75_600)
    assert points[-1].at == whole.end_us / 1e6
    assert points[-1].frac == 1.0
    assert min(point.frac for point in points) < 0.1
    assert [point.is_full for point in points[:2]] == [False, False]
    assert points[-1].is_full
    assert len(points) <= 240


def test_a_run_younger_than_the_window_is_one_window():
    (point, *_), whole = (points := sliding_ettr(goodput((30, Phase.INIT), (90, Phase.STEP)))), points[-1]
    assert point is whole
    assert (whole.frac, whole.is_full) == (0.75, False)
    assert sliding_ettr(goodput()) == []


STRETCHES = st.lists(
    st.tuples(st.floats(min_value=0.001, max_value=9000), st.sampled_from(list(Phase))), max_size=12
)


@given(STRETCHES, st.floats(min_value=1, max_value=20_000), st.integers(1, 50))
def test_each_point_is_the_share_of_its_window_cut_out_of_the_run(stretches, window_s, max_points):
    whole = goodput(*stretches)
    points = sliding_ettr(whole, window_s, max_points)
    assert len(points) <= max_points + 1
    for point in points:
        end_us = round(point.at * 1e6)
        assert point.frac == pytest.approx(
            whole.between(end_us - round(window_s * 1e6), end_us).ettr_frac, nan_ok=False
        )


@given(STRETCHES, st.lists(st.integers(900_000_000, 90_000_000_000), max_size=6))
def test_parts_of_a_run_add_up_to_the_run(stretches, cuts):
    whole = goodput(*stretches)
    edges = [0, *sorted(cuts), 10**15]
    parts = [whole.between(start, end) for start, end in itertools.pairwise(edges)]
    for phase in Phase:
        assert sum(part.phases_us[phase] for part in parts) == whole.phases_us[phase]
    assert sum(part.wall_us for part in parts) == whole.wall_us
