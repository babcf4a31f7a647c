"""Going back to an older checkpoint: which one, what is kept aside, which samples are passed over. Pure.

    ledger: ... incident ROLLBACK (decided) ... rolled_back (carried out) ...

What was decided and not carried out is still due, whoever drives the run by then; what was passed over once
is passed over for ever. Moves no folder (checkpoint/set_aside.py does) and decides nothing (policy.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jobs.events import Ranges
from ops.decision import RESTARTS, Action, Decision
from ops.incident import Incident
from ops.ledger import Event

ROLLED_BACK = "rolled_back"
"""Kind of the ledger's event."""


@dataclass(frozen=True)
class DueRollback:
    """A rollback that was decided and not carried out yet."""

    checkpoints_back: int
    skips_data: bool
    good_step: int | None
    """State after a later step is not to be trusted; None: nothing is known of that."""


@dataclass(frozen=True)
class RollbackPlan:
    """How a rollback is carried out."""

    restore_before: int
    """The newest checkpoint that may be restored; 0 begins anew."""
    set_aside: tuple[int, ...]
    """Steps of the checkpoints that are never restored again."""
    skipped: Ranges
    """Sample ordinals that are not trained on, those of earlier rollbacks left out."""


def due_rollback(incident: Incident, decision: Decision) -> DueRollback | None:
    """What a decision asks for; None where the newest checkpoint serves."""
    return _due(
        decision.action,
        decision.checkpoints_back,
        incident.good_step,
        skips_data=decision.skips_data,
    )


def still_due(events: Iterable[Event]) -> DueRollback | None:
    """What a ledger says was decided and not carried out; None for nothing."""
    due: DueRollback | None = None
    for event in events:
        if event.kind == ROLLED_BACK:
            due = due if event.text("error") else None
        elif event.kind == "incident":
            found = _due(
                event.text("action"),
                event.integer("checkpoints_back"),
                event.integer("good_step") if "good_step" in event.fields else None,
                skips_data=bool(event.fields.get("skips_data", False)),
            )
            due = found or due
    return due


def _due(
    action: str, checkpoints_back: int, good_step: int | None, *, skips_data: bool
) -> DueRollback | None:
    is_back = action == Action.ROLLBACK or (action in RESTARTS and good_step is not None)
    if not is_back:
        return None
    return DueRollback(checkpoints_back, skips_data, good_step)


def skipped_so_far(events: Iterable[Event]) -> Ranges:
    """All samples that rollbacks of this run passed over."""
    rows = [event.fields.get("skip_samples", []) for event in events if event.kind == ROLLED_BACK]
    return merged((int(first), int(stop)) for of_one in rows for first, stop in of_one)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same numbers in the fewest ranges, ascending; empty ones are left out."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(range_ for range_ in ranges if range_[0] < range_[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((first, stop))
    return tuple(found)


def plan_rollback(
    due: DueRollback,
    committed: Sequence[int],
    ordinal_at: Callable[[int], int | None],
    next_ordinal: int | None,
) -> RollbackPlan:
    """Where a run goes back to.

    Not further than to the oldest checkpoint that is left, whatever is known of it: only where there is none
    the run begins anew. Weeks are not given up without being asked.

    Args:
        due: what was decided.
        committed: steps of the committed checkpoints.
        ordinal_at: a checkpoint's step -> the sampler's state in it; None where it cannot be read.
        next_ordinal: the sampler's state after the last step that was taken, the bad one included; None where
            it is not known.
    """
    steps = sorted(committed)
    target = 0
    if steps:
        trusted = [step for step in steps if due.good_step is None or step <= due.good_step]
        target = min(max(trusted, default=steps[0]), steps[max(len(steps) - 1 - due.checkpoints_back, 0)])
    skipped: Ranges = ()
    if due.skips_data and next_ordinal is not None:
        first = ordinal_at(target) if target else 0
        skipped = merged([(first, next_ordinal)]) if first is not None else ()
    return RollbackPlan(target, tuple(step for step in steps if step > target), skipped)
