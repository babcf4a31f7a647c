"""Which nodes are blamed, from values and from texts; what ambiguous faults follow."""

import pytest

from ops.blame import SIGHTINGS_WINDOW_S, Follows, Sighting, blamed_nodes, follows, link_ends
from ops.incident import FailureClass, Incident, Nature
from ops.quarantine import Cluster
from ops.signal import Entity, EntityKind


def incident(culprit: str = "", entity: Entity | None = None, at: float = 0.0) -> Incident:
    return Incident(FailureClass.NETWORK, culprit, "link down", 10, at, at, entity)


def link(name: str, at: float = 0.0) -> Incident:
    return incident(entity=Entity(EntityKind.LINK, name), at=at)


@pytest.mark.parametrize(
    ("culprit", "nodes"),
    [
        ("rank 1 (node 10.0.0.3)", {"10.0.0.3"}),
        ("node 10.0.0.3, 10.0.0.4", {"10.0.0.3", "10.0.0.4"}),
        ("shell of rank 1 (node a), shell of rank 2 (node b)", {"a", "b"}),
        ("shell of rank 1 (node unknown)", set()),
        ("Ray Train controller", set()),
        ("spec", set()),
    ],
)
def test_nodes_named_in_todays_culprits(culprit: str, nodes: set[str]) -> None:
    assert blamed_nodes(incident(culprit)) == nodes


def test_nodes_of_entities() -> None:
    assert blamed_nodes(incident(entity=Entity(EntityKind.GPU, "GPU-1", "n1"))) == {"n1"}
    assert blamed_nodes(incident(entity=Entity(EntityKind.NODE, "n1"))) == {"n1"}
    assert blamed_nodes(incident("node n2", Entity(EntityKind.UNKNOWN, ""))) == frozenset()


def test_a_link_is_laid_to_the_end_that_failed_twice() -> None:
    assert blamed_nodes(link("n1-n2")) == frozenset()
    assert blamed_nodes(link("n2-n3", 10.0), [link("n1-n2")]) == {"n2"}
    assert blamed_nodes(link("n1-n2", 10.0), [link("n1-n2")]) == {"n1", "n2"}
    assert blamed_nodes(link("n2-n3", 4000.0), [link("n1-n2")]) == frozenset()


def test_names_of_link_ends_may_hold_dashes() -> None:
    assert link_ends(Entity(EntityKind.LINK, "ip-10-0-ip-10-1")) == {"ip-10-0", "ip-10-1"}
    assert link_ends(Entity(EntityKind.LINK, "n1")) == frozenset()
    assert link_ends(Entity(EntityKind.LINK, "a-b-c")) == frozenset()


def test_a_fault_of_the_fabric_takes_in_the_failure_domain() -> None:
    fault = Incident(
        FailureClass.GPU_HARDWARE,
        "",
        "SXid 12020",
        10,
        0.0,
        0.0,
        Entity(EntityKind.NODE, "n1"),
        Nature.FABRIC,
    )
    cluster = Cluster(4, {"n1": "rack", "n2": "rack", "n3": "other"})
    assert blamed_nodes(fault, cluster=cluster) == {"n1", "n2"}


def seen(gpu: str, step: int, run: str = "r", at: float = 0.0, symptom: str = "xid 31") -> Sighting:
    return Sighting(at, symptom, gpu, run, step)


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ([], Follows.UNDECIDED),
        ([seen("A", 10)], Follows.UNDECIDED),  # the same rank again: the same chip and the same code
        ([seen("A", 20)], Follows.GPU),
        ([seen("A", 10, run="other")], Follows.GPU),
        ([seen("B", 10)], Follows.CODE),
        ([seen("B", 10), seen("A", 20)], Follows.UNDECIDED),
        ([seen("B", 10), seen("A", 20), seen("A", 30)], Follows.GPU),
        ([seen("B", 20)], Follows.UNDECIDED),
        ([seen("A", 20, symptom="xid 13")], Follows.UNDECIDED),
        ([seen("A", 20, at=-SIGHTINGS_WINDOW_S - 1)], Follows.UNDECIDED),
    ],
)
def test_what_a_fault_follows(others: list[Sighting], verdict: Follows) -> None:
    assert follows(seen("A", 10), others)[0] is verdict
