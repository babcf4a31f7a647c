"""Why a run is slower than it has to be, from compute-normalised times: worker, stage, sequences, data or GC.

A step's time says nothing of who is slow: all ranks wait for the slowest. So only the time inside forward and
backward passes counts, without any communication, and it is taken apart as

    pass = stage (what it has to do) x worker (how slow this rank is) x micro-batch (how long its texts are)

with medians, each factor from the comparison in which nothing else differs: a rank with its stage-mates, a
stage with other stages, a micro-batch with others of the same rank, in all stages and both directions. A
cause's score is the what-if of Lin et al., "Understanding Stragglers in Large Model Training Using What-if
Analysis" (OSDI 2025): by which share is a step longer with this one cause than with all passes equal. A
pipeline of p stages and m micro-batches takes

    T = max over replicas of ( busiest stage + sum of the other stages / m )      (1F1B, sends hidden)

Reports only: most stragglers are no fault of a machine, so nobody is evicted on a step's time. Reads no files
(ops/monitors/straggler_traces.py does).
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ops.signal import Entity, EntityKind, Signal

NAME = "straggler"
THRESHOLD_FRAC = 0.05
"""Slowdowns below are not reported."""
HALF = 0.5
"""A rank that is not slower than all of its mates in half of the steps is no slow worker: its data differ."""
N_STEPS_FOR_TRUST = 8
"""With fewer steps the confidence is less in proportion."""


class Cause(StrEnum):
    """What makes a run slower than it has to be."""

    WORKER = "worker"
    """One rank is slow in comparison with every rank that does the same work."""
    STAGE = "stage"
    """One pipeline stage has more to do than the others, on all replicas."""
    SEQUENCE = "sequence"
    """Micro-batches differ: some replica's texts take longer in all of its stages."""
    DATA = "data"
    """Ranks wait for batches."""
    GARBAGE_COLLECTION = "garbage_collection"
    """Pauses of the interpreter, on one rank or another in each step."""
    COMMUNICATION = "communication"
    """Transfers take longer on some ranks than on others."""


@dataclass(frozen=True)
class Pass:
    """One forward or backward of one micro-batch on one rank: computing only."""

    step: int
    rank: int
    replica: int
    """Data-parallel index: ranks of one replica see the same micro-batches."""
    stage: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    compute_s: float
    work: float = 1.0
    """Relative amount of work (FLOPs), where it is known: times are compared after division by it."""


@dataclass(frozen=True)
class Pause:
    """Time of a rank's step that was no computing."""

    step: int
    rank: int
    kind: Literal["data", "garbage_collection"]
    pause_s: float


@dataclass(frozen=True)
class Straggler:
    """One cause and what it costs."""

    cause: Cause
    score: float
    """Share by which steps are longer for it: 0.10 is a tenth."""
    threshold: float
    confidence: float
    """0..1: how steadily the steps agree."""
    ranks: tuple[int, ...]
    """The ranks in question; empty where no rank is."""
    stage: int | None
    replica: int | None
    reason: str

    def signal(self, now: float, node_of: Callable[[int], str] = lambda rank: "") -> Signal:
        """As a reading: value is the score."""
        if len(self.ranks) == 1:
            entity = Entity(EntityKind.RANK, str(self.ranks[0]), node_of(self.ranks[0]))
        else:
            entity = Entity(EntityKind.JOB, f"stage {self.stage}" if self.stage is not None else "all ranks")
        return Signal(now, NAME, f"straggler_{self.cause}", entity, value=self.score, text=self.reason)


Cell = tuple[int, int]
"""Replica and stage: the ranks that do one thing together."""


@dataclass(frozen=True)
class _Factors:
    """The taken-apart passes."""

    stage_s: dict[int, float]
    """Typical forward + backward of one micro-batch, by stage."""
    rank: dict[int, float]
    """How slow a rank is beside its stage-mates: 1 is as they are."""
    cell: dict[Cell, float]
    micro_batch: dict[tuple[int, int, int], float]
    """(step, replica, micro-batch) -> how long beside the same ranks' others."""
    cell_of: dict[int, Cell]
    steps: list[int]
    n_micro_batches: int


