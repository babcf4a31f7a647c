"""Where the time of a run went: every microsecond between its creation and its end is in exactly one phase.

Pure: events and metric lines in, segments and sums out; `now` is an argument. Does not read files (ledger.py)
or judge steps and bill incidents (losses.py), looks at no sliding hour (ettr.py), and words nothing for the
user (report.py).

How the clock is cut:

    run_created                      scheduling   until ranks_started
    ranks_started                    init, with the last load_s before `restored` as load
    restored                         step         up to each step record, lost_work where the step was lost
                                     evaluation   the eval_time_s that end at an evaluation
                                     save_stall   the blocked_s that end at a checkpoint_blocked
    incident.failed_at               detection    until detected_at
    incident.detected_at             restart      until the next ranks_started or attempt_started
    training_ended                   finish       until attempt_ended
    attempt_ended                    idle         until the next attempt
    nodes_awaited                    idle         until the next attempt: too few nodes are alive
    run_ended, or the driver died    stopped      until the next attempt (a resume)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ops.ledger import Event, number
from ops.losses import StepLine, does_restart, failed_and_detected, judge_steps, who


class Phase(StrEnum):
    """What a moment of a run was spent on."""

    SCHEDULING = "scheduling"
    INIT = "init"
    LOAD = "load"
    STEP = "step"
    LOST_WORK = "lost_work"
    SAVE_STALL = "save_stall"
    EVALUATION = "evaluation"
    DETECTION = "detection"
    RESTART = "restart"
    FINISH = "finish"
    IDLE = "idle"
    STOPPED = "stopped"


_PAUSABLE = frozenset({Phase.STEP, Phase.LOST_WORK, Phase.FINISH})
"""Phases that an evaluation or a save stall is cut out of."""
_UNATTENDED = frozenset({Phase.IDLE, Phase.STOPPED, Phase.SCHEDULING, Phase.DETECTION, Phase.RESTART})
"""Phases that a new attempt may follow while the driver lives; after any other the driver must have died."""
_LATEST_S = 1e11
"""Instants and lengths beyond plus and minus this (3,000 years) are a damaged line's: they are cut to it."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a run in one phase. Unix microseconds, whole numbers: sums are exact."""

    start_us: int
    end_us: int
    phase: Phase
    attempt: int
    generation: int


@dataclass(frozen=True)
class Goodput:
    """The time of a run, whole."""

    segments: tuple[Segment, ...]
    """In order, without gaps or overlaps, from the first to the last moment."""
    start_us: int
    end_us: int

    @property
    def phases_us(self) -> dict[Phase, int]:
        """Microseconds of each phase, all phases present; their sum is wall_us exactly."""
        sums = dict.fromkeys(Phase, 0)
        for segment in self.segments:
            sums[segment.phase] += segment.end_us - segment.start_us
        return sums

    @property
    def wall_us(self) -> int:
        """Microseconds from the first to the last moment."""
        return self.end_us - self.start_us

    @property
    def goodput_frac(self) -> float:
        """Share of the wall time spent on steps that counted; 0 for an empty run."""
        return self.phases_us[Phase.STEP] / self.wall_us if self.wall_us else 0.0

    @property
    def ettr_frac(self) -> float | None:
        """Effective training time ratio: the share of steps that counted in the time that the run was driven.

        Time in which nobody drove the run (stopped, until a resume) is no fault of the cluster and is left
        out; waiting for nodes counts. None where the run was never driven.
        """
        phases = self.phases_us
        driven_us = self.wall_us - phases[Phase.STOPPED]
        return phases[Phase.STEP] / driven_us if driven_us else None

    def between(self, start_us: int, end_us: int) -> "Goodput":
        """The part of the run that lies between two moments (Unix microseconds); empty where none does."""
        start, end = max(start_us, self.start_us), min(end_us, self.end_us)
        if end <= start:
            return Goodput((), start, start)
        cut = [
            replace(one, start_us=max(one.start_us, start), end_us=min(one.end_us, end))
            for one in self.segments
            if one.start_us < end and one.end_us > start
        ]
        return Goodput(tuple(cut), start, end)


