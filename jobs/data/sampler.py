"""The global order of samples: ordinal -> (source, epoch, sequence). Knows neither tokens nor files.

The sampler has no state but the ordinal of the next sample: the order is a pure function of seed and ordinal,
the same on every rank, under every layout and after every restart. Nothing of the corpus' size is shuffled or
stored.

Mixtures: which source the k-th sample comes from is a low-discrepancy interleave in exact arithmetic. In any
prefix each source's count is within (log2(sources) + 1) / 2 of its share, and after each whole period it is
exact.

Order inside a source: each epoch is a permutation of its sequences, computed an element at a time by a
Feistel network keyed by seed, source and epoch, with cycle walking for sizes that are no power of two (Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 4).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from jobs.errors import DataError
from jobs.events import Ranges

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

_HALF_ROUNDS = 12
_NO_ORDINAL = (1 << 63) - 1
_MAX_DENOMINATOR = 10**9
"""Shares are fractions up to this denominator: remainder * numerator stays below 2**63."""


@dataclass(frozen=True)
class Samples:
    """Where some ordinals point, one element an ordinal."""

    sources: Int64s
    epochs: Int64s
    """Times that the source was read whole before this sample."""
    sequences: Int64s
    """Sequence inside the source."""


class GlobalSampler:
    """The order of all samples, for ever: epochs follow one another, each source at its own pace."""

    def __init__(self, n_sequences_per_source: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Nothing is read or shuffled here.

        Args:
            n_sequences_per_source: sequences in one epoch of each source, all above 0.
            weights: relative share of samples of each source.
            seed: the run's seed.

        Raises:
            DataError: a source is empty, or its share is too small to be represented (below 1e-9).
        """
        if len(n_sequences_per_source) != len(weights) or not weights:
            raise ValueError(f"{len(n_sequences_per_source)} sources but {len(weights)} weights")
        for source, n_sequences in enumerate(n_sequences_per_source):
            if n_sequences < 1:
                raise DataError(f"data.sources[{source}] has no whole sequence to sample from")
        self._n_sequences = tuple(n_sequences_per_source)
        # str: 0.7 means seven tenths, not the nearest binary fraction.
        self._shares = _halve(tuple(Fraction(str(weight)) for weight in weights), 0)
        self._keys = tuple(_key(seed, source) for source in range(len(weights)))

    def locate(self, ordinals: Int64s) -> Samples:
        """Source, epoch and sequence of each ordinal (one-dimensional, all 0 or more)."""
        sources = np.zeros(len(ordinals), np.int64)
        counts = np.zeros(len(ordinals), np.int64)
        self._interleave(
            np.asarray(ordinals, np.int64),
            np.arange(len(ordinals)),
            0,
            len(self._n_sequences),
            sources,
            counts,
        )
        epochs = np.zeros(len(ordinals), np.int64)
        sequences = np.zeros(len(ordinals), np.int64)
        for source in np.unique(sources).tolist():
            own = sources == source
            n_sequences = self._n_sequences[source]
            epochs[own], place = np.divmod(counts[own], n_sequences)
            sequences[own] = _permute(place, epochs[own], n_sequences, self._keys[source])
        return Samples(sources, epochs, sequences)

    def _interleave(
        self, ordinals: Int64s, at: Int64s, first: int, stop: int, sources: Int64s, counts: Int64s
    ) -> None:
        """Write source, and number of earlier samples of it, of ordinals within sources [first, stop).

        The sources are halved again and again; each half takes its share by rounding: of the first k samples
        round(k * share) go left. So each level is off by at most one half, whatever k is.
        """
        if stop - first == 1:
            sources[at] = first
            counts[at] = ordinals
            return
        middle = (first + stop) // 2
        share = self._shares[first, stop]
        before = _rounded_product(ordinals, share)
        is_left = _rounded_product(ordinals + 1, share) > before
        self._interleave(before[is_left], at[is_left], first, middle, sources, counts)
        self._interleave((ordinals - before)[~is_left], at[~is_left], middle, stop, sources, counts)