def find_stragglers(
    passes: Sequence[Pass], pauses: Sequence[Pause] = (), threshold: float = THRESHOLD_FRAC
) -> list[Straggler]:
    """All causes that cost at least `threshold`, the dearest first.

    Args:
        passes: of all ranks over some tens of steps in which nothing was restarted or saved.
        pauses: of the same steps; what is not told counts as none.
        threshold: share of a step.
    """
    if not passes:
        return []
    factors = _take_apart(passes)
    equal_s = _step_s(factors, lambda cell: 1.0)
    found = [
        *_workers(passes, factors, equal_s, threshold),
        *_stages(passes, factors, equal_s),
        *_sequences(passes, factors),
        *_pauses(pauses, factors, equal_s),
    ]
    trust = min(1.0, len(factors.steps) / N_STEPS_FOR_TRUST)
    found = [
        Straggler(
            s.cause, s.score, threshold, round(trust * s.confidence, 3), s.ranks, s.stage, s.replica, s.reason
        )
        for s in found
        if s.score >= threshold
    ]
    return sorted(found, key=lambda straggler: -straggler.score)


def _take_apart(passes: Sequence[Pass]) -> _Factors:
    cell_of = {p.rank: (p.replica, p.stage) for p in passes}
    by_rank: dict[tuple[int, str], list[float]] = defaultdict(list)
    for p in passes:
        by_rank[p.rank, p.kind].append(p.compute_s / p.work)
    typical = {key: statistics.median(values) for key, values in by_rank.items()}
    rank_s: dict[int, float] = defaultdict(float)
    for (rank, _), seconds in typical.items():
        rank_s[rank] += seconds
    of_stage: dict[int, list[int]] = defaultdict(list)
    in_cell: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in cell_of.items():
        of_stage[cell[1]].append(rank)
        in_cell[cell].append(rank)
    # median_low: of two mates the faster one is the measure, so a slow one does not excuse itself.
    stage_s = {s: statistics.median_low([rank_s[r] for r in ranks]) for s, ranks in of_stage.items()}
    cell_s = {cell: statistics.median_low([rank_s[r] for r in ranks]) for cell, ranks in in_cell.items()}
    of_batch: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for p in passes:
        own = p.compute_s / typical[p.rank, p.kind]
        of_batch[p.step, p.replica, p.micro_batch].append(own)
    return _Factors(
        stage_s=stage_s,
        rank={rank: rank_s[rank] / stage_s[cell[1]] for rank, cell in cell_of.items()},
        cell={cell: cell_s[cell] / stage_s[cell[1]] for cell in in_cell},
        micro_batch={key: statistics.median_low(values) for key, values in of_batch.items()},
        cell_of=cell_of,
        steps=sorted({p.step for p in passes}),
        n_micro_batches=len({p.micro_batch for p in passes}),
    )


def _step_s(factors: _Factors, slowness: Callable[[Cell], float], with_stages: bool = False) -> float:
    """Time of a step in which every pass takes the mean of all stages, times the cell's slowness."""
    mean_s = statistics.fmean(factors.stage_s.values())
    m = factors.n_micro_batches
    longest_s = 0.0
    for replica in {cell[0] for cell in factors.cell}:
        busy_s = [
            m * (seconds if with_stages else mean_s) * slowness((replica, stage))
            for stage, seconds in factors.stage_s.items()
        ]
        longest_s = max(longest_s, max(busy_s) + (sum(busy_s) - max(busy_s)) / m)
    return longest_s