def account(
    events: Sequence[Event],
    metrics: Iterable[Mapping[str, Any]],
    now: float | None,
    steps: Sequence[StepLine] | None = None,
) -> Goodput:
    """Put every moment of a run into one phase.

    Args:
        events: the ledger, in any order.
        metrics: lines of metrics.jsonl, in any order.
        now: Unix seconds, where the run has not ended and its driver lives; None when the driver is dead,
            which ends the run at the last thing that was written.
        steps: what judge_steps made of the same events and metrics, where the caller has it.
    """
    events = sorted(events, key=lambda event: event.at)
    lines = list(metrics)
    if steps is None:
        steps = judge_steps(events, lines)
    pauses = _pauses(events, lines)
    start_us, end_us = _bounds(events, [step.at for step in steps] + [end / 1e6 for _, end, _ in pauses], now)
    walk = _Walk(start_us)
    others = [mark for mark in _marks(events, pauses) if start_us <= mark[0] <= end_us]
    stepped = ((_us(step.at), 1, step) for step in steps)
    inside = sorted((mark for mark in stepped if start_us <= mark[0] <= end_us), key=lambda mark: mark[0])
    for at_us, _, mark in sorted([*_thinned(inside, [other[0] for other in others]), *others], key=_order):
        walk.pass_mark(at_us, mark)
    walk.spend(end_us, walk.phase)
    segments = _merge(_cut_out(walk.segments, _disjoint(pauses)))
    return Goodput(tuple(segments), start_us, end_us)


def _us(seconds: float) -> int:
    return round(max(-_LATEST_S, min(seconds, _LATEST_S)) * 1e6)


def _bounds(events: Sequence[Event], others: Sequence[float], now: float | None) -> tuple[int, int]:
    """First and last moment (Unix microseconds)."""
    stamps = [event.at for event in events] + list(others)
    if not stamps:
        return (0, 0)
    created = [event.at for event in events if event.kind == "run_created"]
    start = created[0] if created else min(stamps)
    ended = [event.at for event in events if event.kind == "run_ended"]
    started = [event.at for event in events if event.kind == "attempt_started"]
    if ended and (not started or ended[-1] >= started[-1]):
        end = ended[-1]
    else:
        end = max(stamps) if now is None else now
    return _us(start), max(_us(start), _us(end))


@dataclass(frozen=True)
class _Failed:
    """The moment something broke."""

    event: Event


@dataclass(frozen=True)
class _Detected:
    """The moment it was noticed."""

    event: Event


_Mark = Event | StepLine | _Failed | _Detected | None


_Timed = tuple[int, int, _Mark]
"""Unix microseconds, place among the marks of one instant, mark."""


def _order(timed: _Timed) -> tuple[int, int]:
    return timed[:2]


def _marks(events: Sequence[Event], pauses: Sequence[tuple[int, int, Phase]]) -> list[_Timed]:
    """Everything but steps that has an instant, in order; None marks only show that the run was alive."""
    marks: list[_Timed] = [(end, 1, None) for _, end, _ in pauses]
    for event in events:
        if event.kind != "incident":
            marks.append((_us(event.at), 2, event))
        elif does_restart(event):
            failed, detected = failed_and_detected(event)
            marks += [(_us(failed), 3, _Failed(event)), (_us(detected), 4, _Detected(event))]
    return sorted(marks, key=_order)


def _thinned(steps: Sequence[tuple[int, int, StepLine]], others_us: Sequence[int]) -> list[_Timed]:
    """The steps without those between two of the same ranks and verdict that no other mark parts from them.

    They change nothing: the time up to the next step goes where theirs went. A long run has few others.

    Args:
        steps: timed, in order of time.
        others_us: instants of all other marks, in order. One of a step's own instant comes after it.
    """
    kept: list[_Timed] = []
    index, n_others = 0, len(others_us)
    goes_on = False  # the step before is of the same kind, and nothing lies between
    for place, timed in enumerate(steps):
        at_us, _, step = timed
        while index < n_others and others_us[index] < at_us:
            index += 1
        joins = False
        if place + 1 < len(steps):
            next_us, _, after = steps[place + 1]
            is_parted = index < n_others and others_us[index] < next_us
            same = after.generation == step.generation and after.attempt == step.attempt
            joins = same and not is_parted and after.is_kept == step.is_kept
        if not (goes_on and joins):
            kept.append(timed)
        goes_on = joins
    return kept


