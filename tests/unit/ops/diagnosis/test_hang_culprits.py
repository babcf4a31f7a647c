"""Who is blamed for a hang, by boxes, process states and flight recorders together."""

from dataclasses import replace

from ops.black_box import Phase
from ops.diagnosis.flight_recorder import ranks_entity
from ops.diagnosis.hang_culprits import hang_incident
from ops.diagnosis.verdict import Role, Verdict
from ops.incident import FailureClass
from ops.monitors.collective_hang import Hang
from ops.signal import Entity, EntityKind

HANG = Hang(
    at=110.0,
    since=100.0,
    phase=Phase.STEP,
    step=7,
    age_s=10.0,
    limit_s=9.0,
    culprits=(),
    nodes=(),
    reason="after step 7 no rank has left step",
    confidence=0.3,
)
NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
STACKS = {rank: f"stacks of {rank}" for rank in NODES}
BEHIND = Verdict(
    FailureClass.HANG,
    Role.ROOT,
    ranks_entity([2]),
    "RESTART_RANKS",
    0.9,
    "ranks [2] hold up the others",
    "hang",
    pattern="flight_recorder_sequence",
)


def test_one_rank_by_the_boxes_is_blamed_with_its_stacks() -> None:
    incident = hang_incident(replace(HANG, culprits=(1,), nodes=("a",)), [], BEHIND, STACKS, NODES)
    assert incident.failure_class is FailureClass.HANG
    assert incident.culprit == "rank 1 (node a)"
    assert incident.entity == Entity(EntityKind.RANK, "1", "a")
    assert (incident.failed_at, incident.detected_at, incident.step) == (100.0, 110.0, 7)
    assert (incident.symptom, incident.detector) == ("hang in step", "collective_hang")
    assert "stacks of 1" in incident.evidence
    assert "stacks of 2" not in incident.evidence


def test_a_stopped_process_goes_before_everything() -> None:
    incident = hang_incident(replace(HANG, culprits=(1,), nodes=("a",)), [3], BEHIND, STACKS, NODES)
    assert incident.culprit == "rank 3 (node b)"
    assert "state T" in incident.evidence


def test_the_flight_recorders_decide_where_the_boxes_cannot() -> None:
    assert hang_incident(HANG, [], BEHIND, STACKS, NODES).culprit == "rank 2 (node b)"
    several = replace(HANG, culprits=(1, 2), nodes=("a", "b"))
    assert hang_incident(several, [], BEHIND, STACKS, NODES).culprit == "rank 2 (node b)"
    assert hang_incident(several, [], None, STACKS, NODES).culprit == "ranks 1, 2 (node a, b)"


def test_recorders_that_are_not_sure_or_blame_somebody_else_change_nothing() -> None:
    several = replace(HANG, culprits=(0, 1), nodes=("a", "a"))
    for verdict in (BEHIND, replace(BEHIND, role=Role.AMBIGUOUS), replace(BEHIND, confidence=0.4)):
        incident = hang_incident(several, [], verdict, STACKS, NODES)
        assert incident.culprit == "ranks 0, 1 (node a)"
        assert incident.entity == Entity(EntityKind.NODE, "a")


def test_nobody_is_blamed_where_nothing_tells_them_apart() -> None:
    even = replace(BEHIND, role=Role.AMBIGUOUS, culprit=Entity(EntityKind.UNKNOWN, ""), confidence=0.4)
    incident = hang_incident(HANG, [], even, STACKS, NODES)
    assert (incident.culprit, incident.entity) == ("unknown", None)


def test_collectives_that_do_not_match_are_an_error_of_the_program() -> None:
    mismatch = replace(BEHIND, pattern="flight_recorder_mismatch", failure_class=FailureClass.USER_CODE)
    incident = hang_incident(HANG, [], mismatch, STACKS, NODES)
    assert incident.failure_class is FailureClass.USER_CODE
    assert hang_incident(HANG, [0], mismatch, STACKS, NODES).failure_class is FailureClass.HANG
