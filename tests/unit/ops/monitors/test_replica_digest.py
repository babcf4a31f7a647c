"""The vote over digests of replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.monitors.replica_digest import vote


def test_equal_replicas_give_no_verdict():
    assert vote(10, dict.fromkeys(range(4), (5, 6))) is None
    assert vote(10, {0: (5, 6)}) is None
    assert vote(10, {}) is None


def test_the_odd_one_out_is_named_with_its_bucket():
    found = vote(40, {0: (1, 2, 3), 4: (1, 2, 3), 8: (1, 9, 3)})
    assert (found.step, found.odd_ranks, found.suspects, found.buckets) == (40, (8,), (), (1,))
    (signal,) = found.signals(5.0, lambda rank: f"10.0.0.{rank}")
    assert str(signal.entity) == "rank 8 (node 10.0.0.8)"
    assert "rank 8" in signal.text


def test_two_ranks_wrong_in_two_buckets_are_both_named():
    found = vote(1, {0: (1, 2), 1: (7, 2), 2: (1, 8)})
    assert (found.odd_ranks, found.buckets) == ((1, 2), (0, 1))


@pytest.mark.parametrize("digests", [(1, 2), (1, 1, 2, 2), (1, 2, 3), (1, 1, 2, 3)])
def test_no_majority_names_nobody(digests):
    found = vote(1, {rank: (digest,) for rank, digest in enumerate(digests)})
    assert found.odd_ranks == ()
    assert found.suspects == tuple(range(len(digests)))
    assert found.confidence <= 0.5
    (signal,) = found.signals(0.0)
    assert signal.entity.kind == "job"


def test_ranks_that_are_no_replicas_are_refused():
    with pytest.raises(ValueError, match="same buckets"):
        vote(1, {0: (1,), 1: (1, 2)})


@given(n=st.integers(3, 40), data=st.data())
def test_any_minority_is_found_wherever_it_sits(n, data):
    wrong = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=(n - 1) // 2))
    found = vote(0, {rank: (1_000 + rank if rank in wrong else 7, 7) for rank in range(n)})
    assert found.odd_ranks == tuple(sorted(wrong))
    assert found.buckets == (0,)
