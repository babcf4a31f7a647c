"""What the coordinator knows of the attempt that runs, and of the ranks in it."""

from dataclasses import dataclass, field
from typing import Any

from ops.decision import Decision
from ops.diagnosis.rank_exits import RankExit
from service.orders import AttemptOutcome, Order, ShellInfo
from service.witness import Testimony


@dataclass
class Generation:
    """One set of rank processes."""

    number: int
    rank_pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    reaped: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)
    testimonies: dict[int, Testimony] = field(default_factory=dict)
    is_closed: bool = False
    """Its verdict is being found or has been given: later exits are those that we caused."""
    is_examined: bool = False
    """Evidence is being gathered: nothing is started or ended yet."""
    is_killed: bool = False
    """The order is out."""
    is_hang_told: bool = False
    """Where hangs are only observed."""


@dataclass
class Attempt:
    """One set of shells, and the ranks that they have now."""

    number: int
    world_size: int
    generation: Generation = field(default_factory=lambda: Generation(0))
    shells: dict[int, ShellInfo] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    outcome: AttemptOutcome = field(default_factory=lambda: AttemptOutcome("running"))
    renewal: Decision | None = None
    """The ranks were told to save and leave; this begins the next attempt."""
    stages: dict[int, int] = field(default_factory=dict)
    agents: dict[str, Any] = field(default_factory=dict)
    """Handles by Ray's id of the node."""
    n_recorded_signals: int = 0
