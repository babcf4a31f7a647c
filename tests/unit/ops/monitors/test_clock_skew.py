"""The clock: off, jumped, not synchronised; a slow reference is no offset."""

import pytest

from ops.monitors.clock_skew import ClockSkewMonitor, SyncState, read_sync_state

SYNCHRONISED = SyncState(True, 0.01)


class Clocks:
    """A monotonic clock and a reference that takes `round_trip_s` to answer."""

    def __init__(self):
        self.mono_s, self.wall, self.ahead_s, self.round_trip_s = 100.0, 1e9, 0.0, 0.0

    def reference(self):
        self.mono_s += self.round_trip_s
        return self.wall + self.round_trip_s / 2 - self.ahead_s

    def later(self, seconds):
        self.mono_s += seconds
        self.wall += seconds


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def monitor(clocks):
    return ClockSkewMonitor("n1", clocks.reference, 0.5, lambda: SYNCHRONISED, lambda: clocks.mono_s)


def test_an_offset_is_told_once_and_when_it_is_gone(clocks, monitor):
    assert monitor.check(clocks.wall) == []
    clocks.ahead_s = -0.7
    (signal,) = monitor.check(clocks.wall)
    assert signal.kind == "clock_skew"
    assert signal.value == pytest.approx(-0.7)
    assert monitor.check(clocks.wall) == []
    clocks.ahead_s = 0.1
    assert [s.kind for s in monitor.check(clocks.wall)] == ["clock_skew_cleared"]


def test_a_slow_answer_is_not_an_offset(clocks, monitor):
    clocks.round_trip_s, clocks.ahead_s = 2.0, 0.9
    assert monitor.check(clocks.wall) == []
    clocks.wall += 2.0  # What the reference took.
    clocks.ahead_s = 1.6
    (signal,) = monitor.check(clocks.wall)
    assert signal.value == pytest.approx(1.6)


def test_a_jump_is_told(clocks, monitor):
    monitor.check(clocks.wall)
    clocks.later(10.0)
    assert monitor.check(clocks.wall) == []
    clocks.later(10.0)
    clocks.wall -= 3.0
    (signal,) = monitor.check(clocks.wall)
    assert (signal.kind, signal.value) == ("clock_jump", -3.0)


def test_the_kernel_lost_its_source():
    states = iter([SYNCHRONISED, SyncState(False, 16.0), SyncState(False, 16.0), SYNCHRONISED])
    monitor = ClockSkewMonitor("n1", sync_state=lambda: next(states), monotonic=lambda: 0.0)
    told = [[s.kind for s in monitor.check(0.0)] for _ in range(4)]
    assert told == [[], ["clock_unsynchronised"], [], ["clock_unsynchronised_cleared"]]


def refuse():
    raise OSError("refused")


def test_nothing_to_compare_with():
    monitor = ClockSkewMonitor("n1", sync_state=refuse)
    assert not monitor.is_supported()
    assert monitor.check(0.0) == []


def test_a_reference_that_does_not_answer_is_no_skew():
    monitor = ClockSkewMonitor("n1", refuse, sync_state=refuse)
    assert monitor.is_supported()
    assert monitor.check(0.0) == []


def test_the_real_kernel_answers_or_refuses():
    try:
        state = read_sync_state()
    except OSError:
        return
    assert 0 <= state.max_error_s < 1e4
