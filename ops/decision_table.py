"""The decision table as data: for each failure class, what is tried in which order, and what it counts for.

Rows only; policy.py reads them. How often a step of a ladder may be taken, and what stands in for an action
that cannot be carried out, is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ops.decision import Action
from ops.incident import FailureClass, Incident, Nature


@dataclass(frozen=True)
class Row:
    """What is done about one class of failure."""

    ladder: tuple[Action, ...]
    """The first time, the second time without progress in between, ...; after the last comes STOP."""
    running: tuple[Action, Action] | None = None
    """While the ranks go on training: the first time, and again after progress. None: as by the ladder."""
    again_within_s: float | None = None
    """Instead of after progress: again within so long after the last."""
    strike: float = 0.0
    """Weight against each node blamed, each time."""
    strike_on_leaving: float = 0.0
    """Weight against a node only when it is left."""
    budget: int | None = None
    """Restarts for this class without progress in between, whatever the budgets of the spec leave."""
    by_class: bool = False
    """All failures of the class count as one that comes again, whoever is blamed at whichever step."""
    is_retryable: bool = True
    """A plain restart may help: it stands in for actions that cannot be carried out."""
    may_be_code: bool = False
    """Where it comes again at the same step on other nodes, it is the code or the data."""
    passes_breaker: bool = False
    """Leaving the node rests on our word: the breaker has to allow it."""
    confirm_after_steps: int | None = None
    """After so many good steps one restart may show whether it was chance."""
    advice: str = ""
    """What to change, said when the run stops for this."""


_IN_PLACE, _AWAY = Action.RESTART_RANKS, Action.RESTART_WITHOUT_NODE
_TELL = (Action.PAGE, Action.PAGE)
_NOTE = (Action.OBSERVE, Action.OBSERVE)
_HOPELESS = Row((Action.STOP,), running=_TELL, is_retryable=False)

IMMEDIATE_STRIKE = 2.5
"""Puts a node out by itself under the default rules of quarantine.py."""

TABLE: Mapping[FailureClass, Row] = {
    FailureClass.USER_CODE: Row((Action.STOP,), is_retryable=False, confirm_after_steps=20, budget=1),
    FailureClass.CONFIGURATION: _HOPELESS,
    FailureClass.ENVIRONMENT: _HOPELESS,
    FailureClass.GPU_OUT_OF_MEMORY: Row(
        (_IN_PLACE,),
        budget=1,
        by_class=True,
        advice="the layout needs more device memory than there is: micro_batch_size, recompute or sharding",
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Row(
        (_IN_PLACE,),
        running=_TELL,
        budget=1,
        by_class=True,
        advice="give the job more host memory or shared memory, or fewer data workers a rank",
    ),
    FailureClass.GPU_HARDWARE: Row((_AWAY,), strike=IMMEDIATE_STRIKE, passes_breaker=True),
    FailureClass.NODE_LOST: Row((_AWAY,), strike=1.0),
    FailureClass.NETWORK: Row(
        (_IN_PLACE, _AWAY),
        running=(Action.OBSERVE, _AWAY),
        again_within_s=300.0,
        strike_on_leaving=1.0,
        passes_breaker=True,
    ),
    FailureClass.HANG: Row((_IN_PLACE, _AWAY), strike=1.0, may_be_code=True, passes_breaker=True),
    FailureClass.STRAGGLER: Row(
        (_AWAY,), running=(Action.PAGE, _AWAY), strike_on_leaving=1.0, passes_breaker=True
    ),
    FailureClass.STORAGE: Row((_IN_PLACE, _AWAY), running=_TELL, passes_breaker=True),
    FailureClass.CORRUPT_CHECKPOINT: Row((Action.ROLLBACK, Action.ROLLBACK), running=_TELL, by_class=True),
    FailureClass.NUMERICS: Row(
        (Action.ROLLBACK, Action.ROLLBACK),
        by_class=True,
        is_retryable=False,
        advice="no older checkpoint and no other data cured it: look at the loss before it, lr and data",
    ),
    FailureClass.PREEMPTION: Row((_AWAY,), running=(_AWAY, _AWAY)),
    FailureClass.TRACKING: Row((_IN_PLACE,), running=_TELL),
    FailureClass.WORKER_KILLED: Row(
        (_IN_PLACE, _AWAY), strike_on_leaving=1.0, may_be_code=True, passes_breaker=True
    ),
    FailureClass.BENIGN: Row((_IN_PLACE,), running=_NOTE),
    FailureClass.UNKNOWN: Row(
        (_IN_PLACE, _AWAY), running=_TELL, budget=3, may_be_code=True, passes_breaker=True
    ),
}

AMBIGUOUS = Row((_IN_PLACE, _AWAY), running=_NOTE, strike=0.5, may_be_code=True, passes_breaker=True)
"""A fault that a bad chip and bad code both print."""
CONTAINED = Row((_IN_PLACE, _AWAY), running=_NOTE, strike=1.0, passes_breaker=True)
"""A fault that the hardware dealt with: the third within days puts the node out."""


def row_of(incident: Incident) -> Row:
    """The row that an incident falls under."""
    match incident.nature:
        case Nature.AMBIGUOUS:
            return AMBIGUOUS
        case Nature.CONTAINED:
            return CONTAINED
    return TABLE[incident.failure_class]
