"""Decisions made again from the lines of a ledger."""

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.job import ResilienceSection
from ops.blame import Sighting
from ops.decision import TODAYS_ACTIONS, Action
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import Event, LedgerWriter, read_ledger
from ops.policy import decide
from ops.quarantine import ChangeKind, Cluster, NodeChange, Owner, fold
from ops.replay import Remembered, incident_fields, incident_of, replay
from ops.signal import Entity, EntityKind
from ops.situation import Situation

NODES = ["n0", "n1", "n2"]
BUDGETS = ResilienceSection(max_rank_restarts=3, max_attempts=2, max_no_progress=2)

incidents = st.builds(
    Incident,
    st.sampled_from(list(FailureClass)),
    st.sampled_from(["rank 0 (node n0)", "node n1", "controller"]),
    st.just("evidence"),
    st.integers(0, 3),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    entity=st.none() | st.builds(Entity, st.just(EntityKind.GPU), st.just("GPU-1"), st.just("n1")),
    nature=st.sampled_from(list(Nature)),
    symptom=st.sampled_from(["", "xid 31"]),
    detector=st.sampled_from(["", "straggler"]),
    generation=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
joined = st.builds(
    lambda one, other: replace(
        one,
        otherwise=replace(
            one, failure_class=other.failure_class, culprit=other.culprit, entity=other.entity,
            nature=Nature.CLEAR, symptom="", detector="",
        ),
    ),
    incidents,
    incidents,
)  # fmt: skip
runs = st.lists(st.tuples(incidents | joined, st.booleans(), st.booleans(), st.integers(0, 2)), max_size=8)


cordons = st.builds(
    NodeChange,
    st.floats(-1e4, 1e6),
    st.sampled_from(NODES),
    st.sampled_from([ChangeKind.CORDON, ChangeKind.RETIRED]),
    st.sampled_from(list(Owner)),
)
situations = st.builds(
    Situation,
    good_steps=st.none() | st.integers(0, 30),
    nodes=st.frozensets(st.sampled_from(NODES)),
    n_ranks=st.integers(0, 8),
    slots=st.dictionaries(st.sampled_from(NODES), st.integers(0, 4)),
    can_shrink_to=st.integers(1, 4),
    fleet=st.lists(cordons, max_size=3).map(fold),
    cluster=st.builds(
        Cluster, st.integers(1, 40), st.dictionaries(st.sampled_from(NODES), st.sampled_from("ab"))
    ),
    sightings=st.lists(
        st.builds(
            Sighting,
            st.floats(0, 1e6),
            st.just("xid 31"),
            st.sampled_from(["GPU-1", "GPU-2"]),
            st.sampled_from(["run", "other"]),
            st.integers(0, 3),
        ),
        max_size=3,
    ).map(tuple),
    run=st.just("run"),
    is_clean_elsewhere=st.none() | st.booleans(),
    observing=st.sampled_from([frozenset(), frozenset({"straggler"})]),
)


@given(runs, situations, st.booleans())
def test_a_ledger_read_again_gives_the_same_decisions(
    run: list[tuple[Incident, bool, bool, int]], known: Situation, can_do_all: bool
) -> None:
    available = frozenset(Action) if can_do_all else TODAYS_ACTIONS
    past: list[Remembered] = []
    lines, decisions, committed = [], [], 0
    for incident, shells_alive, trains, progress in run:
        committed += progress
        still_trains = trains and can_do_all
        situation = replace(known, still_trains=still_trains)
        decision = decide(
            incident,
            [one.past(committed) for one in past],
            BUDGETS,
            shells_alive=shells_alive,
            available=available,
            situation=situation,
        )
        fields = incident_fields(
            incident,
            decision,
            shells_alive=shells_alive,
            committed_step=committed,
            available=available,
            situation=situation,
        )
        lines.append(json.dumps(fields))
        decisions.append(decision)
        past.append(
            Remembered(incident, decision.action, committed, decision.at_checkpoint, decision.in_place)
        )
    events = [Event(float(i), "incident", "coordinator", json.loads(line)) for i, line in enumerate(lines)]
    assert [decision for _, decision in replay(events, BUDGETS)] == decisions
    assert [incident_of(event) for event in events] == [incident for incident, *_ in run]


def test_a_ledger_on_disk_and_lines_of_other_kinds(tmp_path: Path) -> None:
    ledger = LedgerWriter(tmp_path / "ledger" / "coordinator.jsonl")
    lost = Incident(FailureClass.NODE_LOST, "node n1", "raylet died", 10, 1.0, 2.0)
    decision = decide(lost, [], BUDGETS, shells_alive=False)
    fields = incident_fields(
        lost,
        decision,
        shells_alive=False,
        committed_step=0,
        available=TODAYS_ACTIONS,
        situation=Situation(),
    )
    ledger.write("ranks_started", attempt=0, generation=0)
    ledger.write("incident", **fields)
    ledger.write("incident", **{**fields, "class": "of a later version"})
    assert [made for _, made in replay(read_ledger(tmp_path), BUDGETS)] == [decision]
