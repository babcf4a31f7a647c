"""The ledger of a real coordinator, read again: the policy decides the same about every incident."""

import asyncio
from pathlib import Path

from jobs.spec.job import ResilienceSection
from ops.incident import FailureClass, Incident
from ops.ledger import read_ledger
from ops.replay import replay
from service.coordinator import Coordinator

BUDGETS = ResilienceSection(max_rank_restarts=2, max_attempts=2, max_no_progress=3)
HAPPENED = (
    FailureClass.NODE_LOST,
    FailureClass.WORKER_KILLED,
    FailureClass.NODE_LOST,
    FailureClass.HANG,
    FailureClass.USER_CODE,
    FailureClass.HOST_OUT_OF_MEMORY,
    FailureClass.HOST_OUT_OF_MEMORY,
)


def test_the_ledger_of_a_coordinator_gives_the_same_decisions(tmp_path: Path) -> None:
    coordinator = Coordinator(str(tmp_path), BUDGETS.model_dump_json())

    async def run() -> None:
        for number, failure_class in enumerate(HAPPENED):
            await coordinator.begin_attempt(number, 1)
            incident = Incident(failure_class, f"node n{number}", "line", number, 1.0 + number, 2.0 + number)
            await coordinator.record_incident(incident)

    asyncio.run(run())
    events = read_ledger(tmp_path)
    recorded = [event.text("action") for event in events]
    assert {"RESTART", "RESTART_WITHOUT_NODE", "STOP"} == set(recorded)
    assert [decision.action.value for _, decision in replay(events, BUDGETS)] == recorded
    assert [decision.reason for _, decision in replay(events, BUDGETS)] == [e.text("reason") for e in events]