def step_ordinals(start: int, n: int, skipped: Ranges = ()) -> Int64s:
    """The first n ordinals from `start` on that are in none of the skipped ranges, ascending: [n]."""
    parts: list[Int64s] = []
    n_left = n
    for first, stop in (*sorted(skipped), (_NO_ORDINAL, _NO_ORDINAL)):
        if stop <= start:
            continue
        n_before = min(n_left, max(0, first - start))
        parts.append(np.arange(start, start + n_before, dtype=np.int64))
        n_left -= n_before
        if not n_left:
            break
        start = max(start, stop)
    return np.concatenate(parts)


def ordinals_for(whole: Int64s, micro_batch: int, accum: int, dp: int, dp_rank: int) -> Int64s:
    """Ordinals that one data-parallel rank trains on in one step.

    The global batch is always the ordinals of step_ordinals, whatever the layout. They are dealt in order of
    micro-step, then rank, then row: with 2 ranks, micro-batch 2 and 2 micro-steps

        micro-step 0: rank 0 has 0 1, rank 1 has 2 3        micro-step 1: rank 0 has 4 5, rank 1 has 6 7

    Args:
        whole: ordinals of the global batch.
        micro_batch: samples of a micro-batch.
        accum: micro-steps.
        dp: data-parallel ranks.
        dp_rank: which of them.

    Returns:
        [accum, micro_batch] int64.

    Raises:
        ValueError: the global batch is not micro_batch * accum * dp, or dp_rank is not below dp.
    """
    if len(whole) != micro_batch * accum * dp:
        raise ValueError(
            f"global_batch={len(whole)} is not micro_batch x accum x dp = {micro_batch} x {accum} x {dp}"
        )
    if not 0 <= dp_rank < dp:
        raise ValueError(f"dp_rank={dp_rank} is outside 0..{dp - 1}")
    return whole.reshape(accum, dp, micro_batch)[:, dp_rank]


def _halve(weights: tuple[Fraction, ...], first: int) -> dict[tuple[int, int], Fraction]:
    """Share of the left half of each range that is halved of sources `first`, `first` + 1, ..."""
    if len(weights) == 1:
        return {}
    middle = len(weights) // 2
    share = (sum(weights[:middle], Fraction(0)) / sum(weights)).limit_denominator(_MAX_DENOMINATOR)
    if share in (0, 1):
        raise DataError(
            f"data.sources[{first}] to [{first + len(weights) - 1}]: a weight is under 1e-9 of the others; "
            "leave that source out"
        )
    inner = _halve(weights[:middle], first) | _halve(weights[middle:], first + middle)
    return {(first, first + len(weights)): share} | inner


def _rounded_product(values: Int64s, share: Fraction) -> Int64s:
    """round(values * share), exactly and without overflow."""
    whole, rest = np.divmod(values, share.denominator)
    product: Int64s = (
        whole * share.numerator + (rest * share.numerator + share.denominator // 2) // share.denominator
    )
    return product


def _key(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest(), "little")


def _mix(values: Uint64s) -> Uint64s:
    """Spread bits by the finalizer of splitmix64, a bijection (Steele et al., OOPSLA 2014, fig. 16)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _permute(places: Int64s, epochs: Int64s, n_sequences: int, key: int) -> Int64s:
    """Element `places[i]` of the permutation of range(n_sequences) that belongs to `epochs[i]`."""
    if n_sequences == 1:
        return np.zeros_like(places)
    bits = max(2, (n_sequences - 1).bit_length())
    keys = _mix(epochs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    found = _feistel(places.astype(np.uint64), keys, bits)
    # Walking the cycle until it is back inside the range gives a permutation of the range.
    outside = np.flatnonzero(found >= n_sequences)
    while len(outside):
        found[outside] = _feistel(found[outside], keys[outside], bits)
        outside = outside[found[outside] >= n_sequences]
    return found.astype(np.int64)


def _feistel(values: Uint64s, keys: Uint64s, bits: int) -> Uint64s:
    """Permute the numbers of `bits` bits by key: each half in turn is changed by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for half_round in range(_HALF_ROUNDS):
        round_keys = _mix(keys + np.uint64(half_round + 1))
        if half_round % 2:
            low = low ^ (_mix(high ^ round_keys) & low_mask)
        else:
            high = high ^ (_mix(low ^ round_keys) & high_mask)
    return (high << low_bits) | low
