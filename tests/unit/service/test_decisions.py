"""The decider on real folders: what it knows after a restart, what it writes, what it does without."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.spec.job import ResilienceSection
from ops.decision import RESTARTS, Action
from ops.incident import FailureClass, Incident, Nature
from ops.ledger import LedgerWriter, read_ledger
from ops.node_book import NodeBook
from ops.replay import kept_off, replay
from ops.signal import Entity, EntityKind
from service.decisions import Decider, Nodes

BUDGETS = ResilienceSection(max_rank_restarts=2, max_no_progress=5)
KILLED = Incident(FailureClass.WORKER_KILLED, "rank 1 (node n1)", "SIGKILL", 7, 100.0, 101.0)
XID = Incident(
    FailureClass.GPU_HARDWARE,
    "GPU-1",
    "Xid 31",
    7,
    100.0,
    101.0,
    Entity(EntityKind.GPU, "GPU-1", "n1"),
    Nature.AMBIGUOUS,
    "xid 31",
)


def decider(run_dir: Path, writer: str = "coordinator", budgets: ResilienceSection = BUDGETS) -> Decider:
    made = Decider(run_dir, budgets, LedgerWriter(run_dir / "ledger" / f"{writer}.jsonl"))
    made.nodes = Nodes(frozenset({"n1", "n2"}), {"n1": 1, "n2": 1, "n3": 1}, 2, 1, 30)
    return made


def test_another_decider_knows_what_was_decided_and_a_run_that_was_ended_begins_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = decider(run_dir).decide(replace(KILLED, generation=(0, 0)), shells_alive=True)
    assert first.action is Action.RESTART_RANKS
    again = decider(run_dir, "supervisor").decide(replace(KILLED, generation=(0, 0)), shells_alive=True)
    assert again.action is Action.OBSERVE
    other = replace(KILLED, culprit="rank 0 (node n2)", generation=(0, 1))
    counted = decider(run_dir).decide(other, shells_alive=True)
    assert "restart 2 of 2" in counted.reason
    moved = decider(run_dir).decide(replace(KILLED, generation=(0, 2)), shells_alive=True)
    assert (moved.action, moved.exclude) == (Action.RESTART_WITHOUT_NODE, ("n1",))
    assert kept_off(read_ledger(run_dir)) == ("n1",)
    stop = decider(run_dir).decide(replace(KILLED, generation=(1, 0)), shells_alive=True)
    assert stop.action is Action.STOP
    assert kept_off(read_ledger(run_dir)) == ("n1",)
    LedgerWriter(run_dir / "ledger" / "supervisor.jsonl").write("run_ended", status="FAILED")
    assert kept_off(read_ledger(run_dir)) == ()
    anew = decider(run_dir).decide(replace(KILLED, generation=(2, 0)), shells_alive=True)
    assert "restart 1 of 2" in anew.reason
    events = read_ledger(run_dir)
    recorded = [event.text("reason") for event in events if event.kind == "incident"]
    assert [decision.reason for _, decision in replay(events, BUDGETS)] == recorded


def test_strikes_go_into_the_book_that_all_runs_share(tmp_path: Path) -> None:
    broken = replace(XID, nature=Nature.CLEAR, symptom="xid 79")
    decision = decider(tmp_path / "run").decide(broken, shells_alive=True)
    assert decision.strikes
    assert NodeBook(tmp_path).fleet().out_of_service == {"n1"}
    (event,) = read_ledger(tmp_path / "run")
    assert event.fields["entity"] == {"kind": "gpu", "name": "GPU-1", "node": "n1"}
    later = decider(tmp_path / "other").decide(KILLED, shells_alive=True)
    assert (later.action, later.exclude) == (Action.RESTART, ("n1",))
    (event,) = read_ledger(tmp_path / "other")
    assert event.fields["situation"]["out"] == ["n1"]


@pytest.mark.parametrize(
    ("verdict", "address", "step", "convicts"),
    [
        ("clean_here", "n9", 8, True),
        ("clean_here", "n1", 8, False),
        ("clean_here", "n9", 5, False),
        ("same_fault", "n9", 8, False),
    ],
)
def test_a_step_that_was_clean_on_another_machine_convicts_the_chip(
    tmp_path: Path, verdict: str, address: str, step: int, convicts: bool
) -> None:
    told = LedgerWriter(tmp_path / "run" / "ledger" / "replay.jsonl")
    told.write("step_replayed", step=step, verdict=verdict, addresses=[address])
    rank = Entity(EntityKind.RANK, "1", "n1")
    bad = replace(KILLED, failure_class=FailureClass.NUMERICS, entity=rank)
    decision = decider(tmp_path / "run").decide(bad, shells_alive=True)
    assert ("the chip computes wrongly" in decision.reason) is convicts
    (event,) = [one for one in read_ledger(tmp_path / "run") if one.kind == "incident"]
    known = event.fields["situation"].get("is_clean_elsewhere")
    assert known == (None if address == "n1" or step == 5 else verdict == "clean_here")


def test_an_ambiguous_fault_is_held_against_what_other_runs_saw(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    decider(tmp_path / "a").decide(XID, shells_alive=True)
    decision = decider(tmp_path / "b").decide(replace(XID, step=30), shells_alive=True)
    assert "it follows the GPU" in decision.reason
    assert NodeBook(tmp_path).fleet().out_of_service == {"n1"}


def test_a_detector_that_only_observes_is_heard_and_not_obeyed(tmp_path: Path) -> None:
    slow = replace(KILLED, failure_class=FailureClass.STRAGGLER, detector="straggler")
    told = decider(tmp_path / "run").decide(slow, shells_alive=True, still_trains=True)
    assert (told.action, told.wanted) == (Action.OBSERVE, Action.PAGE)
    trusted = decider(tmp_path / "other", budgets=ResilienceSection(observe=()))
    assert trusted.decide(slow, shells_alive=True, still_trains=True).action is Action.PAGE


def test_what_cannot_be_written_or_read_costs_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "nodes.jsonl").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger").write_text("not a folder")
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    broken = replace(XID, nature=Nature.CLEAR, generation=(0, 0))
    assert decider(tmp_path / "run").decide(broken, shells_alive=True).exclude == ("n1",)


happenings = st.lists(
    st.tuples(
        st.sampled_from([FailureClass.WORKER_KILLED, FailureClass.NODE_LOST, FailureClass.GPU_HARDWARE]),
        st.sampled_from(["n1", "n2", "n3"]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(happenings)
def test_whatever_happens_is_decided_once_off_the_nodes_out_of_service_and_again_the_same_from_the_ledger(
    happened: list[tuple[FailureClass, str, bool, bool, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own, ranks = decider(run_dir), (0, 0)
        for number, (failure_class, node, shells_alive, is_lost, is_ended) in enumerate(happened):
            entity = Entity(EntityKind.NODE, node)
            incident = Incident(
                failure_class, f"node {node}", "line", number, number, number, entity, generation=ranks
            )
            decision = own.decide(incident, shells_alive=shells_alive)
            out = NodeBook(run_dir.parent).fleet().out_of_service
            if decision.action in RESTARTS and not decision.in_place:
                assert out <= set(decision.exclude)
            if not decision.in_place or shells_alive:
                assert own.decide(incident, shells_alive=shells_alive).action is Action.OBSERVE
            ranks = (ranks[0], ranks[1] + 1) if decision.in_place else (ranks[0] + 1, 0)
            if is_ended:
                LedgerWriter(run_dir / "ledger" / "supervisor.jsonl").write("run_ended", status="FAILED")
            if is_lost or is_ended:
                own = decider(run_dir)
        events = read_ledger(run_dir)
        told = [(event.text("action"), event.text("reason")) for event in events if event.kind == "incident"]
        assert [(one.action.value, one.reason) for _, one in replay(events, BUDGETS)] == told
