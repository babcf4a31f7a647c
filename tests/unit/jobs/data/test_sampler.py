"""The global order of samples."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.data.sampler import GlobalSampler, ordinals_for, step_ordinals
from jobs.errors import DataError


def sequences(sampler: GlobalSampler, start: int, stop: int) -> list[int]:
    return sampler.locate(np.arange(start, stop)).sequences.tolist()


@given(n=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    samples = GlobalSampler([n], [1.0], seed).locate(np.arange(epoch * n, (epoch + 1) * n))
    assert sorted(samples.sequences.tolist()) == list(range(n))
    assert set(samples.epochs.tolist()) == {epoch}


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    data=st.data(),
)
def test_an_ordinal_alone_decides(sizes, seed, cuts, data) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    whole = GlobalSampler(sizes, weights, seed).locate(np.arange(400))
    edges = sorted({0, 400, *cuts})
    again = [GlobalSampler(sizes, weights, seed).locate(np.arange(a, b)) for a, b in pairwise(edges)]
    for field in ("sources", "epochs", "sequences"):
        assert (
            np.concatenate([getattr(part, field) for part in again]).tolist()
            == getattr(whole, field).tolist()
        )
    # Within each source and epoch no sequence comes twice, and epochs follow one another.
    for source, size in enumerate(sizes):
        own = whole.sources == source
        ids = whole.sequences[own]
        assert whole.epochs[own].tolist() == [i // size for i in range(own.sum())]
        for epoch in range(math.ceil(own.sum() / size)):
            part = ids[epoch * size : (epoch + 1) * size].tolist()
            assert len(set(part)) == len(part)
            assert max(part) < size


def test_epochs_and_seeds_differ_and_look_shuffled() -> None:
    n = 1000
    sampler = GlobalSampler([n], [1.0], 0)
    first, second = sequences(sampler, 0, n), sequences(sampler, n, 2 * n)
    other = sequences(GlobalSampler([n], [1.0], 1), 0, n)
    for one, two in ((first, second), (first, other), (first, list(range(n)))):
        # Two random permutations agree at one place on average (Poisson); 8 or more has odds of 1e-6.
        assert sum(a == b for a, b in zip(one, two, strict=True)) < 8
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.15
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.15


def test_each_sequence_is_as_often_early_as_late() -> None:
    # Over 1,500 epochs each place must hold each sequence about 125 times: chi-square of 11 x 11 freedoms.
    n, epochs = 12, 1500
    drawn = np.array(sequences(GlobalSampler([n], [1.0], 5), 0, n * epochs)).reshape(epochs, n)
    counts = np.array([np.bincount(drawn[:, place], minlength=n) for place in range(n)])
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert chi_square < 121 + 5 * math.sqrt(2 * 121)


def test_two_sources_have_unrelated_orders() -> None:
    samples = GlobalSampler([500, 500], [1.0, 1.0], 0).locate(np.arange(1000))
    one, two = (samples.sequences[samples.sources == source] for source in (0, 1))
    assert (one == two).sum() < 8


@pytest.mark.parametrize(
    "weights", [[0.7, 0.2, 0.1], [1.0], [5.0, 5.0], [0.001, 1.0], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]]
)
def test_mixture_is_exact_in_every_prefix(weights: list[float]) -> None:
    n = 20_000
    sources = GlobalSampler([13] * len(weights), weights, 0).locate(np.arange(n)).sources
    for source, weight in enumerate(weights):
        due = np.arange(1, n + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(sources == source) - due).max() <= (math.log2(len(weights)) + 1) / 2 + 1e-6
    assert np.bincount(
        GlobalSampler([9, 9, 9], [0.7, 0.2, 0.1], 3).locate(np.arange(1000)).sources
    ).tolist() == [700, 200, 100]


def test_far_ordinals_and_huge_sources_do_not_overflow() -> None:
    n = 10**12
    sampler = GlobalSampler([n, 3], [0.9999, 0.0001], 0)
    samples = sampler.locate(np.arange(10**15, 10**15 + 20_000))
    assert np.bincount(samples.sources).tolist() == [19_998, 2]
    ids = samples.sequences[samples.sources == 0]
    assert len(set(ids.tolist())) == 19_998
    assert 0 <= ids.min() < n / 100 < n * 0.99 < ids.max() < n
    assert set(samples.epochs[samples.sources == 0].tolist()) == {999}


def test_an_empty_source_and_a_vanishing_weight_are_refused() -> None:
    with pytest.raises(DataError, match=r"sources\[1\] has no whole sequence"):
        GlobalSampler([5, 0], [1.0, 1.0], 0)
    with pytest.raises(DataError, match="weight"):
        GlobalSampler([5, 5], [1.0, 1e-12], 0)


@given(micro=st.integers(1, 4), accum=st.integers(1, 4), dp=st.integers(1, 5), start=st.integers(0, 10**12))
def test_every_layout_trains_on_the_same_set(micro: int, accum: int, dp: int, start: int) -> None:
    whole = micro * accum * dp
    ranks = [ordinals_for(step_ordinals(start, whole), micro, accum, dp, rank) for rank in range(dp)]
    assert all(rank.shape == (accum, micro) for rank in ranks)
    # The documented order: micro-step, then rank, then row.
    dealt = [ordinal for step in range(accum) for rank in ranks for ordinal in rank[step].tolist()]
    assert dealt == list(range(start, start + whole))


def test_wrong_rank_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch=8"):
        ordinals_for(step_ordinals(0, 8), 2, 2, 3, 0)
    with pytest.raises(ValueError, match="dp_rank=2"):
        ordinals_for(step_ordinals(0, 8), 2, 2, 2, 2)


@pytest.mark.parametrize(
    ("start", "skipped", "expected"),
    [
        (3, (), [3, 4, 5, 6]),
        (3, ((0, 3),), [3, 4, 5, 6]),
        (3, ((3, 5),), [5, 6, 7, 8]),
        (3, ((1, 5),), [5, 6, 7, 8]),
        (3, ((7, 9),), [3, 4, 5, 6]),
        (3, ((6, 9),), [3, 4, 5, 9]),
        (3, ((20, 30), (5, 6), (4, 8), (8, 9)), [3, 9, 10, 11]),
        (3, ((0, 100), (4, 5)), [100, 101, 102, 103]),
    ],
)
def test_skipped_ranges_are_passed_over(start, skipped, expected):
    assert step_ordinals(start, 4, skipped).tolist() == expected
