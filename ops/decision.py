"""What is to be done about an incident. Pure values; executes nothing."""

from dataclasses import dataclass
from enum import StrEnum

DO_NOT_REQUEUE = 93
"""Exit code of a run that a scheduler must not start again: it would fail the same way."""


class Action(StrEnum):
    """What an actuator can be told to do, from the mildest to the end."""

    OBSERVE = "OBSERVE"
    """Nothing beyond the record: the ranks go on, or what has to be done is under way."""
    PAGE = "PAGE"
    """Tell people; the ranks go on."""
    RESTART_RANKS = "RESTART_RANKS"
    """Fork the ranks anew in their shells: same attempt, next generation."""
    RESTART = "RESTART"
    """A new attempt: one more Ray Train fit(), on whatever nodes are alive and not excluded."""
    RESTART_WITHOUT_NODE = "RESTART_WITHOUT_NODE"
    """A new attempt that keeps off the nodes blamed."""
    SHRINK = "SHRINK"
    """A new attempt with a smaller layout and the same global batch: too few nodes are left for the whole."""
    ROLLBACK = "ROLLBACK"
    """Restart from a checkpoint older than the newest."""
    STOP = "STOP"
    """End the run as FAILED."""


TODAYS_ACTIONS = frozenset({Action.RESTART_RANKS, Action.RESTART, Action.STOP})
"""What a caller can carry out that says nothing else."""
NEW_ATTEMPTS = frozenset({Action.RESTART, Action.RESTART_WITHOUT_NODE, Action.SHRINK})
RESTARTS = NEW_ATTEMPTS | {Action.RESTART_RANKS, Action.ROLLBACK}
"""Actions that take the ranks down and start them again."""


@dataclass(frozen=True)
class Decision:
    """An action, the sentence that says why, and what the actuator needs to carry it out."""

    action: Action
    reason: str
    wanted: Action | None = None
    """What was called for, where something else had to stand in or the detector only observes."""
    in_place: bool = False
    """The living shells carry it out; else it takes a new attempt."""
    exclude: tuple[str, ...] = ()
    """Addresses of nodes that a new attempt keeps off."""
    strikes: tuple[tuple[str, float], ...] = ()
    """(node address, weight): to be written to the book of nodes."""
    checkpoints_back: int = 0
    """ROLLBACK: so many committed checkpoints before the newest."""
    skips_data: bool = False
    """ROLLBACK: the data of the steps from there to the failure is not trained on again."""
    at_checkpoint: bool = False
    """Not now: once the next checkpoint is committed."""
    n_ranks: int = 0
    """SHRINK: ranks that the nodes left can hold; the layout has as many or fewer."""
    calls_people: bool = False
    """Somebody has to look, whatever is done meanwhile."""
    exit_code: int | None = None
    """STOP: exit code of the run."""
