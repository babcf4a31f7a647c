"""States of nodes: who may change what, fading strikes, the breaker under random histories."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.label_utils import validate_label_selector

from ops.quarantine import (
    DEFAULT_RULES,
    ChangeKind,
    Cluster,
    Fleet,
    NodeChange,
    NodeState,
    Owner,
    QuarantineError,
    QuarantineRules,
    apply_change,
    breaker_refusal,
    change_from_json,
    fold,
    label_selector,
    selector_text,
    strike,
)

DAY_S = 86400.0
LARGE = Cluster(n_nodes=100)


def change(
    kind: ChangeKind, owner: Owner = Owner.POLICY, at: float = 0.0, node: str = "n1", weight: float = 1.0
) -> NodeChange:
    return NodeChange(at, node, kind, owner, reason="because", weight=weight, symptom="xid 79")


def state_after(*changes: NodeChange, now: float = 0.0) -> NodeState:
    return fold(changes).record("n1").state(now)


def test_the_way_of_a_node_through_repair() -> None:
    way = [
        (ChangeKind.STRIKE, NodeState.SUSPECT),
        (ChangeKind.CORDON, NodeState.QUARANTINED),
        (ChangeKind.REPAIR_BEGUN, NodeState.REPAIRING),
        (ChangeKind.REPAIR_FAILED, NodeState.QUARANTINED),
        (ChangeKind.REPAIR_BEGUN, NodeState.REPAIRING),
        (ChangeKind.REPAIR_DONE, NodeState.HEALTHY),
        (ChangeKind.RETIRED, NodeState.RETIRED),
        (ChangeKind.RETURNED, NodeState.HEALTHY),
    ]
    fleet = Fleet()
    for kind, state in way:
        fleet = apply_change(fleet, change(kind, Owner.HUMAN))
        assert fleet.record("n1").state(0.0) is state
        out = state in (NodeState.QUARANTINED, NodeState.REPAIRING, NodeState.RETIRED)
        assert fleet.out_of_service == (frozenset({"n1"}) if out else frozenset())


@pytest.mark.parametrize("owner", [Owner.POLICY, Owner.AGENT])
@pytest.mark.parametrize("holder", list(Owner))
def test_automation_lifts_only_what_it_set(owner: Owner, holder: Owner) -> None:
    fleet = fold([change(ChangeKind.CORDON, holder)])
    if holder is owner:
        assert apply_change(fleet, change(ChangeKind.UNCORDON, owner)).out_of_service == frozenset()
        return
    with pytest.raises(QuarantineError, match="only its own"):
        apply_change(fleet, change(ChangeKind.UNCORDON, owner))
    with pytest.raises(QuarantineError, match="repairs only"):
        apply_change(fleet, change(ChangeKind.REPAIR_BEGUN, owner))
    assert apply_change(fleet, change(ChangeKind.UNCORDON, Owner.HUMAN)).out_of_service == frozenset()


def test_a_node_goes_back_to_work_when_no_hold_is_left() -> None:
    both = [change(ChangeKind.CORDON), change(ChangeKind.CORDON, Owner.HUMAN)]
    assert state_after(*both, change(ChangeKind.UNCORDON)) is NodeState.QUARANTINED
    assert fold(both).record("n1").in_force == both[1]
    assert state_after(*both, change(ChangeKind.UNCORDON, Owner.HUMAN)) is NodeState.HEALTHY
    repaired = [change(ChangeKind.CORDON), change(ChangeKind.REPAIR_BEGUN), both[1]]
    assert state_after(*repaired, change(ChangeKind.REPAIR_DONE)) is NodeState.QUARANTINED


@pytest.mark.parametrize(
    ("before", "kind", "owner"),
    [
        ([], ChangeKind.UNCORDON, Owner.HUMAN),
        ([], ChangeKind.REPAIR_DONE, Owner.HUMAN),
        ([], ChangeKind.RETIRED, Owner.POLICY),
        ([(ChangeKind.RETIRED, Owner.HUMAN)], ChangeKind.CORDON, Owner.HUMAN),
        ([(ChangeKind.RETIRED, Owner.HUMAN)], ChangeKind.RETURNED, Owner.AGENT),
        (
            [(ChangeKind.CORDON, Owner.AGENT), (ChangeKind.REPAIR_BEGUN, Owner.AGENT)],
            ChangeKind.REPAIR_DONE,
            Owner.POLICY,
        ),
    ],
)
def test_changes_that_are_not_allowed_change_nothing(
    before: list[tuple[ChangeKind, Owner]], kind: ChangeKind, owner: Owner
) -> None:
    changes = [change(*one) for one in before]
    fleet = fold(changes)
    with pytest.raises(QuarantineError, match="n1"):
        apply_change(fleet, change(kind, owner))
    assert fold([*changes, change(kind, owner)]) == fleet


def test_strikes_fade_and_three_within_days_put_a_node_out() -> None:
    def states(every_s: float) -> list[NodeState]:
        fleet, seen = Fleet(), []
        for number in range(4):
            planned, refused = strike(fleet, change(ChangeKind.STRIKE, at=number * every_s), LARGE)
            assert refused is None
            for one in planned:
                fleet = apply_change(fleet, one)
            seen.append(fleet.record("n1").state(number * every_s))
        return seen

    suspect, out = NodeState.SUSPECT, NodeState.QUARANTINED
    assert states(60.0) == [suspect, suspect, out, out]
    assert states(30 * DAY_S) == [suspect] * 4
    assert state_after(change(ChangeKind.STRIKE), now=15 * DAY_S) is NodeState.HEALTHY


def test_one_strike_that_weighs_enough_puts_a_node_out_at_once() -> None:
    heavy = change(ChangeKind.STRIKE, weight=DEFAULT_RULES.quarantine_at)
    planned, refused = strike(Fleet(), heavy, LARGE)
    assert ([one.kind for one in planned], refused) == ([ChangeKind.STRIKE, ChangeKind.CORDON], None)
    assert fold(planned).out_of_service == {"n1"}
    again, _ = strike(fold(planned), heavy, LARGE)
    assert [one.kind for one in again] == [ChangeKind.STRIKE]


def test_the_breaker_counts_the_share_of_nodes_whoever_took_them_out() -> None:
    humans = fold(change(ChangeKind.CORDON, Owner.HUMAN, node=f"h{i}") for i in range(10))
    told = breaker_refusal(humans, ["n1"], LARGE, 0.0)
    assert told is not None
    assert "11 of 100 nodes" in told
    assert breaker_refusal(humans, ["h3"], LARGE, 0.0) is None
    planned, refused = strike(humans, change(ChangeKind.STRIKE, weight=9.0), LARGE)
    assert [one.kind for one in planned] == [ChangeKind.STRIKE]
    assert refused == told
    assert breaker_refusal(Fleet(), ["n1"], Cluster(4), 0.0) is None
    assert breaker_refusal(fold([change(ChangeKind.CORDON)]), ["n2"], Cluster(4), 0.0) is not None


def test_the_breaker_counts_a_rack_once_within_an_hour() -> None:
    racks = Cluster(1000, {f"n{i}": "rack A" for i in range(20)})
    fleet = fold(change(ChangeKind.CORDON, node=f"n{i}") for i in range(20))
    assert breaker_refusal(fleet, ["n30", "n31", "n32"], racks, 60.0) is None
    refused = breaker_refusal(fleet, ["n30", "n31", "n32", "n33"], racks, 60.0)
    assert refused is not None
    assert "5 nodes or racks" in refused
    assert breaker_refusal(fleet, ["n30", "n31", "n32", "n33"], racks, 3601.0) is None
    assert racks.domain_members("n3") == {f"n{i}" for i in range(20)}
    assert racks.domain_members("n30") == {"n30"}


owners = st.sampled_from(list(Owner))
nodes = st.sampled_from([f"n{i}" for i in range(30)])
steps = st.lists(
    st.tuples(st.sampled_from(list(ChangeKind)), owners, nodes, st.floats(0, 3), st.floats(0, 1200)),
    max_size=60,
)


@given(steps, st.integers(1, 30), st.integers(1, 5))
def test_automation_never_exceeds_the_breaker(
    history: list[tuple[ChangeKind, Owner, str, float, float]], n_nodes: int, per_hour: int
) -> None:
    rules = QuarantineRules(max_domains_per_hour=per_hour)
    fleet, written, now = Fleet(), [], 0.0
    for kind, owner, node, weight, pause_s in history:
        now += pause_s
        one = NodeChange(now, node, kind, owner, weight=weight)
        if kind is ChangeKind.STRIKE:
            planned, _ = strike(fleet, one, Cluster(n_nodes), rules)
        else:  # automation takes nodes out by strikes only
            planned = [one] if kind is not ChangeKind.CORDON or owner is Owner.HUMAN else []
        for new in planned:
            out_before = fleet.out_of_service
            try:
                fleet = apply_change(fleet, new)
            except QuarantineError:
                continue
            written.append(new)
            if new.kind is ChangeKind.CORDON and new.owner is not Owner.HUMAN and node not in out_before:
                retired = {n for n, record in fleet.records.items() if record.retired}
                assert len(fleet.out_of_service - retired) <= max(1, n_nodes // 10)
                recent = {c.node for c in fleet.cordons if c.at > now - 3600.0}
                assert len(recent) <= per_hour
    assert fold(written) == fleet
    lines = [one.to_json() for one in written]
    assert [change_from_json(line) for line in lines] == written


@given(steps)
def test_automation_never_ends_the_hold_of_a_human(
    history: list[tuple[ChangeKind, Owner, str, float, float]],
) -> None:
    held = change(ChangeKind.CORDON, Owner.HUMAN)
    changes = [
        NodeChange(0.0, "n1", kind, owner, weight=weight)
        for kind, owner, _, weight, _ in history
        if owner is not Owner.HUMAN
    ]
    assert fold([held, *changes]).out_of_service == {"n1"}


def test_lines_that_are_no_changes_are_passed_over() -> None:
    good = change(ChangeKind.STRIKE).to_json()
    assert change_from_json(good) == change(ChangeKind.STRIKE)
    for wrong in ({"kind": "melted"}, {"owner": "cat"}, {"node": ""}, {"at": None}, {"n_nodes": "x"}):
        assert change_from_json(good | wrong) is None


def test_ray_accepts_the_selector_of_what_is_out_of_service() -> None:
    ids = [f"{i:056x}" for i in (3, 1)]
    fleet = fold([replace(change(ChangeKind.CORDON), node="10.0.0.3")])
    addresses = {ids[0]: "10.0.0.3", ids[1]: "10.0.0.3", "f" * 56: "10.0.0.4"}
    selector = label_selector(fleet.out_of_service, addresses)
    assert selector == {"ray.io/node-id": f"!in({ids[1]},{ids[0]})"}
    assert validate_label_selector(selector) is None
    assert label_selector(fleet.out_of_service, {"f" * 56: "10.0.0.4"}) == {}
    assert selector_text(["b", "a", "b"]) == "!in(a,b)"
    assert selector_text([]) is None
