"""What the coordinator, the shells and the driver tell one another of an attempt. Pure values."""

from dataclasses import dataclass, field
from typing import Literal

from jobs.events import Ranges
from ops.decision import Decision


@dataclass(frozen=True)
class StartPoint:
    """What the next ranks must know beside the run's folder."""

    restore_before: int | None = None
    """Newest step whose checkpoint may be restored; 0 begins anew, None leaves it to what is there."""
    skip_samples: Ranges = ()
    """Sample ordinals that are passed over."""


@dataclass(frozen=True)
class Order:
    """What every shell of the attempt must do now."""

    kind: Literal["start", "store", "witness", "fault", "kill", "terminate", "end"]
    generation: int
    address: tuple[str, int] | None = None
    """With "store": host and port of the generation's TCPStore."""
    start: StartPoint = field(default_factory=StartPoint)
    """With "start": where the ranks begin."""
    rank: int = -1
    fault: str = ""
    """With "fault": which rank has it, and what (drill.py)."""
    is_followed: bool = False
    """With "end": another attempt begins."""


@dataclass(frozen=True)
class ShellInfo:
    """Where a shell runs."""

    rank: int
    node: str
    node_id: str
    shell_pid: int
    sees_storage: bool
    """The driver's token in the run folder could be read back on this node."""
    stage: int = 0
    """Pipeline stage of the rank."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended, as far as ranks and shells could tell."""

    kind: Literal["running", "finished", "stopped", "failed"]
    error: str = ""
    decision: Decision | None = None
    """What was decided, where an incident ended it ("failed"), or the ranks saved and left for a new attempt
    ("stopped")."""