def _workers(passes: Sequence[Pass], factors: _Factors, equal_s: float, threshold: float) -> list[Straggler]:
    """Ranks, or ranks that only ever work together, that are slower than all that do the same."""
    found = []
    cells_of_stage: dict[int, list[Cell]] = defaultdict(list)
    ranks_of: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in factors.cell_of.items():
        ranks_of[cell].append(rank)
    for cell in factors.cell:
        cells_of_stage[cell[1]].append(cell)
    for cell, ranks in ranks_of.items():
        replica, stage = cell
        suspects = sorted(r for r in ranks if factors.rank[r] >= 1.0 + threshold / 2)
        is_replica = len(factors.stage_s) > 1 and _is_all_of_replica(factors, replica, threshold)
        if not suspects or is_replica:
            continue
        mates = {r for other in cells_of_stage[stage] for r in ranks_of[other]} - {*suspects}
        if not mates:
            continue
        slowness = statistics.median(factors.rank[r] for r in suspects)

        def only_this(other: Cell, this: Cell = cell, slowness: float = slowness) -> float:
            return slowness if other == this else 1.0

        score = _step_s(factors, only_this) / equal_s - 1.0
        steady = _share_slower(passes, suspects, mates, stage, threshold)
        if steady < HALF:
            continue
        who = f"rank {', '.join(map(str, suspects))} (replica {replica}, stage {stage})"
        reason = (
            f"{who} computes {slowness:.2f} times as long as its stage-mates, in {steady:.0%} of the steps "
            f"longer than every one of them; steps are {score:.1%} longer for it"
        )
        found.append(Straggler(Cause.WORKER, score, 0.0, steady, tuple(suspects), stage, replica, reason))
    return found


def _is_all_of_replica(factors: _Factors, replica: int, threshold: float) -> bool:
    """All stages of the replica are slower by about the same: it is what they are fed with."""
    own = [slowness for (r, _), slowness in factors.cell.items() if r == replica]
    return min(own) >= 1.0 + threshold / 2 and min(own) - 1.0 >= (max(own) - 1.0) / 2


def _share_slower(
    passes: Sequence[Pass], suspects: Sequence[int], mates: set[int], stage: int, threshold: float
) -> float:
    """Share of the steps in which the suspects take longer than every mate, forward and backward."""
    sums: dict[tuple[int, str, int], float] = defaultdict(float)
    for p in passes:
        if p.stage == stage:
            sums[p.step, p.kind, p.rank] += p.compute_s / p.work
    steps = {p.step for p in passes}
    kinds = {p.kind for p in passes}
    slower = 0
    for step in steps:
        slower += all(
            min(sums[step, kind, r] for r in suspects)
            > (1.0 + threshold / 2) * max(sums[step, kind, r] for r in mates)
            for kind in kinds
        )
    return slower / len(steps)


def _stages(passes: Sequence[Pass], factors: _Factors, equal_s: float) -> list[Straggler]:
    if len(factors.stage_s) < 2:
        return []
    slowest = max(factors.stage_s, key=lambda stage: factors.stage_s[stage])
    others = [seconds for stage, seconds in factors.stage_s.items() if stage != slowest]
    score = _step_s(factors, lambda cell: 1.0, with_stages=True) / equal_s - 1.0
    by_step: dict[int, dict[int, dict[int, float]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(float))
    )
    for p in passes:
        by_step[p.step][p.stage][p.rank] += p.compute_s / p.work
    agree = 0
    for stages in by_step.values():
        typical = {stage: statistics.median_low(ranks.values()) for stage, ranks in stages.items()}
        agree += max(typical, key=lambda stage: typical[stage]) == slowest
    ratio = factors.stage_s[slowest] / statistics.median(others)
    reason = (
        f"stage {slowest} computes {ratio:.2f} times as long as the other stages on all replicas; steps are "
        f"{score:.1%} longer than with equal stages: move layers away from it"
    )
    confidence = agree / len(by_step)
    if len(factors.cell_of) == len(factors.stage_s):
        confidence /= 2
        reason += "; with one rank a stage a slow rank looks the same"
    return [Straggler(Cause.STAGE, score, 0.0, confidence, (), slowest, None, reason)]


