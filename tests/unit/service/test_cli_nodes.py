"""`packtrain nodes`: what a human takes out of service stays out until a human takes it back."""

from pathlib import Path

import pytest

from ops.node_book import NodeBook
from ops.quarantine import ChangeKind, NodeChange, Owner
from tests.support.commands import command


def nodes(storage: Path, *words: str) -> str:
    answer = command("nodes", *words, "--storage", str(storage))
    assert answer.code == 0, answer.err
    return answer.out


def test_a_node_goes_out_of_service_and_comes_back(tmp_path: Path) -> None:
    assert "all are healthy" in nodes(tmp_path, "ls")
    nodes(tmp_path, "cordon", "10.0.0.3", "--reason", "fan is loud")
    (row,) = command("nodes", "ls", "--json", "--storage", str(tmp_path)).json
    assert (row["node"], row["state"], row["owner"]) == ("10.0.0.3", "quarantined", "human")
    assert row["reason"] == "fan is loud"
    assert "quarantined" in nodes(tmp_path, "ls")
    assert NodeBook(tmp_path).fleet().out_of_service == {"10.0.0.3"}
    nodes(tmp_path, "uncordon", "10.0.0.3")
    assert NodeBook(tmp_path).fleet().out_of_service == frozenset()


def test_a_human_lifts_what_automation_set_with_its_strikes(tmp_path: Path) -> None:
    by_policy = [
        NodeChange(1e9, "n1", kind, Owner.POLICY, reason="xid 79", weight=3.0)
        for kind in (ChangeKind.STRIKE, ChangeKind.CORDON)
    ]
    NodeBook(tmp_path).change(lambda _: by_policy)
    assert "by policy" in nodes(tmp_path, "ls")
    nodes(tmp_path, "uncordon", "n1")
    (row,) = command("nodes", "ls", "--json", "--storage", str(tmp_path)).json
    assert (row["state"], row["strikes"], row["owner"]) == ("healthy", 0, None)


@pytest.mark.parametrize("blocked", [False, True])
def test_what_cannot_be_done_is_said_in_one_text(tmp_path: Path, blocked: bool) -> None:
    storage = tmp_path / "storage"
    if blocked:
        storage.write_text("a file in the way")
    answer = command("nodes", "uncordon", "n1", "--storage", str(storage))
    assert answer.code == 2
    assert ("storage" if blocked else "node n1 is healthy") in answer.err
