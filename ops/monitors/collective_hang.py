"""Whether the ranks hang, and who makes the others wait: from the black boxes of all ranks at one moment.

Ranks that wait in a collective are victims, and their age says only how long they have waited. So the ranks
that are least advanced are found first, and only their own phase's limit counts: a rank that saves for
minutes lets nobody else be called hung. Which of the least advanced ranks is to blame:

    no fresh box at all  >  computes while the others wait  >  fewer micro-batches  >  fewer collectives

the last two compared inside a pipeline stage only, because stages differ by design. When nothing tells them
apart the culprit is unknown, and the flight recorders must say more. Reads no files, kills nobody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.black_box import Phase
from ops.monitors.heartbeat import Beat, PhaseTimes, of_current_run
from ops.signal import Entity, EntityKind, Signal

NAME = "collective_hang"
MAX_BEAT_AGE_S = 5.0
"""A box that nobody has read for so long says nothing any more."""
MAX_MISSED_REPORTS = 2.5
"""The same, where reports come so seldom that this is longer."""
ORDER = (Phase.INIT, Phase.LOAD, Phase.COMPILE, Phase.CHECKPOINT, Phase.EVALUATE, Phase.STEP, Phase.END)
"""Phases in which a rank can be with the same number of completed steps, the least advanced first."""
_PLACE = {phase: ORDER.index(phase) for phase in ORDER}


@dataclass(frozen=True)
class Hang:
    """The ranks do not move."""

    at: float
    """Wall clock of the verdict, unix seconds."""
    since: float
    """When the least advanced of them began what it does not finish."""
    phase: Phase
    step: int
    """Completed steps of the least advanced ranks."""
    age_s: float
    limit_s: float
    culprits: tuple[int, ...]
    """Ranks that the others wait for; more than one where they cannot be told apart; empty: unknown."""
    nodes: tuple[str, ...]
    """Of the culprits, in the same order; empty string where a rank was never seen."""
    reason: str
    confidence: float

    def signals(self) -> list[Signal]:
        """One a culprit, or one for the job."""
        entities = [
            Entity(EntityKind.RANK, str(r), node) for r, node in zip(self.culprits, self.nodes, strict=True)
        ]
        return [
            Signal(self.at, NAME, "hang", entity, value=self.age_s, text=self.reason)
            for entity in entities or [Entity(EntityKind.JOB, "all ranks")]
        ]


def find_hang(
    beats: Sequence[Beat],
    n_ranks: int,
    times: PhaseTimes,
    now: float,
    reports_every_s: float = 1.0,
) -> Hang | None:
    """The verdict on one look at all boxes; None: nothing is overdue.

    Args:
        beats: the newest of each rank; those of older attempts may be among them and are ignored.
        n_ranks: ranks of the current generation.
        times: what the run has taught so far.
        now: wall clock, unix seconds.
        reports_every_s: time between two readings of a rank's box. What is longer than a second is added to
            the limit: the box of a rank that goes on may be so much older than what it does now.
    """
    current = of_current_run(beats)
    oldest_read_at = now - max(MAX_BEAT_AGE_S, MAX_MISSED_REPORTS * reports_every_s)
    fresh = [beat for beat in current if beat.read_at >= oldest_read_at or beat.box.has_ended]
    live = [beat for beat in fresh if not beat.box.has_ended]
    behind = _least_advanced(live)
    if not behind:
        return None
    youngest = min(behind, key=lambda beat: beat.age_at(now))
    limit_s = times.limit_s(youngest.box) + max(0.0, reports_every_s - 1.0)
    if youngest.age_at(now) <= limit_s:
        return None
    known = {beat.rank for beat in fresh}
    # Where others have passed INIT, so has a rank that was never seen: then it has no box, which is no fault.
    seen, are_starting = {beat.rank for beat in current}, youngest.box.phase is Phase.INIT
    unseen = [rank for rank in range(n_ranks) if rank not in known and (rank in seen or are_starting)]
    if unseen:
        culprits, why = unseen, "no box of this generation can be read of"
    else:
        suspects, why = _suspects(behind, live)
        culprits = [beat.rank for beat in suspects]
    node_of = {beat.rank: beat.node for beat in current}
    step, age_s = youngest.box.step, youngest.age_at(now)
    what = f"after step {max(0, step)} no rank has left {youngest.box.phase.name.lower()} for {age_s:.1f} s"
    who = f"{why} rank {', '.join(map(str, culprits))}" if culprits else "all ranks are equally far"
    return Hang(
        at=now,
        since=now - age_s,
        phase=youngest.box.phase,
        step=step,
        age_s=age_s,
        limit_s=limit_s,
        culprits=tuple(culprits),
        nodes=tuple(node_of.get(rank, "") for rank in culprits),
        reason=f"{what} (limit {limit_s:.1f} s); {who}",
        confidence={0: 0.3, 1: 0.9}.get(len(culprits), 0.6),
    )


def _least_advanced(live: Sequence[Beat]) -> list[Beat]:
    """Those with the fewest completed steps, and among them those in the earliest phase."""
    step = min((beat.box.step for beat in live), default=0)
    behind = [beat for beat in live if beat.box.step == step]
    place = min((_PLACE[beat.box.phase] for beat in behind), default=0)
    return [beat for beat in behind if _PLACE[beat.box.phase] == place]


def _position(beat: Beat) -> tuple[int, int]:
    return beat.box.step, _PLACE[beat.box.phase]


def _suspects(behind: list[Beat], live: list[Beat]) -> tuple[list[Beat], str]:
    """The ranks among the least advanced that the others wait for, and in words why."""
    suspects, why = behind, "fewer steps or an earlier phase:"
    computing = [beat for beat in behind if beat.box.is_waiting is False]
    waiting = [beat for beat in live if beat.box.is_waiting]
    if computing and waiting:
        suspects, why = computing, "not in a collective while the others wait:"
    for words, key in (("fewer micro-batches:", _micro_batch), ("fewer collectives:", _collective)):
        late = _late(suspects, live, key)
        if late and len(late) < len(suspects):
            suspects, why = late, words
    return (suspects, why) if len(suspects) < len(live) else ([], "")


def _late(suspects: list[Beat], live: list[Beat], key: Callable[[Beat], int]) -> list[Beat]:
    """Suspects that have done less than some rank of their own stage at the same step."""
    most: dict[tuple[int, tuple[int, int]], int] = {}
    for beat in live:
        place = (beat.stage, _position(beat))
        most[place] = max(most.get(place, -1), key(beat))
    return [beat for beat in suspects if 0 <= key(beat) < most[beat.stage, _position(beat)]]


def _micro_batch(beat: Beat) -> int:
    return beat.box.micro_batch


def _collective(beat: Beat) -> int:
    return beat.box.collective