class _Walk:
    """Walks along the marks and spends the time between them on phases."""

    def __init__(self, start_us: int) -> None:
        self.segments: list[Segment] = []
        self.phase = Phase.SCHEDULING
        """What the time from `spent_us` on is, unless a later mark knows better."""
        self._spent_us = start_us
        self._seen_us = start_us
        self._who = (0, 0)

    def spend(self, until_us: int, phase: Phase) -> None:
        """Spend the time up to `until_us` on a phase; nothing where it is spent already."""
        if until_us > self._spent_us:
            self.segments.append(Segment(self._spent_us, until_us, phase, *self._who))
            self._spent_us = until_us

    def pass_mark(self, at_us: int, mark: _Mark) -> None:
        """Take one mark into account; marks come in order of time."""
        match mark:
            case StepLine():
                self._step(at_us, mark)
            case Event():
                self._event(at_us, mark)
            case _Failed(event=event) if who(event, self._who) >= self._who:
                if self.phase not in (Phase.DETECTION, Phase.RESTART):
                    self._leave(at_us)
                    self.phase = Phase.DETECTION
            case _Detected(event=event) if who(event, self._who) >= self._who:
                self._leave(at_us)
                self.phase = Phase.FINISH if event.text("action").upper() == "STOP" else Phase.RESTART
        self._seen_us = at_us

    def _leave(self, at_us: int) -> None:
        """Spend what is open: a step that was under way when the ranks went is lost."""
        self.spend(at_us, Phase.LOST_WORK if self.phase is Phase.STEP else self.phase)

    def _step(self, at_us: int, step: StepLine) -> None:
        if self.phase is Phase.INIT:  # its `restored` was not written
            self.spend(at_us - _us(step.step_time_s), Phase.INIT)
            self.phase = Phase.STEP
        if self.phase is Phase.STEP:
            self.spend(at_us, Phase.STEP if step.is_kept else Phase.LOST_WORK)

    def _event(self, at_us: int, event: Event) -> None:
        match event.kind:
            case "attempt_started":
                if self.phase not in _UNATTENDED:  # nobody ended the last attempt: the driver died
                    self._leave(self._seen_us)
                    self.phase = Phase.STOPPED
                self._leave(at_us)
                self.phase = Phase.SCHEDULING
                self._who = (event.integer("attempt"), 0)
            case "nodes_awaited" if self.phase in _UNATTENDED:
                self._leave(at_us)
                self.phase = Phase.IDLE
            case "ranks_started":
                self._leave(at_us)
                self.phase = Phase.INIT
                self._who = (event.integer("attempt"), event.integer("generation"))
            case "restored" if self.phase is Phase.INIT:
                self.spend(at_us - _us(max(0.0, event.seconds("load_s"))), Phase.INIT)
                self.spend(at_us, Phase.LOAD)
                self.phase = Phase.STEP
            case "training_ended":
                in_order = self.phase is Phase.STEP and event.text("outcome") != "failed"
                self.spend(at_us, Phase.FINISH) if in_order else self._leave(at_us)
                self.phase = Phase.FINISH
            case "attempt_ended" if self.phase not in (Phase.DETECTION, Phase.RESTART):
                self._leave(at_us)
                self.phase = Phase.IDLE
            case "run_ended":
                self._leave(at_us)
                self.phase = Phase.STOPPED


def _pauses(events: Sequence[Event], lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Phase]]:
    """Evaluations and save stalls as (start, end, phase) in microseconds."""
    found = [
        (event.at, event.seconds("blocked_s"), Phase.SAVE_STALL)
        for event in events
        if event.kind == "checkpoint_blocked"
    ]
    for line in lines:
        if line.get("kind") != "eval":
            continue
        at, length = number(line.get("at")), number(line.get("eval_time_s"))
        if at is not None and length is not None:
            found.append((at, length, Phase.EVALUATION))
    return [(_us(at - max(0.0, length)), _us(at), phase) for at, length, phase in found]


def _disjoint(pauses: Iterable[tuple[int, int, Phase]]) -> list[tuple[int, int, Phase]]:
    """The pauses in order, each beginning where the one before has ended at the earliest."""
    kept: list[tuple[int, int, Phase]] = []
    for start, end, phase in sorted(pauses):
        start = max(start, kept[-1][1]) if kept else start
        if start < end:
            kept.append((start, end, phase))
    return kept


def _cut_out(segments: Iterable[Segment], pauses: Sequence[tuple[int, int, Phase]]) -> list[Segment]:
    """The segments with the (disjoint, ordered) pauses cut out of the training ones."""
    cut: list[Segment] = []
    first = 0
    for whole in segments:
        while first < len(pauses) and pauses[first][1] <= whole.start_us:
            first += 1
        at, index = whole.start_us, first
        while whole.phase in _PAUSABLE and index < len(pauses) and pauses[index][0] < whole.end_us:
            start, end, phase = pauses[index]
            start, end = max(start, at), min(end, whole.end_us)
            cut.append(Segment(at, start, whole.phase, whole.attempt, whole.generation))
            cut.append(Segment(start, end, phase, whole.attempt, whole.generation))
            at, index = end, index + 1
        cut.append(Segment(at, whole.end_us, whole.phase, whole.attempt, whole.generation))
    return [segment for segment in cut if segment.end_us > segment.start_us]


def _merge(segments: Iterable[Segment]) -> list[Segment]:
    """Neighbours of one phase, attempt and generation as one."""
    merged: list[Segment] = []
    for one in segments:
        last = merged[-1] if merged else None
        if last and (last.phase, last.attempt, last.generation) == (one.phase, one.attempt, one.generation):
            merged[-1] = Segment(last.start_us, one.end_us, one.phase, one.attempt, one.generation)
        else:
            merged.append(one)
    return merged
