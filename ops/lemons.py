"""Lemons: nodes that fail again and again though each failure alone looks like chance. Pure.

The seven signals over four weeks are those of Meta's RSC (arXiv 2410.21680, lemon nodes); the limits at which
each counts fully are ours. A score ranks nodes for a human; nothing is taken out of service by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ops.incident import FailureClass
from ops.quarantine import ChangeKind, NodeChange, Owner

WINDOW_S = 28 * 86400.0


@dataclass(frozen=True)
class LemonSignals:
    """What was counted on one node within the window."""

    excluded_by_humans: float = 0
    """Cordons by a human."""
    xids: float = 0
    """Strikes for what the GPU's driver reported."""
    tickets: float = 0
    """Repairs begun."""
    out_count: float = 0
    """Times it was taken out of service by anybody."""
    multi_node_fails: float = 0
    """Runs on several nodes that it brought down by being lost."""
    single_node_fails: float = 0
    single_node_fail_frac: float = 0
    """Share of the single-node runs on it that it brought down; 0 where their number is not known."""


LIMITS = LemonSignals(
    excluded_by_humans=2,
    xids=3,
    tickets=2,
    out_count=3,
    multi_node_fails=3,
    single_node_fails=2,
    single_node_fail_frac=0.1,
)
"""Where each signal counts fully."""


def lemon_signals(
    changes: Sequence[NodeChange], now: float, n_single_node_runs: Mapping[str, int] | None = None
) -> dict[str, LemonSignals]:
    """The signals of each node that the book names.

    Args:
        changes: the book of nodes.
        now: wall clock, unix seconds; what is older than four weeks is left out.
        n_single_node_runs: single-node runs within the window by node, where somebody counts them.
    """
    recent: dict[str, list[NodeChange]] = {change.node: [] for change in changes}
    for change in changes:
        if now - WINDOW_S < change.at <= now:
            recent[change.node].append(change)
    n_runs = n_single_node_runs or {}
    return {node: _signals(found, n_runs.get(node, 0)) for node, found in recent.items()}


def lemon_score(signals: LemonSignals) -> float:
    """0 (nothing) to 7: the sum of the signals, each as a share of its limit and 1 at most."""
    limits = asdict(LIMITS)
    return float(sum(min(1.0, value / limits[name]) for name, value in asdict(signals).items()))


def _signals(changes: Sequence[NodeChange], n_single_node_runs: int) -> LemonSignals:
    cordons = [change for change in changes if change.kind is ChangeKind.CORDON]
    strikes = [change for change in changes if change.kind is ChangeKind.STRIKE]
    lost = [change for change in strikes if change.symptom == FailureClass.NODE_LOST]
    single = sum(change.n_nodes == 1 for change in lost)
    return LemonSignals(
        excluded_by_humans=sum(change.owner is Owner.HUMAN for change in cordons),
        xids=sum(change.symptom.lower().startswith(("xid", "sxid")) for change in strikes),
        tickets=sum(change.kind is ChangeKind.REPAIR_BEGUN for change in changes),
        out_count=len(cordons),
        multi_node_fails=sum(change.n_nodes > 1 for change in lost),
        single_node_fails=single,
        single_node_fail_frac=single / n_single_node_runs if n_single_node_runs else 0.0,
    )
