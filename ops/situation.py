"""What the policy knows beside an incident and its history; and when a shrunk run grows back. Pure values.

Gathered by who calls policy.decide: from Ray's list of nodes, the book of nodes, the planner, the detectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ops.blame import Sighting
from ops.decision import Action, Decision
from ops.quarantine import Cluster, Fleet


@dataclass(frozen=True)
class Situation:
    """What else is known when a decision is due. Every default means that it is not known."""

    still_trains: bool = False
    """The ranks go on training: nothing has to be done at once. PAGE or OBSERVE must be available."""
    good_steps: int | None = None
    """Steps completed since these ranks began."""
    nodes: frozenset[str] = frozenset()
    """Addresses of the nodes that the attempt runs on."""
    n_ranks: int = 0
    """Ranks of the layout that the spec asks for."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Ranks that each live node can hold, by address; empty leaves the waiting for nodes to the caller."""
    can_shrink_to: int = 1
    """The fewest ranks that a legal layout has."""
    fleet: Fleet = field(default_factory=Fleet)
    """The book of nodes."""
    cluster: Cluster | None = None
    """For the breaker; needed where RESTART_WITHOUT_NODE is available."""
    sightings: tuple[Sighting, ...] = ()
    """Ambiguous faults of all runs within the last week."""
    run: str = ""
    """Run id, as in sightings."""
    is_clean_elsewhere: bool | None = None
    """The failed step was replayed on other nodes and came out clean: the chip did it, not the data."""
    observing: frozenset[str] = frozenset()
    """Detectors that only observe: what their word would lead to is told and not done."""


def decide_growth(n_ranks_now: int, situation: Situation) -> Decision | None:
    """Whether a shrunk run goes back to its full layout, at the next checkpoint; None where it stays.

    Args:
        n_ranks_now: ranks of the layout that it runs with.
        situation: slots, fleet and n_ranks are looked at.
    """
    out = situation.fleet.out_of_service
    room = sum(n for node, n in situation.slots.items() if node not in out)
    full = situation.n_ranks
    if n_ranks_now >= full or room < full:
        return None
    return Decision(
        Action.RESTART,
        f"nodes are back: {n_ranks_now} of {full} ranks run, and there is room for {room}",
        exclude=tuple(sorted(out)),
        at_checkpoint=True,
    )
