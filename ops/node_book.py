"""The book of nodes: an append-only file of changes that all runs of one storage share.

One JSON object a line, one write() a change, synced: whatever kills a writer, at most its last line is torn,
and readers pass over it. Who changes something holds a lock from reading to writing, so that two runs cannot
both take out the last node that the breaker allows. What changes mean is in quarantine.py.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jobs.errors import PacktrainError
from ops.decision import Decision
from ops.durable import describe_os_error
from ops.incident import Incident
from ops.ledger import JsonLinesWriter, Tail
from ops.quarantine import (
    DEFAULT_RULES,
    ChangeKind,
    Cluster,
    Fleet,
    NodeChange,
    Owner,
    QuarantineRules,
    apply_change,
    change_from_json,
    fold,
    strike,
)

BOOK_FILE = "nodes.jsonl"
"""Name in the folder of runs (run.storage)."""


class NodeBookError(PacktrainError):
    """The book cannot be written."""


class NodeBook:
    """Reads and extends the book of one storage folder."""

    def __init__(self, storage: Path) -> None:
        """Nothing is opened yet; a missing file is an empty book."""
        self.path = storage / BOOK_FILE

    def changes(self) -> list[NodeChange]:
        """All changes in the order written, damaged lines left out."""
        tail, lines = Tail(self.path), []
        while batch := tail.read():
            lines += batch
        return [change for line in lines if (change := change_from_json(line)) is not None]

    def fleet(self) -> Fleet:
        """The standing of all nodes."""
        return fold(self.changes())

    def fleet_if_readable(self) -> Fleet:
        """The standing of all nodes; a book that cannot be read holds nobody out."""
        with contextlib.suppress(OSError):
            return self.fleet()
        return Fleet()

    def change(self, plan: Callable[[Fleet], Iterable[NodeChange]]) -> Fleet:
        """Ask `plan` what to change, given the standing, and write it down before anybody else can.

        Blocks while another process does the same.

        Returns:
            The standing afterwards.

        Raises:
            QuarantineError: from plan, or because a change is not allowed; the changes before it are written.
            NodeBookError: the file cannot be written; it then holds none or some of the changes.
        """
        with self._locked():
            fleet = self.fleet()
            for change in plan(fleet):
                fleet = apply_change(fleet, change)
                writer = JsonLinesWriter(self.path)
                is_written = writer.append(change.to_json(), sync=True)
                writer.close()
                if not is_written:
                    raise NodeBookError(f"{self.path} could not be extended: is the disk full or read-only?")
            return fleet

    def strike(
        self, strikes: Sequence[NodeChange], cluster: Cluster, rules: QuarantineRules = DEFAULT_RULES
    ) -> tuple[Fleet, list[str]]:
        """Write strikes down, and the cordons that they lead to.

        Returns:
            The standing afterwards, and what the breaker refused.

        Raises:
            NodeBookError: the file cannot be written; it then holds none or some of the changes.
        """
        refusals = []

        def plan(fleet: Fleet) -> Iterator[NodeChange]:
            for one in strikes:
                changes, refused = strike(fleet, one, cluster, rules)
                for change in changes:
                    fleet = apply_change(fleet, change)
                    yield change
                if refused is not None:
                    refusals.append(refused)

        return self.change(plan), refusals

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(
                self.path.with_name(f".{BOOK_FILE}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise NodeBookError(f"{self.path} cannot be locked: {describe_os_error(error)}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def strikes_of(decision: Decision, incident: Incident, run: str, n_nodes: int) -> list[NodeChange]:
    """What a decision holds against nodes, as changes of the book. Pure.

    Args:
        decision: made by the policy.
        incident: what it was made about.
        run: run id.
        n_nodes: nodes that the run was on.
    """
    symptom = incident.symptom or incident.failure_class.value
    reason = next((line.strip() for line in incident.evidence.splitlines() if line.strip()), symptom)
    return [
        NodeChange(
            incident.detected_at,
            node,
            ChangeKind.STRIKE,
            Owner.POLICY,
            reason[:300],
            weight,
            symptom,
            run,
            n_nodes,
        )
        for node, weight in decision.strikes
    ]
