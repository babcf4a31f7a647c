"""How long a rank may stay in a phase: limits learned from the run itself, out of all ranks' black boxes.

A limit for everything would be either too long for a step or too short for a first step, a compilation or a
save. So each phase has its own, from what the same run has needed for it so far; before it has shown that, a
safe default. Judges nobody (ops/monitors/collective_hang.py does) and reads no files.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ops.black_box import BoxReading, Identity, Phase, PhaseSums

PHASES = tuple(Phase)
N_KEPT = 256
"""Durations of a phase that are remembered: old ones say nothing of how the run goes today."""


@dataclass(frozen=True)
class Beat:
    """A rank's black box as its node agent read it."""

    node: str
    box: BoxReading
    age_s: float
    """Time in the phase at the moment of reading, by the node's own monotonic clock."""
    read_at: float
    """Wall clock of the reading, unix seconds, corrected for the node's clock skew."""
    stage: int = 0
    """Pipeline stage of the rank: micro-batches and collectives compare only inside a stage."""

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.box.identity.rank

    @property
    def run(self) -> tuple[int, int]:
        """Attempt and generation: later ones compare greater."""
        return self.box.identity.attempt, self.box.identity.generation

    def age_at(self, now: float) -> float:
        """Time in the phase at `now`, if it has not left it since it was read."""
        return self.age_s + max(0.0, now - self.read_at)


@dataclass(frozen=True)
class PhaseRule:
    """How a phase's limit follows from what was seen of it."""

    default_s: float
    """Until enough was seen."""
    floor_s: float
    """Never less."""
    factor: float = 5.0
    """Times the median."""
    spread_factor: float = 3.0
    """Times the second longest stay that is remembered: one freak does not stretch the limit."""


def default_rules() -> dict[Phase, PhaseRule]:
    """Rules for each phase. A save may be twenty times the last one when the storage is busy."""
    return {
        Phase.INIT: PhaseRule(default_s=900.0, floor_s=300.0),
        Phase.LOAD: PhaseRule(default_s=1800.0, floor_s=300.0),
        Phase.COMPILE: PhaseRule(default_s=1800.0, floor_s=600.0),
        Phase.STEP: PhaseRule(default_s=300.0, floor_s=10.0, spread_factor=1.5),
        Phase.CHECKPOINT: PhaseRule(default_s=1800.0, floor_s=600.0),
        Phase.EVALUATE: PhaseRule(default_s=1800.0, floor_s=300.0),
        Phase.END: PhaseRule(default_s=900.0, floor_s=300.0),
    }


FIRST_STEP_RULE = PhaseRule(default_s=1800.0, floor_s=300.0)


@dataclass
class _Seen:
    """What the sums of one process were when it was looked at last."""

    identity: Identity
    sums: tuple[PhaseSums, ...] = (PhaseSums(),) * len(Phase)
    has_first_step: bool = False
    box: BoxReading | None = None
    """What was read: the same again has nothing to teach."""


@dataclass
class PhaseTimes:
    """What the run has needed for each phase, kept over its attempts. Mutable: `observe` teaches it."""

    rules: Mapping[Phase, PhaseRule] = field(default_factory=default_rules)
    first_step_rule: PhaseRule = FIRST_STEP_RULE
    reserve_s: float = 1.0
    """Taken off a step's limit: what passes between two looks, so that the verdict is inside the limit."""
    n_steps_needed: int = 3
    """Finished steps, after the first one, before a step's limit is learned."""
    _stays: dict[Phase, deque[float]] = field(init=False, repr=False)
    _first_steps: deque[float] = field(init=False, repr=False)
    _seen: dict[int, _Seen] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._stays = {phase: deque(maxlen=N_KEPT) for phase in Phase}
        self._first_steps = deque(maxlen=N_KEPT)

    def observe(self, beats: Sequence[Beat]) -> None:
        """Learn from the boxes of all ranks, read at about the same time.

        Ranks go in step with one another, so all of them together give one duration a phase and look: the
        median for a step, the longest for all else.
        """
        new: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        n_new_steps = 0
        first_steps: list[float] = []
        for beat in of_current_run(beats):
            box = beat.box
            identity = box.identity
            seen = self._seen.get(identity.rank)
            if seen is not None and seen.box is box:
                continue
            if seen is None or seen.identity != identity:
                seen = self._seen[identity.rank] = _Seen(identity)
            for phase, before, after in zip(PHASES, seen.sums, box.sums, strict=True):
                n_new = after.count - before.count
                if n_new > 0:
                    new[phase].append((after.total_s - before.total_s) / n_new)
                    if phase is Phase.STEP:
                        n_new_steps = max(n_new_steps, n_new)
            if not seen.has_first_step and not math.isnan(box.first_step_s):
                first_steps.append(box.first_step_s)
                seen.has_first_step = True
            seen.sums, seen.box = box.sums, box
        for phase, durations_s in new.items():
            if durations_s and phase is not Phase.STEP:
                self._stays[phase].append(max(durations_s))
        if new[Phase.STEP]:
            # Steps shorter than the time between two looks count as many as they were, up to a bound.
            step_s = statistics.median(new[Phase.STEP])
            self._stays[Phase.STEP].extend([step_s] * min(n_new_steps, self.n_steps_needed))
        if first_steps:
            self._first_steps.append(max(first_steps))

    def limit_s(self, box: BoxReading) -> float:
        """How long the rank may stay in the phase that it is in."""
        if box.is_first_step:
            return _limit_s(self.first_step_rule, self._first_steps)
        stays = self._stays[box.phase]
        rule = self.rules[box.phase]
        if box.phase is not Phase.STEP:
            return _limit_s(rule, stays)
        if len(stays) < self.n_steps_needed:
            return rule.default_s
        return max(1.0, _limit_s(rule, stays) - self.reserve_s)

    def median_s(self, phase: Phase) -> float | None:
        """Typical stay in a phase; None where none has ended yet."""
        return statistics.median(self._stays[phase]) if self._stays[phase] else None


def of_current_run(beats: Sequence[Beat]) -> list[Beat]:
    """Without what earlier attempts and generations left behind; in rank order, one a rank."""
    attempt = generation = 0
    newest: dict[int, Beat] = {}
    for beat in beats:  # tens of thousands, every second: one pass, and no value made on the way
        identity = beat.box.identity
        if identity.attempt != attempt or identity.generation != generation:
            if (identity.attempt, identity.generation) < (attempt, generation):
                continue
            attempt, generation = identity.attempt, identity.generation
            newest.clear()
        known = newest.get(identity.rank)
        if known is None or beat.read_at >= known.read_at:
            newest[identity.rank] = beat
    return [newest[rank] for rank in sorted(newest)]


def _limit_s(rule: PhaseRule, stays: Sequence[float]) -> float:
    if not stays:
        return rule.default_s
    second_longest_s = sorted(stays)[-2] if len(stays) > 1 else stays[0]
    spread_s = rule.spread_factor * second_longest_s
    return max(rule.floor_s, rule.factor * statistics.median(stays), spread_s)