def _sequences(passes: Sequence[Pass], factors: _Factors) -> list[Straggler]:
    sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (step, replica, _), factor in factors.micro_batch.items():
        sums[step][replica] += factor * _replica_level(factors, replica)
    scores = [max(of.values()) / statistics.fmean(of.values()) - 1.0 for of in sums.values() if len(of) > 1]
    if not scores:
        return []
    score = statistics.fmean(scores)
    forward, backward = _pairs(passes)
    agreement = statistics.correlation(forward, backward) if len(set(forward)) > 1 < len(set(backward)) else 0
    heaviest = [max(of, key=lambda replica: of[replica]) for of in sums.values()]
    often = statistics.mode(heaviest)
    always = often if heaviest.count(often) >= 0.8 * len(heaviest) else None
    reason = (
        f"the replica with the longest micro-batches computes {score:.1%} longer than the mean one; forward "
        f"and backward of a micro-batch agree with a correlation of {agreement:.2f}: balance sequences"
    )
    return [Straggler(Cause.SEQUENCE, score, 0.0, max(0.0, agreement), (), None, always, reason)]


def _replica_level(factors: _Factors, replica: int) -> float:
    """How slow a replica is in all of its stages; with one stage that is the worker's affair."""
    if len(factors.stage_s) < 2:
        return 1.0
    return min(slowness for (r, _), slowness in factors.cell.items() if r == replica)


def _pairs(passes: Sequence[Pass]) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of the same micro-batch and rank, each over the rank's mean."""
    times: dict[tuple[int, int, int], dict[str, float]] = defaultdict(dict)
    for p in passes:
        times[p.rank, p.step, p.micro_batch][p.kind] = p.compute_s
    by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (rank, _, _), both in times.items():
        if len(both) == 2:
            by_rank[rank].append((both["forward"], both["backward"]))
    forward: list[float] = []
    backward: list[float] = []
    for pairs in by_rank.values():
        means = [statistics.fmean(side) for side in zip(*pairs, strict=True)]
        forward += [f / means[0] for f, _ in pairs]
        backward += [b / means[1] for _, b in pairs]
    return forward, backward


def _pauses(pauses: Sequence[Pause], factors: _Factors, equal_s: float) -> list[Straggler]:
    found = []
    for kind, cause in (("data", Cause.DATA), ("garbage_collection", Cause.GARBAGE_COLLECTION)):
        by_step: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for pause in pauses:
            if pause.kind == kind and pause.pause_s > 0.0:
                by_step[pause.step][pause.rank] += pause.pause_s
        if not by_step:
            continue
        longest = [max(of.values()) for of in by_step.values()]
        score = sum(longest) / len(factors.steps) / equal_s
        who = [max(of, key=lambda rank: of[rank]) for of in by_step.values()]
        often = statistics.mode(who)
        alone = who.count(often) >= 0.8 * len(who) and _stands_out(by_step, often)
        ranks = (often,) if alone else ()
        words = "waits for data" if cause is Cause.DATA else "pauses for garbage collection"
        reason = (
            f"in {len(by_step)} of {len(factors.steps)} steps {f'rank {often}' if alone else 'some rank'} "
            f"{words}, {max(longest):.3f} s at most; steps are {score:.1%} longer for it"
        )
        steady = len(by_step) / len(factors.steps)
        confidence = 0.5 + 0.5 * min(1.0, steady)
        found.append(Straggler(cause, score, 0.0, confidence, ranks, None, None, reason))
    return found


def _stands_out(by_step: dict[int, dict[int, float]], rank: int) -> bool:
    """The rank's pauses are twice as long as the longest of the others', in most steps."""
    hits = 0
    for of in by_step.values():
        others = [seconds for other, seconds in of.items() if other != rank]
        hits += of.get(rank, 0.0) >= 2.0 * max(others, default=0.0)
    return hits >= 0.8 * len(by_step)
