"""The book of nodes on disk: torn lines, a full disk, and several processes that change it at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from ops.node_book import NodeBook, NodeBookError
from ops.quarantine import ChangeKind, Cluster, NodeChange, Owner, QuarantineError, strike


def cordon(node: str) -> NodeChange:
    return NodeChange(1.0, node, ChangeKind.CORDON, Owner.HUMAN, reason="fan")


def test_what_was_written_is_read_back_by_another(tmp_path: Path) -> None:
    assert NodeBook(tmp_path).fleet().records == {}
    NodeBook(tmp_path / "runs").change(lambda fleet: [cordon("a"), cordon("b")])
    assert NodeBook(tmp_path / "runs").fleet().out_of_service == {"a", "b"}


def test_a_torn_last_line_is_passed_over_and_kept_apart_from_the_next(tmp_path: Path) -> None:
    book = NodeBook(tmp_path)
    book.change(lambda _: [cordon("a")])
    whole = book.path.read_bytes()
    for length in range(1, len(whole)):
        book.path.write_bytes(whole + whole[:length])
        assert NodeBook(tmp_path).changes() == [cordon("a")]
    NodeBook(tmp_path).change(lambda _: [cordon("b")])
    assert NodeBook(tmp_path).fleet().out_of_service == {"a", "b"}


def test_a_change_that_is_not_allowed_is_not_written(tmp_path: Path) -> None:
    book = NodeBook(tmp_path)
    book.change(lambda _: [cordon("a")])
    lift = NodeChange(2.0, "a", ChangeKind.UNCORDON, Owner.POLICY)
    with pytest.raises(QuarantineError, match="only its own"):
        book.change(lambda _: [lift])
    assert book.changes() == [cordon("a")]


def test_a_book_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("a file in the way")
    with pytest.raises(NodeBookError, match="storage"):
        NodeBook(tmp_path / "storage").change(lambda _: [cordon("a")])
    blocked = NodeBook(tmp_path)
    blocked.path.mkdir()
    with pytest.raises(NodeBookError, match=r"nodes\.jsonl"):
        blocked.change(lambda _: [cordon("a")])


WRITER = """
import sys
from pathlib import Path
from ops.node_book import NodeBook
from ops.quarantine import ChangeKind, Cluster, NodeChange, Owner, strike
book, name = NodeBook(Path(sys.argv[1])), sys.argv[2]
for i in range(10):
    hit = NodeChange(1.0, f"{name}-{i}", ChangeKind.STRIKE, Owner.POLICY, weight=9.0)
    book.change(lambda fleet: strike(fleet, hit, Cluster(20))[0])
"""


def test_runs_that_take_nodes_out_at_once_do_not_exceed_the_breaker_together(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], cwd=root) for name in "abc"
    ]
    assert [writer.wait(timeout=50) for writer in writers] == [0, 0, 0]
    changes = NodeBook(tmp_path).changes()
    assert sum(change.kind is ChangeKind.STRIKE for change in changes) == 30
    assert sum(change.kind is ChangeKind.CORDON for change in changes) == 2
    one_more = NodeChange(2.0, "z", ChangeKind.STRIKE, Owner.POLICY, weight=9.0)
    assert strike(NodeBook(tmp_path).fleet(), one_more, Cluster(20))[1] is not None
