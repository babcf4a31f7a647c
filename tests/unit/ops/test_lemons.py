"""Which nodes look bad over four weeks, though no single failure says so."""

from ops.lemons import WINDOW_S, LemonSignals, lemon_score, lemon_signals
from ops.quarantine import ChangeKind, NodeChange, Owner

NOW = 2 * WINDOW_S


def seen(kind: ChangeKind, owner: Owner = Owner.POLICY, *, ago_s: float = 60.0, **more: object) -> NodeChange:
    return NodeChange(NOW - ago_s, "n1", kind, owner, **more)  # type: ignore[arg-type]


def test_each_signal_counts_its_own_kind_within_the_window() -> None:
    changes = [
        seen(ChangeKind.STRIKE, symptom="xid 79"),
        seen(ChangeKind.STRIKE, symptom="node_lost", n_nodes=64),
        seen(ChangeKind.STRIKE, symptom="node_lost", n_nodes=1),
        seen(ChangeKind.STRIKE, symptom="hang", n_nodes=64),
        seen(ChangeKind.CORDON),
        seen(ChangeKind.CORDON, Owner.HUMAN),
        seen(ChangeKind.REPAIR_BEGUN, Owner.HUMAN),
        seen(ChangeKind.STRIKE, symptom="xid 79", ago_s=WINDOW_S + 1),
    ]
    signals = lemon_signals(changes, NOW, {"n1": 10})["n1"]
    assert signals == LemonSignals(1, 1, 1, 2, 1, 1, 0.1)
    assert lemon_signals(changes, NOW)["n1"].single_node_fail_frac == 0.0


def test_the_score_ranks_a_lemon_above_a_node_with_one_bad_day() -> None:
    one_bad_day = [seen(ChangeKind.STRIKE, symptom="xid 31") for _ in range(20)]
    lemon = [
        change
        for _ in range(3)
        for change in (
            seen(ChangeKind.STRIKE, symptom="node_lost", n_nodes=8),
            seen(ChangeKind.CORDON),
            seen(ChangeKind.REPAIR_BEGUN, Owner.AGENT),
        )
    ]
    assert lemon_score(lemon_signals(one_bad_day, NOW)["n1"]) == 1.0
    assert lemon_score(lemon_signals(lemon, NOW)["n1"]) == 3.0
    assert lemon_score(LemonSignals()) == 0.0
