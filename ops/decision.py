"""What is to be done about an incident. Pure values; executes nothing."""

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What an actuator can be told to do, from the mildest to the end."""

    RESTART_RANKS = "RESTART_RANKS"
    """Fork the ranks anew in their shells: same attempt, next generation."""
    RESTART = "RESTART"
    """A new attempt: one more Ray Train fit(), on whatever nodes are alive."""
    STOP = "STOP"
    """End the run as FAILED."""


@dataclass(frozen=True)
class Decision:
    """An action and the sentence that says why."""

    action: Action
    reason: str
