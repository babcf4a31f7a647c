"""Silent corruption: replicas of the same parameters vote by their digests, and the odd one out is named.

Replicas get the same gradients and make the same update, so their parameters are equal to the bit for ever;
a rank whose memory or arithmetic lied once stays different. With two replicas, or with no majority, the vote
names nobody. Computes no digest (jobs/comm/digest.py does).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ops.signal import Entity, EntityKind, Signal

NAME = "replica_digest"


@dataclass(frozen=True)
class DigestVerdict:
    """Replicas differ."""

    step: int
    """Completed steps when the digests were taken."""
    odd_ranks: tuple[int, ...]
    """Ranks that a majority of replicas contradicts; empty: unknown."""
    suspects: tuple[int, ...]
    """Where no majority was: all ranks that may be the wrong ones."""
    buckets: tuple[int, ...]
    """Places of the digests that differ."""
    confidence: float
    reason: str

    def signals(self, now: float, node_of: Callable[[int], str] = lambda rank: "") -> list[Signal]:
        """One for each odd rank, or one for the job."""
        entities = [Entity(EntityKind.RANK, str(rank), node_of(rank)) for rank in self.odd_ranks]
        return [
            Signal(now, NAME, "replica_differs", entity, value=float(len(self.buckets)), text=self.reason)
            for entity in entities or [Entity(EntityKind.JOB, "replicas")]
        ]


def vote(step: int, digests: Mapping[int, Sequence[int]]) -> DigestVerdict | None:
    """The majority's verdict, bucket by bucket; None: all replicas are equal.

    Args:
        step: completed steps when the digests were taken, the same on all ranks.
        digests: rank -> one digest a bucket, of ranks that should hold the same bytes.

    Raises:
        ValueError: the ranks have not the same number of buckets.
    """
    lengths = {rank: len(of) for rank, of in digests.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"replicas must have the same buckets, found these numbers by rank: {lengths}")
    n_buckets = next(iter(lengths.values()), 0)
    odd: set[int] = set()
    suspects: set[int] = set()
    buckets = []
    largest = len(digests)
    for bucket in range(n_buckets):
        counts = Counter(of[bucket] for of in digests.values())
        if len(counts) == 1:
            continue
        buckets.append(bucket)
        value, n_equal = counts.most_common(1)[0]
        if 2 * n_equal > len(digests):
            odd |= {rank for rank, of in digests.items() if of[bucket] != value}
            largest = min(largest, n_equal)
        else:
            suspects |= set(digests)
    if not buckets:
        return None
    suspects -= odd
    where = f"after step {step} bucket {', '.join(map(str, buckets))}"
    if odd:
        who = f"of rank {', '.join(map(str, sorted(odd)))} differs from {largest} equal ones of"
    else:
        who = "differs without a majority among"
    return DigestVerdict(
        step=step,
        odd_ranks=tuple(sorted(odd)),
        suspects=tuple(sorted(suspects)),
        buckets=tuple(buckets),
        confidence=round(largest / len(digests), 3) if odd else round(1.0 / len(digests), 3),
        reason=f"{where} {who} {len(digests)} replicas",
    )
