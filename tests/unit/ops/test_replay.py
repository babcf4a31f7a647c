"""Decisions made again from the lines of a ledger."""

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.job import ResilienceSection
from ops.decision import TODAYS_ACTIONS, Action
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import Event, LedgerWriter, read_ledger
from ops.policy import PastIncident, decide
from ops.quarantine import Cluster
from ops.replay import incident_fields, incident_of, replay
from ops.signal import Entity, EntityKind
from ops.situation import Situation

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
runs = st.lists(st.tuples(incidents, st.booleans(), st.booleans(), st.integers(0, 2)), max_size=8)


@given(runs, st.booleans())
def test_a_ledger_read_again_gives_the_same_decisions(
    run: list[tuple[Incident, bool, bool, int]], can_do_all: bool
) -> None:
    available = frozenset(Action) if can_do_all else TODAYS_ACTIONS
    past: list[tuple[int, PastIncident]] = []
    lines, decisions, committed = [], [], 0
    for incident, shells_alive, trains, progress in run:
        committed += progress
        still_trains = trains and can_do_all
        history = [replace(one, progressed=committed > then) for then, one in past]
        decision = decide(
            incident,
            history,
            BUDGETS,
            shells_alive=shells_alive,
            available=available,
            situation=Situation(cluster=Cluster(40), still_trains=still_trains),
        )
        fields = incident_fields(
            incident,
            decision,
            shells_alive=shells_alive,
            committed_step=committed,
            still_trains=still_trains,
        )
        lines.append(json.dumps(fields))
        decisions.append(decision)
        past.append(
            (
                committed,
                PastIncident(incident, decision.action, False, decision.at_checkpoint, decision.in_place),
            )
        )
    events = [Event(float(i), "incident", "coordinator", json.loads(line)) for i, line in enumerate(lines)]
    again = replay(
        events,
        BUDGETS,
        available=available,
        situation_at=lambda event: Situation(
            cluster=Cluster(40), still_trains=bool(event.fields.get("still_trains"))
        ),
    )
    assert [decision for _, decision in again] == decisions
    assert [incident_of(event) for event in events] == [incident for incident, *_ in run]


def test_a_ledger_on_disk_and_lines_of_other_kinds(tmp_path: Path) -> None:
    ledger = LedgerWriter(tmp_path / "ledger" / "coordinator.jsonl")
    lost = Incident(FailureClass.NODE_LOST, "node n1", "raylet died", 10, 1.0, 2.0)
    decision = decide(lost, [], BUDGETS, shells_alive=False)
    fields = incident_fields(lost, decision, shells_alive=False, committed_step=0, still_trains=False)
    ledger.write("ranks_started", attempt=0, generation=0)
    ledger.write("incident", **fields)
    ledger.write("incident", **{**fields, "class": "of a later version"})
    assert [made for _, made in replay(read_ledger(tmp_path), BUDGETS)] == [decision]
