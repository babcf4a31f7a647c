"""Counters, states and flaps: only what is new is told."""

from ops.monitors.changes import Counters, Flaps, States


def test_a_counter_tells_its_rise_and_after_a_reset_all_of_it():
    counters = Counters()
    assert [counters.rise("c", value) for value in (7, 7, 9, 2, 2)] == [0, 0, 2, 2, 0]
    assert counters.rise("another", 5) == 0


def test_a_state_is_told_when_it_turns():
    states = States()
    assert [states.turned("s", bad) for bad in (True, True, False, False, True)] == [
        True,
        None,
        False,
        None,
        True,
    ]
    assert [states.turned("late", bad, first_counts=False) for bad in (True, False, True)] == [
        None,
        False,
        True,
    ]


def test_two_downs_in_the_window_flap_and_one_does_not():
    flaps = Flaps(window_s=300, limit=2)
    assert flaps.went_down("l", 1, now=0) == 0
    assert flaps.went_down("l", 0, now=100) == 0
    assert flaps.went_down("l", 1, now=301) == 0  # The first is too old.
    assert flaps.went_down("other", 1, now=302) == 0
    assert flaps.went_down("l", 1, now=500) == 2
    assert flaps.went_down("l", 1, now=501) == 0  # Told already.
    assert flaps.went_down("l", 2, now=900) == 2
